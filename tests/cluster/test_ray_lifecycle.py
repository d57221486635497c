"""Starting, failing to start, and ending deployments, with nothing left of them."""

import asyncio
import signal
import socket
import subprocess
import sys

import pytest
import ray
from ray_harness import (
    deployment_config,
    environment,
    holdings,
    read_all,
    request,
    tokens,
    wait_for,
)

from rayserve_cluster.launch import down
from rayserve_cluster.placement import CONTROLLER_NAME, namespace_of
from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.core.errors import DeploymentError, InvalidInputError
from rayserve_paged.experiments.leftovers import is_running, shared_memory

pytestmark = pytest.mark.ray

# A driver in a process of its own: serves one request, says so, and does as it is told.
DRIVER = """
import asyncio, os, sys, time
import psutil
from ray_harness import deployment_config, read_all, request, tokens
from rayserve_cluster.ray_shell import RayShell

name, address, then = sys.argv[1:]
config = deployment_config(name, ranks=2, timeouts={"deployment_lease_s": 3.0})
shell = RayShell(config, address or None)
streams = asyncio.run(read_all(shell, [request("q", [1, 2, 3], 8)]))
assert len(tokens(streams[0])) == 8
ranks = [rank.pid for rank in asyncio.run(shell.stats()).ranks]
children = [child.pid for child in psutil.Process().children(recursive=True)]
print(*ranks, *children, flush=True)
if then == "shutdown":
    shell.shutdown()
else:
    time.sleep(600)
"""


def start_driver(
    name: str, address: str | None, then: str
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a driver; returns it and the processes of its deployment, once it has served."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, name, address or "", then],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    line = driver.stdout.readline()
    driver.stdout.close()
    return driver, [int(pid) for pid in line.split()]


def test_a_deployment_that_is_kept_alive_outlives_its_driver_until_it_is_taken_down(
    cluster: str,
) -> None:
    config = deployment_config("kept", keep_alive=True, timeouts={"deployment_lease_s": 1.0})
    shell = RayShell(config, cluster)
    pid = asyncio.run(shell.stats()).ranks[0].pid
    shell.shutdown()

    again = RayShell(config, cluster)
    assert asyncio.run(again.stats()).ranks[0].pid == pid
    assert len(tokens(asyncio.run(read_all(again, [request("k", [1], 3)]))[0])) == 3
    again.shutdown()

    # From a process that knows nothing of this cluster.
    code = "from rayserve_cluster.launch import down; print(*down('kept'), sep='\\n')"
    removed = subprocess.run(
        [sys.executable, "-c", code], env=environment(), check=True, capture_output=True, text=True
    )
    assert removed.stdout.split() == ["controller", "r0.0.rank0", "rayserve-paged.kept/r0.0"]
    assert holdings("kept") == []
    assert down("kept", cluster) == ()
    wait_for(lambda: not is_running(pid), "the end of the rank")


def test_a_deployment_without_room_says_what_it_asked_for_and_what_there_is(
    cluster: str,
) -> None:
    with pytest.raises(DeploymentError) as caught:
        RayShell(deployment_config("large", ranks=64, timeouts={"start_timeout_s": 2.0}), cluster)
    assert "64 ranks of 0.125 CPU and 0 GPU each on one node" in str(caught.value)
    num_cores = ray.cluster_resources()["CPU"]
    assert f"the nodes have in all {num_cores:g} CPU and 0 GPU" in str(caught.value)
    wait_for(lambda: holdings("large") == [], "an empty cluster")


def test_what_a_rank_refuses_reaches_the_driver_as_the_same_error(cluster: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        RayShell(deployment_config("refused", ranks=2, model="/no/such/model"), cluster)
    assert "/no/such/model" in str(caught.value)
    wait_for(lambda: holdings("refused") == [], "an empty cluster")


@pytest.mark.parametrize("listens", [False, True])
def test_an_address_without_a_cluster_is_named(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", _refuse)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        # Ray itself is asked only where somebody listens: it would go on trying for minutes.
        why = "nobody there" if listens else "Connection refused"
        with pytest.raises(DeploymentError, match=f"no Ray cluster at address='{address}'.*{why}"):
            RayShell(deployment_config("nowhere"), address)


def _refuse(**_: object) -> None:
    raise ConnectionError("nobody there")


def test_ranks_that_their_controller_left_give_back_their_room(cluster: str) -> None:
    shell = RayShell(
        deployment_config("orphan", ranks=2, timeouts={"deployment_lease_s": 2.0}), cluster
    )
    pids = [rank.pid for rank in asyncio.run(shell.stats()).ranks]
    ray.kill(ray.get_actor(CONTROLLER_NAME, namespace=namespace_of("orphan")))
    wait_for(lambda: holdings("orphan") == [], "an empty cluster")
    wait_for(lambda: not any(map(is_running, pids)), "the end of the ranks")
    with pytest.raises(DeploymentError, match="its controller is gone"):
        asyncio.run(read_all(shell, [request("o", [1], 3)]))
    shell.shutdown()


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_once_its_lease_has_run_out(cluster: str) -> None:
    driver, pids = start_driver("widow", "auto", "wait")
    assert len(holdings("widow")) == 1 + 2 + 1
    driver.kill()
    driver.wait()
    wait_for(lambda: holdings("widow") == [], "an empty cluster")
    wait_for(lambda: not any(map(is_running, pids)), "the end of the ranks")


@pytest.mark.slow
@pytest.mark.parametrize("then", ["shutdown", "wait"])
def test_the_end_of_a_local_cluster_leaves_no_process_and_no_segment(then: str) -> None:
    segments = shared_memory()
    driver, pids = start_driver("local", None, then)
    assert len(pids) > 2
    if then == "wait":
        driver.send_signal(signal.SIGKILL)
    assert driver.wait() == (0 if then == "shutdown" else -signal.SIGKILL)
    # Ray's own agents of a node try for a minute to report that it died.
    wait_for(lambda: not any(map(is_running, pids)), "the end of all processes")
    wait_for(lambda: shared_memory() <= segments, "the end of all segments")


DISCONNECTED = """
import asyncio
import ray
from ray_harness import deployment_config, request
from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.core.controller_messages import SubmitRequest

shell = RayShell(deployment_config("alone"))
ray.shutdown()
try:
    asyncio.run(shell.submit(SubmitRequest(request("q", [1, 2, 3], 8))))
except DeploymentError as error:
    print(error)
shell.shutdown()
print(ray.is_initialized())
"""


@pytest.mark.slow
def test_a_process_that_was_disconnected_hears_it_and_starts_no_other_cluster() -> None:
    command = [sys.executable, "-c", DISCONNECTED]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        "deployment 'alone': this process has left its Ray cluster",
        "False",
    ]
    assert "Traceback" not in ended.stderr
