"""A cluster of several nodes, all of them on this machine."""

import asyncio

import pytest
from ray.cluster_utils import Cluster
from ray_harness import deployment_config

from rayserve_cluster.ray_shell import RayShell

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_replicas_are_spread_over_the_nodes_and_their_ranks_packed() -> None:
    # Two nodes on this machine.
    two_nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        two_nodes.add_node(num_cpus=1)
        shell = RayShell(deployment_config("spread", ranks=2, replicas=2), two_nodes.address)
        ranks = asyncio.run(shell.stats()).ranks
        nodes = {
            replica: {r.node_id for r in ranks if r.replica_id == replica}
            for replica in ("r0", "r1")
        }
        shell.shutdown()
    finally:
        two_nodes.shutdown()
    assert [len(nodes["r0"]), len(nodes["r1"])] == [1, 1]
    assert nodes["r0"] != nodes["r1"]
