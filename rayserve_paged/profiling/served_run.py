"""What the event logs of a live run tell about its steps and its messages."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.controller_messages import SubmitRequest
from rayserve_paged.core.event_log import CONTROLLER, LogEntry, LoggedCommands, LoggedEvent
from rayserve_paged.core.ids import RequestId, StepId
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    AssignRequest,
    RunStep,
    StepFinished,
)
from rayserve_paged.core.step_messages import IntArray, StepPlan
from rayserve_paged.core.stream_messages import StreamItem
from rayserve_paged.event_files import log_files, read_log
from rayserve_paged.sim.profiled_cost import ProfiledCost

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class ServedStep:
    """One step of a run.

    Args:
        replica: Which replica ran it.
        begin_s: When its plan was asked for, or the step before it ended.
        end_s: When its result was taken in.
        num_computed: As `StepPlan.num_computed`.
        num_tokens: As `StepPlan.num_tokens`.
    """

    replica: str
    begin_s: float
    end_s: float
    num_computed: IntArray
    num_tokens: IntArray

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclasses.dataclass(slots=True)
class ServedRun:
    """The steps and messages of a run, on the machine's monotonic clock.

    Args:
        steps: All of them, by end.
        submitted_s: When the controller took each submission in.
        assigned_s: When its replica took each request in, with whether it was idle then.
        answered_s: When the replica answered with a token: by request and output index.
    """

    steps: list[ServedStep] = dataclasses.field(default_factory=list)
    submitted_s: dict[RequestId, float] = dataclasses.field(default_factory=dict)
    assigned_s: dict[RequestId, tuple[float, bool]] = dataclasses.field(default_factory=dict)
    answered_s: dict[tuple[RequestId, int], float] = dataclasses.field(default_factory=dict)


def read_served_run(folder: Path) -> ServedRun:
    """Read the event logs of a run of single steps.

    Raises:
        InvalidInputError: They are no event logs.
    """
    run = ServedRun()
    for path in log_files(folder):
        _read_machine(read_log(path), run)
    run.steps.sort(key=lambda step: step.end_s)
    return run


def _read_machine(entries: Iterable[LogEntry], run: ServedRun) -> None:
    event: LoggedEvent | None = None
    open_plans: dict[StepId, tuple[float, StepPlan]] = {}
    last_end_s = float("-inf")
    for entry in entries:
        if isinstance(entry, LoggedEvent):
            event = entry
            match entry.event:
                case SubmitRequest(request) if entry.machine == CONTROLLER:
                    run.submitted_s.setdefault(request.request_id, entry.now)
                case AssignRequest(request):
                    run.assigned_s.setdefault(request.request_id, (entry.now, not open_plans))
                case StepFinished(result):
                    asked_s, plan = open_plans.pop(result.step_id)
                    begin_s = max(asked_s, last_end_s)
                    last_end_s = entry.now
                    run.steps.append(
                        ServedStep(
                            entry.machine, begin_s, entry.now, plan.num_computed, plan.num_tokens
                        )
                    )
        elif isinstance(entry, LoggedCommands) and event is not None:
            for command in entry.commands:
                match command:
                    case RunStep(plan):
                        open_plans[plan.step_id] = (event.now, plan)
                    case AnswerPoll():
                        for name, index in _tokens_of(command):
                            run.answered_s.setdefault((name, index), event.now)


def _tokens_of(answer: AnswerPoll) -> Iterable[tuple[RequestId, int]]:
    for item in answer.delivery.items:
        if isinstance(item, StreamItem):
            for offset in range(len(item.token_ids)):
                yield item.name.request_id, item.index + offset
        else:
            for name, index in zip(item.names, item.indices.tolist(), strict=True):
                for offset in range(len(item.token_ids)):
                    yield name.request_id, index + offset


def predict_steps(steps: Sequence[ServedStep], cost: ProfiledCost) -> FloatArray:
    """Return what a cost model says of each step, float64 [num_steps].

    How many replicas ran steps meanwhile is averaged over the step.
    """
    spans: dict[str, tuple[FloatArray, FloatArray]] = {}
    for replica in {step.replica for step in steps}:
        own = sorted((s.begin_s, s.end_s) for s in steps if s.replica == replica)
        begins, ends = np.array(own, np.float64).T
        spans[replica] = (begins, ends)
    return np.array([_predict(step, spans, cost) for step in steps])


def _predict(
    step: ServedStep, spans: Mapping[str, tuple[FloatArray, FloatArray]], cost: ProfiledCost
) -> float:
    num_active = 1.0
    for replica, (begins, ends) in spans.items():
        if replica != step.replica:
            overlaps = np.minimum(ends, step.end_s) - np.maximum(begins, step.begin_s)
            num_active += float(overlaps.clip(0.0).sum()) / step.seconds
    fewer = int(num_active)
    low, high = (
        float(cost.step_seconds(step.num_computed, step.num_tokens, 0, 1, count)[0])
        for count in (fewer, fewer + 1)
    )
    return low + (high - low) * (num_active - fewer)
