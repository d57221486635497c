"""Runs the plans of one replica on simulated GPUs: when each step ends, and what it samples.

A plan of several steps is one event at its end. Whatever arrives meanwhile and could change what
the replica does next cuts it after the step that is running then.

What is sampled depends on (seed, sibling, position) alone, as with a model. Neither logits nor
anything derived from them is simulated: sampling fields other than the seed change nothing, and no
log-probabilities are given.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from rayserve_paged.core.ids import StepId
from rayserve_paged.core.step_messages import IntArray, RowStart, StepPlan, StepResult
from rayserve_paged.sim.cost_model import CostModel, FloatArray
from rayserve_paged.sim.engine import Engine
from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.machine import Machine
from rayserve_paged.sim.step_ratios import StepRatios
from rayserve_paged.sim.token_streams import answer_stream, tokens_at


class Ranks(Protocol):
    """Computes plans, in their order."""

    def run(self, plan: StepPlan, num_steps: int) -> StepResult:
        """Run the first steps of a plan; fewer than `num_steps` only where one failed."""
        ...


@dataclasses.dataclass(slots=True)
class _Running:
    """The plan that is being run: when it began, when its steps end, how many are to be run."""

    plan: StepPlan
    begin_s: float
    ends_s: FloatArray
    num_run: int

    @property
    def due_s(self) -> float:
        """When the last step that is to be run ends."""
        return float(self.ends_s[self.num_run - 1])


@dataclasses.dataclass(frozen=True, slots=True)
class LatestToken:
    """Of a stream that is in no row: when its latest token was sampled, and how many it had."""

    time_s: float
    num_outputs: int


Unfinished = dict[tuple[int | None, int], LatestToken]
"""By seed and sibling, the streams that lost their row and may get another one."""


class SimulatedExecutor:
    """The ranks of one replica.

    Args:
        engine: The clock.
        cost: How long a step takes.
        num_rows: Of the batch.
        vocab_size: Ids that are sampled.
        on_finished: Takes the result of each plan when it has ended.
        gaps: Takes the time from each token of a stream to its next one.
        machine: Shared with other replicas where that makes steps take longer; else None.
        ranks: What computes the plans when they end; None to sample by seeds alone.
        unfinished: Shared by all replicas where a stream may go on at another one; None where
            none can.
        ratios: Of the time that steps take to what `cost` says; None where it is the same.
    """

    def __init__(
        self,
        engine: Engine,
        cost: CostModel,
        num_rows: int,
        vocab_size: int,
        on_finished: Callable[[StepResult], None],
        gaps: LogHistogram,
        machine: Machine | None = None,
        ranks: Ranks | None = None,
        unfinished: Unfinished | None = None,
        ratios: StepRatios | None = None,
    ) -> None:
        self.num_plans = 0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.busy_s = 0.0
        self._engine = engine
        self._cost = cost
        self._vocab_size = vocab_size
        self._on_finished = on_finished
        self._gaps = gaps
        self._machine = machine
        self._ranks = ranks
        self._ratios = ratios
        self._is_stopped = False
        self._queued: deque[StepPlan] = deque()
        self._running: _Running | None = None
        self._starts: list[RowStart | None] = [None] * num_rows
        self._streams = np.zeros(num_rows, np.uint64)
        self._siblings = np.zeros(num_rows, np.int32)
        self._num_prompt = np.zeros(num_rows, np.int64)
        # When each row's latest token was sampled, NaN where it has none, and how many it has.
        self._token_s = np.full(num_rows, np.nan)
        self._num_outputs = np.zeros(num_rows, np.int64)
        self._row_of: dict[tuple[int | None, int], int] = {}
        self._unfinished: Unfinished = {} if unfinished is None else unfinished
        # A stream whose end is lost with its replica goes on as well.
        self._keeps_ended = unfinished is not None

    def run(self, plan: StepPlan) -> None:
        """Run a plan once those before it have ended."""
        if self._running is None:
            self._begin(plan)
        else:
            self._queued.append(plan)

    def interrupt(self) -> None:
        """End the plan that is being run after the step that is running now."""
        running = self._running
        if running is None or running.num_run == 1:
            return
        ends = running.ends_s[: running.num_run]
        num_run = int(np.searchsorted(ends, self._engine.now)) + 1
        if num_run < running.num_run:
            running.num_run = num_run
            self._engine.at(running.due_s, self._end, running, running.due_s)

    def pace(self) -> None:
        """Go on at another pace, since more or fewer replicas of the machine run steps."""
        running = self._running
        if running is None:
            return
        now, ends = self._engine.now, running.ends_s
        current = int(np.searchsorted(ends[: running.num_run], now, side="right"))
        if current == running.num_run:
            return  # It ends now.
        begin = ends[current - 1] if current else running.begin_s
        left = (ends[current] - now) / (ends[current] - begin)
        seconds = self._seconds(running.plan)[current:]
        seconds[0] = now + left * seconds[0]
        ends[current:] = np.cumsum(seconds)
        self._engine.at(running.due_s, self._end, running, running.due_s)

    @property
    def running_step(self) -> StepId | None:
        """The step that is being run, or the first of several; None where none is."""
        return None if self._running is None else self._running.plan.step_id

    def end_steps(self) -> None:
        """End the plan that is being run with the steps that have ended by now, if any has: as
        single steps they would have had their results.
        """
        running = self._running
        if running is None:
            return
        num_ended = int(np.searchsorted(running.ends_s, self._engine.now, side="right"))
        if num_ended:
            running.num_run = min(num_ended, running.num_run)
            self._end(running, running.due_s)

    def stop(self) -> None:
        """Drop all plans: no result comes any more."""
        for row in range(len(self._starts)):
            self._leave(row)
        if self._running is not None:
            self.busy_s += self._engine.now - self._running.begin_s
        self._is_stopped = True
        self._running = None
        self._queued.clear()
        if self._machine is not None:
            self._machine.end(self)

    def _begin(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._enter(start)
        if self._machine is not None:
            self._machine.begin(self)
        seconds = self._seconds(plan)
        # Summed one after the other, as single steps would be.
        begin = self._engine.now
        seconds[0] += begin
        ends = seconds.cumsum()
        self._running = _Running(plan, begin, ends, plan.num_steps)
        self._engine.at(self._running.due_s, self._end, self._running, self._running.due_s)

    def _seconds(self, plan: StepPlan) -> FloatArray:
        num_active = 1 if self._machine is None else self._machine.num_active
        seconds = self._cost.step_seconds(
            plan.num_computed, plan.num_tokens, len(plan.sample_indices), plan.num_steps, num_active
        )
        if self._ratios is not None:
            seconds *= self._ratios.of(self.num_steps, plan.num_steps)
        return seconds

    def _end(self, running: _Running, planned_s: float) -> None:
        if running is not self._running or planned_s != running.due_s:
            return  # It was cut or paced anew, and ends at another time, or was dropped.
        plan, num_run = running.plan, running.num_run
        self._running = None
        self.num_plans += 1
        self.num_steps += num_run
        self.num_computed_tokens += int(plan.num_tokens.sum()) * num_run
        self.busy_s += self._engine.now - running.begin_s
        if self._ranks is None:
            result = StepResult(plan.step_id, self._sample(plan, num_run), {}, {})
        else:
            result = self._ranks.run(plan, num_run)
        if self._is_stopped:
            return  # The plan has killed the ranks.
        self._note_times(plan, running.ends_s[:num_run])
        if self._queued:
            self._begin(self._queued.popleft())
        self._on_finished(result)
        if self._running is None and self._machine is not None:
            self._machine.end(self)

    def _sample(self, plan: StepPlan, num_steps: int) -> IntArray:
        """Return int32 [num_steps, num_samples]."""
        indices = plan.sample_indices
        rows = plan.rows[indices]
        streams = self._streams[rows]
        # Several times as fast as `flatnonzero` for a few rows.
        for i in (plan.sample_siblings != self._siblings[rows]).nonzero()[0].tolist():
            start = self._starts[rows[i]]
            assert start is not None, "rows start before they sample"
            streams[i] = _stream(start, int(plan.sample_siblings[i]))
        outputs = plan.num_computed[indices] + plan.num_tokens[indices] - self._num_prompt[rows]
        positions = outputs + np.arange(num_steps)[:, None]
        return tokens_at(streams, positions, self._vocab_size)

    def _enter(self, start: RowStart) -> None:
        row = start.row
        self._leave(row)
        # It may have been in another row that nobody has entered since.
        previous = self._row_of.get((start.params.seed, start.sibling))
        if previous is not None:
            self._leave(previous)
        self._starts[row] = start
        self._row_of[start.params.seed, start.sibling] = row
        self._streams[row] = _stream(start, start.sibling)
        self._siblings[row] = start.sibling
        self._num_prompt[row] = start.num_prompt_tokens
        latest = self._unfinished.pop((start.params.seed, start.sibling), None)
        self._num_outputs[row] = 0 if latest is None else latest.num_outputs
        self._token_s[row] = np.nan if latest is None else latest.time_s

    def _leave(self, row: int) -> None:
        """Forget who was in a row, but for its latest token where more may come."""
        start = self._starts[row]
        if start is None:
            return
        key = (start.params.seed, start.sibling)
        self._starts[row] = None
        del self._row_of[key]
        num_outputs = int(self._num_outputs[row])
        if num_outputs and (self._keeps_ended or num_outputs < (start.params.max_tokens or 0)):
            self._unfinished[key] = LatestToken(float(self._token_s[row]), num_outputs)

    def _note_times(self, plan: StepPlan, ends_s: FloatArray) -> None:
        indices = plan.sample_indices
        if not len(indices):
            return
        rows = plan.rows[indices]
        first = plan.num_computed[indices] + plan.num_tokens[indices] - self._num_prompt[rows]
        # Sampled before, but lost with a replica before their reader had them.
        num_again = self._num_outputs[rows] - first
        if (num_again > 0).any():
            for row, num in zip(rows[num_again > 0], num_again[num_again > 0], strict=True):
                self._note_row(int(row), ends_s[num:])
            rows = rows[num_again <= 0]
        waited = ends_s[0] - self._token_s[rows]
        self._gaps.add(waited[~np.isnan(waited)])
        if len(ends_s) > 1:
            self._gaps.add(ends_s[1:] - ends_s[:-1], len(rows))
        self._token_s[rows] = ends_s[-1]
        self._num_outputs[rows] = first[num_again <= 0] + len(ends_s)

    def _note_row(self, row: int, ends_s: FloatArray) -> None:
        """Note the new tokens of a row, if there are any."""
        if len(ends_s):
            self._gaps.add(np.diff(ends_s, prepend=self._token_s[row]))
            self._token_s[row] = ends_s[-1]
            self._num_outputs[row] += len(ends_s)


def _stream(start: RowStart, sibling: int) -> int:
    assert start.params.seed is not None, "requests are given one at the door"
    return answer_stream(start.params.seed, sibling)
