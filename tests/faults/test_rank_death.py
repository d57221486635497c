"""Death and silence of a rank end its requests with a clear error, and leave nothing behind."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from ray_harness import (
    deployment_config,
    holdings,
    is_running,
    prompts,
    read_all,
    request,
    shared_memory,
    tokens,
    wait_for,
)

from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.core.controller_messages import Rejected, SubmitRequest
from rayserve_paged.core.errors import NoReplicaError
from rayserve_paged.core.request import FinishReason

pytestmark = pytest.mark.ray


@contextlib.contextmanager
def running(
    name: str, address: str, timeouts: dict[str, float] | None = None
) -> Iterator[RayShell]:
    shell = RayShell(deployment_config(name, ranks=2, timeouts=timeouts), address)
    try:
        yield shell
    finally:
        shell.shutdown()


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_its_requests_with_an_error_that_names_it(
    cluster: str, kill: signal.Signals, rank: int
) -> None:
    name = f"death-{kill.name}-{rank}"
    segments = shared_memory()
    with running(name, cluster) as shell:
        ranks = asyncio.run(shell.stats()).ranks
        victim = ranks[rank].pid

        async def read_and_kill() -> tuple[list[tuple[FinishReason | None, str | None]], float]:
            requests = [request(f"d{i}", prompt, 3000) for i, prompt in enumerate(prompts(4))]
            reading = asyncio.create_task(read_all(shell, requests))
            while not any(ledger.unique_live_tokens for _, ledger in await shell.accounting()):
                await asyncio.sleep(0.01)
            killed_at = time.monotonic()
            os.kill(victim, kill)
            async with asyncio.timeout(60.0):
                streams = await reading
            took_s = time.monotonic() - killed_at
            return [(updates[-1].finish, updates[-1].error) for updates in streams], took_s

        ends, took_s = asyncio.run(read_and_kill())
        print(f"{kill.name} of rank {rank}: told after {took_s:.2f} s: {ends[0][1]}")
        assert [finish for finish, _ in ends] == [FinishReason.ERROR] * 4
        assert all(error is not None and f"rank {rank}" in error for _, error in ends)

        # The whole gang goes, and with it the room it held.
        wait_for(lambda: not any(is_running(one.pid) for one in ranks), "the end of all ranks")
        wait_for(lambda: holdings(name) == ["controller"], "an empty cluster")
        answer = asyncio.run(shell.submit(SubmitRequest(request("late", [1], 4))))
        assert isinstance(answer, Rejected)
        assert isinstance(answer.error, NoReplicaError)
        assert f"rank {rank}" in str(answer.error)
    assert holdings(name) == []
    wait_for(lambda: shared_memory() <= segments, "the end of all segments")


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
