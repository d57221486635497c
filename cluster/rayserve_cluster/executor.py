"""Runs the plans of a replica on all its ranks: the seam between the step loop and the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from rayserve_cluster.model_runner import ModelRunner
from rayserve_cluster.plan_codec import decode_plan, encode_plan
from rayserve_cluster.tp_group import GroupBrokenError, TpGroup
from rayserve_paged.core.plan_steps import SampleMemory
from rayserve_paged.core.step_messages import IntArray, StepPlan, StepResult


class Executor(Protocol):
    """Runs one plan at a time. One thread makes the calls; `abort` comes from any."""

    def execute(self, plan: StepPlan, interrupted: Callable[[], bool]) -> StepResult:
        """Run a plan on every rank and choose the new tokens.

        Args:
            plan: The plan.
            interrupted: Looked at after each step of a plan of several: True to stop there.

        Raises:
            GroupBrokenError: The ranks cannot be trusted any more.
        """
        ...

    def heartbeat(self) -> None:
        """Tell idle followers that rank 0 is alive.

        Raises:
            GroupBrokenError: A follower is gone.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make a call under way, and all later ones, raise GroupBrokenError."""
        ...

    def shutdown(self) -> None:
        """Let the followers leave in order and give everything back. Never raises for a broken
        group. No call may follow.
        """
        ...


class RankZeroExecutor:
    """Executor of a tensor-parallel group: plans go out, all ranks compute, rank 0 samples.

    Args:
        group: Rank 0's end of the group.
        runner: Rank 0's shard.
    """

    def __init__(self, group: TpGroup, runner: ModelRunner) -> None:
        assert group.rank == 0
        self._group = group
        self._runner = runner
        self._memory = SampleMemory(runner.max_num_seqs)

    def execute(self, plan: StepPlan, interrupted: Callable[[], bool]) -> StepResult:
        """As `Executor.execute`."""
        step = self._memory.first_step(plan)
        token_ids: list[IntArray] = []
        while True:
            result = self._run(step)
            token_ids.append(result.token_ids[0])
            self._memory.note(step, token_ids[-1])
            if result.errors or len(token_ids) == plan.num_steps or interrupted():
                return dataclasses.replace(result, token_ids=np.stack(token_ids))
            step = self._memory.next_step(step, token_ids[-1])

    def _run(self, step: StepPlan) -> StepResult:
        if self._group.world_size > 1:
            self._group.send_plan(encode_plan(step))
        logits = self._runner.run(step)
        assert logits is not None, "rank 0 has the logits"
        return self._runner.sample(step, logits)

    def heartbeat(self) -> None:
        """As `Executor.heartbeat`."""
        self._group.send_heartbeat()

    def abort(self, reason: str) -> None:
        """As `Executor.abort`."""
        self._group.abort(reason)

    def shutdown(self) -> None:
        """As `Executor.shutdown`."""
        try:
            self._group.send_shutdown()
        except GroupBrokenError as error:
            # The followers learn of the end from their closed sockets instead.
            self._group.abort(error.reason)
        self._group.close()


def follow(group: TpGroup, runner: ModelRunner) -> None:
    """Run every plan of rank 0 on this rank, until rank 0 shuts down.

    Whatever ends the loop otherwise breaks the group, so that no rank waits for this one.

    Args:
        group: A follower's end of the group.
        runner: Its shard.

    Raises:
        GroupBrokenError: The group broke or was aborted.
    """
    try:
        while (payload := group.receive_plan()) is not None:
            runner.run(decode_plan(payload))
        group.close()
    finally:
        # A no-op after close().
        group.abort("the follower's loop ended")
