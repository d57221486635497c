"""Known faults of processes, their room and what they leave: cases by their ids and numbers."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import worker as ray_worker
from ray_harness import (
    deployment_config,
    environment,
    holdings,
    read_all,
    request,
    tokens,
    wait_for,
)

from rayserve_cluster.placement import namespace_of, rank_name
from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.core.errors import ControllerAwayError, InvalidInputError
from rayserve_paged.core.ids import Incarnation, ReplicaId
from rayserve_paged.experiments.leftovers import is_running

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

R0 = ReplicaId("r0")


def ranks_of(shell: RayShell) -> list[int]:
    return [rank.pid for rank in asyncio.run(shell.stats()).ranks]


def life_of(shell: RayShell) -> Incarnation | None:
    try:
        return asyncio.run(shell.status()).replicas.get(R0)
    except ControllerAwayError:
        return None


def serve(shell: RayShell, name: str) -> None:
    assert len(tokens(asyncio.run(read_all(shell, [request(name, [1, 2], 4)]))[0])) == 4


@pytest.mark.parametrize("way", ["SIGKILL", "ray.kill"])
def test_b73_no_process_of_a_killed_gang_is_left_in_five_rounds(cluster: str, way: str) -> None:
    shell = RayShell(deployment_config("b73", ranks=2), cluster)
    try:
        life = Incarnation(0)
        for index in range(5):
            pids = ranks_of(shell)
            assert len(pids) == 2
            if way == "SIGKILL":
                os.kill(pids[0], signal.SIGKILL)
            else:
                name = rank_name(R0, life, 0)
                ray.kill(ray.get_actor(name, namespace=namespace_of("b73")))
            life = Incarnation(life + 1)
            wait_for(lambda life=life: life_of(shell) == life, "the next life")
            wait_for(lambda pids=pids: not any(map(is_running, pids)), "the end of both ranks")
            serve(shell, f"q{index}")
    finally:
        shell.shutdown()


DRIVER = """
import asyncio, os
from ray_harness import deployment_config, read_all, request
from rayserve_cluster.ray_shell import RayShell

config = deployment_config("b73c", ranks=2, timeouts={"deployment_lease_s": 6.0})
shell = RayShell(config, "auto")
asyncio.run(read_all(shell, [request("q", [1, 2, 3], 8)]))
print(*(rank.pid for rank in asyncio.run(shell.stats()).ranks), flush=True)
os._exit(0)
"""


def test_b73_a_driver_that_exits_without_a_shutdown_leaves_no_process(cluster: str) -> None:
    for _round in range(5):
        command = [sys.executable, "-c", DRIVER]
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
        pids = [int(pid) for pid in ended.stdout.split()]
        assert len(pids) == 2, ended.stderr
        wait_for(lambda: holdings("b73c") == [], "an empty cluster")
        wait_for(lambda pids=pids: not any(map(is_running, pids)), "the end of both ranks")


def test_b73_a_rank_that_fails_while_it_starts_leaves_no_process(cluster: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for _round in range(5):
        with pytest.raises(InvalidInputError):
            RayShell(deployment_config("b73d", ranks=2, model="/no/such/model"), cluster)
        wait_for(lambda: holdings("b73d") == [], "an empty cluster")

    def ranks_left() -> list[str]:
        children = psutil.Process().children(recursive=True)
        names = [c.name() for c in children if c.pid not in before and is_running(c.pid)]
        return [name for name in names if "Worker" in name]

    wait_for(lambda: not ranks_left(), "the end of all ranks")


def free_cores() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


@pytest.mark.prove
def test_b74_no_placement_group_and_no_room_is_lost_in_thirty_rounds(cluster: str) -> None:
    all_cores = ray.cluster_resources()["CPU"]
    wait_for(lambda: free_cores() == all_cores, "an empty cluster")

    def nothing_is_left() -> bool:
        return holdings("b74") == [] and free_cores() == all_cores

    for index in range(20):
        shell = RayShell(deployment_config("b74", ranks=2), cluster)
        serve(shell, f"r{index}")
        shell.shutdown()
        wait_for(nothing_is_left, f"all cores after round {index}")
    for index in range(5):
        with pytest.raises(InvalidInputError):
            RayShell(deployment_config("b74", ranks=2, model="/no/such/model"), cluster)
        wait_for(nothing_is_left, f"all cores after failed start {index}")
    for index in range(5):
        shell = RayShell(deployment_config("b74", ranks=2), cluster)
        pids = ranks_of(shell)
        os.kill(asyncio.run(shell.status()).pid, signal.SIGKILL)
        os.kill(pids[0], signal.SIGKILL)
        # What both have left is taken over, and ended, by those that follow on them.
        serve(shell, f"k{index}")
        shell.shutdown()
        wait_for(nothing_is_left, f"all cores after double death {index}")


def test_b83_ten_thousand_steps_leave_nothing_in_the_object_store(cluster: str) -> None:
    shell = RayShell(deployment_config("b83", ranks=2), cluster)
    try:
        serve(shell, "warm")
        before = {rank.rank: rank.rss_bytes for rank in asyncio.run(shell.stats()).ranks}
        store = ray.available_resources()["object_store_memory"]
        num_steps = 0
        for index in range(4):
            one = request(f"s{index}", [index, 2, 3], 2500)
            num_steps += len(tokens(asyncio.run(read_all(shell, [one]))[0]))
        assert num_steps == 10_000
        wait_for(
            lambda: ray.available_resources()["object_store_memory"] >= store - 50 * 2**20,
            "the object store as it was",
        )
        after = {rank.rank: rank.rss_bytes for rank in asyncio.run(shell.stats()).ranks}
        assert all(abs(after[rank] - before[rank]) < 100 * 2**20 for rank in before)
        node = ray_worker._global_node
        assert node is not None
        session = Path(node.get_session_dir_path())
        assert list(session.rglob("*spill*/*")) == []
    finally:
        shell.shutdown()
