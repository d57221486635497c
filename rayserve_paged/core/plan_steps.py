"""Unfolds a step plan into the single steps that ranks run, with every token known."""

import dataclasses

import numpy as np

from rayserve_paged.core.step_messages import IntArray, StepPlan

_NO_INTS = np.zeros(0, np.int32)
_NO_COPIES = np.zeros((0, 3), np.int32)


class SampleMemory:
    """The last sampled token of each row, for tokens that a plan could not know.

    Args:
        num_rows: Rows of the batch.
    """

    def __init__(self, num_rows: int) -> None:
        self._last = np.zeros(num_rows, np.int32)

    def first_step(self, plan: StepPlan) -> StepPlan:
        """Return the first step of a plan, its late tokens filled in."""
        if not len(plan.late):
            return plan if plan.num_steps == 1 else dataclasses.replace(plan, num_steps=1)
        token_ids = plan.token_ids.copy()
        token_ids[plan.late] = self._last[np.repeat(plan.rows, plan.num_tokens)[plan.late]]
        return dataclasses.replace(plan, token_ids=token_ids, late=_NO_INTS, num_steps=1)

    def next_step(self, step: StepPlan, token_ids: IntArray) -> StepPlan:
        """Return the step after one of a plan of several, in which each row samples once.

        Args:
            step: The step that was run.
            token_ids: int32 [num_samples], what it sampled.
        """
        return dataclasses.replace(
            step,
            starts=(),
            append_rows=_NO_INTS,
            append_blocks=_NO_INTS,
            copies=_NO_COPIES,
            num_computed=step.num_computed + step.num_tokens,
            num_tokens=np.ones_like(step.num_tokens),
            token_ids=token_ids,
            scored=None,
        )

    def note(self, step: StepPlan, token_ids: IntArray) -> None:
        """Remember what a step sampled."""
        self._last[step.rows[step.sample_indices]] = token_ids
