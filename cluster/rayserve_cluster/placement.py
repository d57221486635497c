"""Names and room of a deployment on a Ray cluster: namespaces, gangs, detached placement groups.

A replica's ranks form a gang: one placement group, packed on one node, so that its ranks talk over
loopback or NVLink. Everything is detached, since the children of a killed detached actor die with
it otherwise, and everything carries its deployment's name, so that `down` finds all of it.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray._private.state import actors
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.ids import Incarnation, ReplicaId

CONTROLLER_NAME: Final = "controller"

_PREFIX: Final = "rayserve-paged."
# Sixteen ranks fit on two cores: where there is no GPU, ranks share what there is.
_CPU_RANK: Final[Mapping[str, float]] = {"CPU": 0.125}
_GPU_RANK: Final[Mapping[str, float]] = {"GPU": 1.0, "CPU": 1.0}
_MIN_LOOK_S: Final = 0.01
_MAX_LOOK_S: Final = 0.5

logger = logging.getLogger(__name__)


def namespace_of(deployment: str) -> str:
    """Return the Ray namespace that holds all actors of a deployment."""
    return f"{_PREFIX}{deployment}"


def replica_ids(config: DeploymentConfig) -> list[ReplicaId]:
    """Return the names of a deployment's replicas."""
    return [ReplicaId(f"r{index}") for index in range(config.parallel.num_replicas)]


def rank_name(replica_id: ReplicaId, incarnation: Incarnation, rank: int) -> str:
    """Return the name of a rank's actor within its deployment's namespace."""
    return f"{replica_id}.{incarnation}.rank{rank}"


def group_name(deployment: str, replica_id: ReplicaId, incarnation: Incarnation) -> str:
    """Return the cluster-wide name of a gang's placement group."""
    # The slash occurs in no deployment's name: "a" cannot claim the groups of "a.b".
    return f"{namespace_of(deployment)}/{replica_id}.{incarnation}"


def life_of(group: str) -> tuple[ReplicaId, Incarnation]:
    """Return whose placement group it is: the inverse of `group_name`."""
    replica_id, _, incarnation = group.rpartition("/")[2].rpartition(".")
    return ReplicaId(replica_id), Incarnation(int(incarnation))


def rank_resources(cluster: Mapping[str, float]) -> dict[str, float]:
    """Return what one rank asks for.

    Args:
        cluster: Total resources of the cluster, as `ray.cluster_resources()` gives them.

    Returns:
        A GPU and a core where the cluster has GPUs, a fraction of a core elsewhere.
    """
    return dict(_GPU_RANK if cluster.get("GPU", 0.0) > 0.0 else _CPU_RANK)


def spread(
    num_replicas: int,
    ranks: Sequence[Mapping[str, float]],
    nodes: Mapping[str, Mapping[str, float]],
) -> list[str | None]:
    """Choose a node for each replica: the one with the most room left for gangs like it.

    Args:
        num_replicas: Replicas to place.
        ranks: What each rank of one replica asks for.
        nodes: Total resources of each node, by node id.

    Returns:
        A node id for each replica, or None where no node has room. The choice is a hint: others
        may have taken the room in the meantime.
    """
    asked: dict[str, float] = {}
    for rank in ranks:
        for name, amount in rank.items():
            asked[name] = asked.get(name, 0.0) + amount
    room = {
        node: min(resources.get(name, 0.0) / amount for name, amount in asked.items())
        for node, resources in nodes.items()
    }
    chosen: list[str | None] = []
    for _ in range(num_replicas):
        # By id among equals, so that the same cluster gives the same placement.
        node = min(room, key=lambda node: (-room[node], node), default=None)
        if node is None or room[node] < 1.0:
            chosen.append(None)
            continue
        room[node] -= 1.0
        chosen.append(node)
    return chosen


def alive_nodes() -> dict[str, Mapping[str, float]]:
    """Return the total resources of each living node of the cluster, by node id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def create_group(
    name: str, ranks: Sequence[Mapping[str, float]], node_id: str | None
) -> PlacementGroup:
    """Ask for a gang's room on one node; returns at once.

    Args:
        name: Cluster-wide name of the group.
        ranks: What each rank asks for.
        node_id: Node to prefer, or None.
    """
    group: PlacementGroup = placement_group(
        [dict(rank) for rank in ranks],
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        _soft_target_node_id=node_id,
    )
    return group


async def wait_for_group(
    deployment: str, group: PlacementGroup, ranks: Sequence[Mapping[str, float]], timeout_s: float
) -> str:
    """Wait until a gang has its room.

    Returns:
        The id of its node.

    Raises:
        DeploymentError: No node had room within `timeout_s`; names what was asked for and what
            the cluster has. An infeasible group stays pending for ever by itself.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    pause_s = _MIN_LOOK_S
    while True:
        # Polled: `ready()` gives an object that is never resolved, and leaks, on an infeasible
        # group.
        row = placement_group_table(group)
        if row.get("state") == "CREATED":
            return str(row["bundles_to_node_id"][0])
        if clock() >= deadline:
            raise DeploymentError(deployment, f"{_shortage(ranks)} within {timeout_s:g} s")
        await asyncio.sleep(pause_s)
        pause_s = min(2.0 * pause_s, _MAX_LOOK_S)


def _shortage(ranks: Sequence[Mapping[str, float]]) -> str:
    asked = f"{len(ranks)} ranks of {_amounts(ranks[0])} each on one node"
    has = "; ".join(_amounts(resources) for resources in alive_nodes().values())
    return f"no room for a replica of {asked}: the nodes have in all {has}, and did not free it"


def _amounts(resources: Mapping[str, float]) -> str:
    parts = [f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU")]
    return " and ".join(parts)


def groups_of(deployment: str) -> dict[str, PlacementGroup]:
    """Return the placement groups that a deployment still holds or waits for, by name."""
    prefix = f"{namespace_of(deployment)}/"
    return {
        row["name"]: PlacementGroup(ray.PlacementGroupID(bytes.fromhex(row["placement_group_id"])))
        for row in placement_group_table().values()
        if row["name"].startswith(prefix) and row["state"] != "REMOVED"
    }


def remove_group(group: PlacementGroup) -> None:
    """Give a gang's room back; Ray kills what runs in it, stopped processes included.

    Measured: a SIGSTOPped rank is gone 0.3 s later, and 5 s later if `ray.kill` is called too.
    """
    remove_placement_group(group)


def num_restarts() -> int:
    """Return how many times Ray has started the actor that asks anew.

    It is counted by the cluster's GCS, with each start: no two lives of an actor see the same.
    """
    row = actors(ray.get_runtime_context().get_actor_id())
    return int(row["NumRestarts"])


def actors_of(deployment: str) -> list[str]:
    """Return the names of the living actors of a deployment."""
    namespace = namespace_of(deployment)
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == namespace)
