"""A rank that is killed or stopped takes its gang with it, and no token of any stream."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Sequence

import pytest
from ray_harness import (
    deployment_config,
    holdings,
    prompts,
    read_all,
    read_all_after,
    request,
    tokens,
    undisturbed,
    wait_for,
)

from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.core.controller_messages import Rejected, SubmitRequest
from rayserve_paged.core.errors import NoReplicaError
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.experiments.leftovers import is_running, shared_memory

pytestmark = pytest.mark.ray


@contextlib.contextmanager
def running(
    name: str, address: str, timeouts: dict[str, float] | None = None, *, restart: bool = True
) -> Iterator[RayShell]:
    config = deployment_config(name, ranks=2, timeouts=timeouts, restart=restart)
    shell = RayShell(config, address)
    try:
        yield shell
    finally:
        shell.shutdown()


def sampled(one: Request) -> Request:
    return dataclasses.replace(one, params=dataclasses.replace(one.params, temperature=1.0, seed=3))


def four_requests(max_tokens: int) -> list[Request]:
    """Two that are greedy, and two that are drawn."""
    requests = [request(f"d{i}", prompt, max_tokens) for i, prompt in enumerate(prompts(4))]
    return [*requests[:2], *map(sampled, requests[2:])]


def read_and_kill(
    shell: RayShell, requests: Sequence[Request], victim: int, sent: signal.Signals
) -> list[list[StreamUpdate]]:
    """Kill a process in the middle of some streams; returns these."""
    return asyncio.run(read_all_after(shell, requests, lambda: os.kill(victim, sent)))


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_b71_a_lost_rank_costs_no_token_and_its_gang_is_started_again(
    cluster: str, kill: signal.Signals, rank: int
) -> None:
    name = f"death-{kill.name}-{rank}"
    segments = shared_memory()
    requests = four_requests(300)
    with running(name, cluster) as shell:
        ranks = asyncio.run(shell.stats()).ranks
        streams = read_and_kill(shell, requests, ranks[rank].pid, kill)
        assert [updates[-1].finish for updates in streams] == [FinishReason.LENGTH] * 4
        assert [tokens(updates) for updates in streams] == undisturbed(requests)
        # The whole gang goes, and the next one is in its place.
        wait_for(lambda: not any(is_running(one.pid) for one in ranks), "the end of all ranks")
        assert dict(asyncio.run(shell.status()).replicas) == {"r0": 1}
        assert holdings(name) == [
            "controller",
            "r0.1.rank0",
            "r0.1.rank1",
            f"rayserve-paged.{name}/r0.1",
        ]
        ((_, ledger),) = asyncio.run(shell.accounting())
        assert ledger.num_held_blocks == 0
        assert ledger.num_free_blocks + ledger.num_cached_blocks == 256
    assert holdings(name) == []
    wait_for(lambda: shared_memory() <= segments, "the end of all segments")


def test_where_none_is_started_again_requests_end_with_an_error_that_names_the_rank(
    cluster: str,
) -> None:
    with running("mortal", cluster, restart=False) as shell:
        ranks = asyncio.run(shell.stats()).ranks
        streams = read_and_kill(shell, four_requests(3000), ranks[1].pid, signal.SIGKILL)
        ends = [updates[-1] for updates in streams]
        assert [end.finish for end in ends] == [FinishReason.ERROR] * 4
        assert all(end.error is not None and "rank 1" in end.error for end in ends)

        wait_for(lambda: not any(is_running(one.pid) for one in ranks), "the end of all ranks")
        wait_for(lambda: holdings("mortal") == ["controller"], "an empty cluster")
        answer = asyncio.run(shell.submit(SubmitRequest(request("late", [1], 4))))
        assert isinstance(answer, Rejected)
        assert isinstance(answer.error, NoReplicaError)
        assert "rank 1" in str(answer.error)


@pytest.mark.slow
def test_a_replica_that_is_idle_for_ten_times_the_timeout_of_its_group_still_serves(
    cluster: str,
) -> None:
    with running("idle", cluster, {"collective_timeout_s": 1.0}) as shell:
        first = asyncio.run(read_all(shell, [request("i0", [1, 2, 3], 8)]))
        time.sleep(10.0)
        second = asyncio.run(read_all(shell, [request("i1", [1, 2, 3], 8)]))
        assert tokens(second[0]) == tokens(first[0])
        assert len(tokens(first[0])) == 8
