"""What becomes of streams, replicas and processes when an endpoint starts, changes and ends."""

import os
import signal
import time

import psutil
import pytest
from ray import serve
from ray_harness import wait_for
from serve_harness import (
    Reader,
    ask,
    completion,
    controller_pid,
    endpoint_config,
    held_blocks,
    ingress_pids,
    num_recoveries,
    rank_pids,
    serve_port,
    start,
    stop,
    wait_until_gone,
)

from rayserve_cluster.placement import actors_of, groups_of
from rayserve_paged.experiments.leftovers import is_running

__all__ = ["serve_port"]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [5, 4, 3, 2, 1, 7]
LONG = completion(PROMPT, 3000)
"""Runs for many seconds."""


@pytest.fixture(scope="module")
def long_text(serve_port: int) -> str:
    """What `LONG` gives where nothing happens to it."""
    config = endpoint_config("oracle")
    start(config)
    text = Reader(serve_port, LONG).wait().whole
    stop(config)
    return text


def test_starting_an_endpoint_twice_leaves_its_deployment_and_its_streams_alone(
    serve_port: int, long_text: str
) -> None:
    config = endpoint_config("twice")
    start(config)
    controller, ranks, ingresses = controller_pid(config), rank_pids(config), ingress_pids()
    reader = Reader(serve_port, LONG).wait_for_text()
    start(config)
    assert reader.wait().whole == long_text
    assert Reader(serve_port, LONG).wait().whole == long_text
    assert controller_pid(config) == controller
    assert rank_pids(config) == ranks
    assert not ingress_pids() & ingresses
    assert held_blocks(config) == 0
    stop(config)


def test_a_changed_configuration_drains_the_streams_of_the_one_before(
    serve_port: int, long_text: str
) -> None:
    before = endpoint_config("changes")
    after = endpoint_config("changes", **{"cache.num_blocks": 300})
    assert before.deployment().name != after.deployment().name
    start(before)
    reader = Reader(serve_port, LONG).wait_for_text()
    start(after)
    assert reader.wait().whole == long_text
    assert ask(serve_port, "GET", "/v1/models")[1]["data"][0]["max_model_len"] == 4096
    assert Reader(serve_port, LONG).wait().whole == long_text
    wait_until_gone(before)
    assert len(rank_pids(after)) == 1
    stop(after)


def test_what_only_the_ingress_is_configured_by_leaves_the_deployment_alone(
    serve_port: int,
) -> None:
    before = endpoint_config("renamed")
    after = endpoint_config("renamed", **{"serve.served_model_name": "other"})
    start(before)
    controller = controller_pid(before)
    start(after)
    assert ask(serve_port, "GET", "/v1/models")[1]["data"][0]["id"] == "other"
    assert controller_pid(after) == controller
    stop(after)


def test_deleting_an_endpoint_lets_its_streams_end_and_then_takes_all_of_it_down(
    serve_port: int, long_text: str
) -> None:
    config = endpoint_config("deleted")
    start(config)
    pids = [controller_pid(config), *rank_pids(config)]
    reader = Reader(serve_port, LONG).wait_for_text()
    serve.delete(config.name)
    assert reader.wait().whole == long_text
    wait_until_gone(config)
    wait_for(lambda: not any(map(is_running, pids)), "the end of its processes")


def test_a_drain_that_takes_too_long_cuts_streams_off_and_none_looks_complete(
    serve_port: int, long_text: str
) -> None:
    config = endpoint_config("impatient", **{"serve.drain_timeout_s": 1.0})
    start(config)
    reader = Reader(serve_port, LONG).wait_for_text()
    stop(config)
    reader.wait()
    assert not reader.is_done
    assert reader.finish_reason is None
    assert reader.error is not None or reader.broke is not None
    assert long_text.startswith(reader.text)


def test_clients_that_leave_take_nothing_from_the_streams_of_others(
    serve_port: int, long_text: str
) -> None:
    config = endpoint_config("leavers")
    start(config)
    # Whoever comes first begins the polls for all.
    leavers = [Reader(serve_port, LONG).wait_for_text()]
    stays = Reader(serve_port, LONG).wait_for_text()
    for _ in range(4):
        leavers[-1].leave()
        leavers[-1].wait()
        leavers.append(Reader(serve_port, LONG).wait_for_text())
    leavers[-1].leave()
    recoveries: list[int] = []
    while stays.is_alive():
        recoveries += num_recoveries(config)
        time.sleep(0.1)
    assert stays.whole == long_text
    assert recoveries, "its ingress has reported nothing"
    assert not any(recoveries), "a stream went on elsewhere, though nothing had died"
    wait_for(lambda: held_blocks(config) == 0, "the blocks of those who have left")
    stop(config)


def test_a_killed_ingress_leaves_the_streams_of_the_other_one_alone_and_frees_its_own(
    serve_port: int, long_text: str
) -> None:
    fields = {"serve.num_ingress_replicas": 2, "timeouts.consumer_lease_s": 3.0}
    config = endpoint_config("two", **fields)
    start(config)
    readers = [Reader(serve_port, LONG) for _ in range(6)]
    for reader in readers:
        reader.wait_for_text()
    victim = min(ingress_pids())
    os.kill(victim, signal.SIGKILL)
    whole = [reader for reader in readers if reader.wait().is_done]
    cut = [reader for reader in readers if not reader.is_done]
    assert whole, "Serve gave all streams to one ingress"
    assert cut, "Serve gave no stream to the one that was killed"
    assert all(reader.whole == long_text for reader in whole)
    for reader in cut:
        assert reader.finish_reason is None
        assert reader.error is not None or reader.broke is not None
        assert long_text.startswith(reader.text)
    wait_for(lambda: held_blocks(config) == 0, "the blocks of the streams that were cut off")
    wait_for(lambda: len(ingress_pids()) == 2, "the next ingress")
    assert Reader(serve_port, LONG).wait().whole == long_text
    stop(config)


def test_an_endpoint_that_cannot_start_says_why_and_leaves_nothing(serve_port: int) -> None:
    del serve_port
    config = endpoint_config("hopeless", **{"parallel.tensor_parallel_size": 7})
    with pytest.raises(RuntimeError):
        start(config)
    status = serve.status().applications["hopeless"]
    assert "tensor_parallel_size" in str(status)
    stop(config)


def test_b75_health_is_that_of_the_ranks(serve_port: int) -> None:
    config = endpoint_config("health", **{"recovery.restart_delay_s": 0.0})
    start(config)
    assert ask(serve_port, "GET", "/health") == (200, {"status": "ok"})
    for is_busy in (False, True):
        (rank,) = rank_pids(config)
        reader = Reader(serve_port, LONG).wait_for_text() if is_busy else None
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: ask(serve_port, "GET", "/health")[0] == 503, "health to fail")
        wait_for(lambda: ask(serve_port, "GET", "/health")[0] == 200, "health to come back")
        if reader is not None:
            assert reader.wait().is_done
    stop(config)


def test_b95_nothing_of_an_endpoint_listens_beyond_loopback(serve_port: int) -> None:
    config = endpoint_config("sockets", **{"parallel.num_replicas": 2})
    start(config)
    own = psutil.Process()
    family = {own.pid, *(child.pid for child in own.children(recursive=True))}
    listening = {
        (*connection.laddr, psutil.Process(connection.pid).name())
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.pid in family
    }
    assert any(port == serve_port for _, port, _ in listening)
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    open_to_all = [one for one in listening if one[0] not in loopback]
    assert open_to_all == []
    stop(config)
    assert actors_of(config.deployment().name) == []
    assert groups_of(config.deployment().name) == {}
