"""A controller that is killed is started anew, and its replicas and streams go on."""

import asyncio
import os
import signal

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
from rayserve_paged.core.controller_messages import Placed, SubmitRequest
from rayserve_paged.core.errors import ControllerAwayError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.experiments.leftovers import is_running

pytestmark = pytest.mark.ray


def term_of(shell: RayShell) -> int:
    try:
        return asyncio.run(shell.status()).term
    except ControllerAwayError:
        return -1


def test_a_killed_controller_finds_its_replicas_and_every_stream_goes_on(cluster: str) -> None:
    requests = [request(f"c{i}", prompt, 400) for i, prompt in enumerate(prompts(4))]
    expected = undisturbed(requests)
    shell = RayShell(deployment_config("orphans", ranks=2, replicas=2), cluster)
    try:
        before = asyncio.run(shell.status())
        assert before.term == 0
        ranks = [rank.pid for rank in asyncio.run(shell.stats()).ranks]
        killed = read_all_after(shell, requests, lambda: os.kill(before.pid, signal.SIGKILL))
        streams = asyncio.run(killed)
        assert [updates[-1].finish for updates in streams] == [FinishReason.LENGTH] * 4
        assert [tokens(updates) for updates in streams] == expected
        wait_for(lambda: term_of(shell) == 1, "the next controller")
        wait_for(lambda: len(asyncio.run(shell.status()).replicas) == 2, "its replicas")
        # The same processes, which nobody has started again.
        assert dict(asyncio.run(shell.status()).replicas) == dict(before.replicas)
        assert [rank.pid for rank in asyncio.run(shell.stats()).ranks] == ranks
        answer = asyncio.run(shell.submit(SubmitRequest(request("late", [1, 2], 2))))
        assert isinstance(answer, Placed)
        # A guest that comes now hears from the new controller what requests are checked against.
        guest = RayShell(deployment_config("orphans", ranks=2, replicas=2), cluster)
        assert guest.limits == shell.limits
        guest.shutdown()
    finally:
        shell.shutdown()
    assert holdings("orphans") == []
    wait_for(lambda: not any(map(is_running, ranks)), "the end of the ranks")


@pytest.mark.slow
def test_replicas_that_died_with_their_controller_are_started_again(cluster: str) -> None:
    shell = RayShell(deployment_config("both", ranks=2), cluster)
    try:
        rank = asyncio.run(shell.stats()).ranks[1].pid
        controller = asyncio.run(shell.status()).pid

        def kill_both() -> None:
            os.kill(controller, signal.SIGKILL)
            os.kill(rank, signal.SIGKILL)

        killed = read_all_after(shell, [request("b", [1, 2, 3], 400)], kill_both)
        (updates,) = asyncio.run(killed)
        assert updates[-1].finish is FinishReason.LENGTH
        first = tokens(updates)
        (again,) = asyncio.run(read_all(shell, [request("b2", [1, 2, 3], 400)]))
        assert tokens(again) == first
        wait_for(lambda: len(holdings("both")) == 1 + 2 + 1, "nothing of the lives before")
    finally:
        shell.shutdown()
    assert holdings("both") == []
