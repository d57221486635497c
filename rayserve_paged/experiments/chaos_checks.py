"""What must hold in a run of chaos beside the ledgers: of messages, of times, of what is known."""

import dataclasses
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import assert_never

from rayserve_paged.core.book_invariants import check_books
from rayserve_paged.core.consumer import DEADLINE_SLACK_S, WITHDRAW_AGAIN_S
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import StartReplica, SubmitRequest
from rayserve_paged.core.ids import Attempt, BlockKey, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    ControllerMessage,
    FenceReplica,
    Inventory,
    RegisterReplica,
    ReplicaReport,
    RunStep,
    StepFailed,
)
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.experiments.chaos_case import ChaosCase, ChaosRequest
from rayserve_paged.sim.faults import (
    DisturbMessages,
    Fault,
    FaultPlan,
    KillController,
    KillRank,
    KillReplica,
    Partition,
    PinBlocks,
    PoisonRequest,
    ResetCaches,
    SlowReplica,
)

_AFTERMATH_S = 15.0
"""So long after a fault its consequences may still hold something up: a death is noticed, what was
lost is said again, and polls that nobody answers are given up."""
_TRANSIT_S = 0.5
"""A message that nothing delays has come after this long."""
_ROUNDING_S = 1e-6


class ChaosError(AssertionError):
    """Something that must hold does not."""


@dataclasses.dataclass(slots=True)
class Stream:
    """What a consumer accepted of one sample.

    Args:
        token_ids: So far.
        finish: How it ended; None where it has not.
        error: Why it failed.
        ended_s: When.
    """

    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    ended_s: float | None = None


class Deadlines:
    """Sees to it that no replica is given a request with another deadline than its own.

    Args:
        case: The run.
    """

    def __init__(self, case: ChaosCase) -> None:
        self._ends_s = {
            one.request.request_id: one.arrival_s + one.request.deadline_s
            for one in case.requests
            if one.request.deadline_s is not None
        }
        late_s = [one.late_s for one in case.plan.faults if isinstance(one, DisturbMessages)]
        # From the consumer to the controller, and on to the replica.
        self._late_s = 2 * (max(late_s, default=0.0) + _TRANSIT_S)

    def check(self, event: object, now: float) -> None:
        """Check what a replica is told.

        Raises:
            ChaosError: A deadline is not what is left of it.
        """
        match event:
            case ControllerMessage(event=AssignRequest(request)):
                name, left_s = request.request_id, request.deadline_s
                ends_s = self._ends_s.get(name)
                if ends_s is None or left_s is None:
                    if ends_s is not None or left_s is not None:
                        raise ChaosError(f"{name} ends at {ends_s}, and is given {left_s} s")
                elif not -_ROUNDING_S <= now + left_s - ends_s <= self._late_s:
                    raise ChaosError(
                        f"{name} ends at {ends_s:g}, and is given {left_s:g} s at {now:g}"
                    )


class Attempts:
    """Sees to it that requests are submitted as other attempts only where something was lost, and
    with all that has come of them.

    Args:
        plan: What goes wrong.
    """

    def __init__(self, plan: FaultPlan) -> None:
        self._loses = any(map(_loses, plan.faults))
        # Of each stream that has not ended, how many tokens had come while which attempt ran.
        self._num_tokens: dict[RequestId, dict[int, list[tuple[Attempt, int]]]] = {}

    def accept(self, update: StreamUpdate, num_tokens: int, attempt: Attempt | None) -> None:
        """Note how many tokens of a stream have come, and the attempt that its consumer accepts."""
        streams = self._num_tokens.setdefault(update.request_id, {})
        if update.finish is not None or attempt is None:
            streams.pop(update.sibling, None)
        else:
            streams.setdefault(update.sibling, []).append((attempt, num_tokens))

    def check(self, event: object) -> None:
        """Check what the controller is told.

        Raises:
            ChaosError: An attempt was given up without a reason, or the next one begins anew.
        """
        if not isinstance(event, SubmitRequest) or not event.request.attempt:
            return
        name, attempt = event.request.request_id, event.request.attempt
        if not self._loses:
            raise ChaosError(f"{name} is at attempt {attempt}, and nothing was lost")
        delivered = {one.sibling: len(one.token_ids) for one in event.request.delivered}
        for sibling, accepted in self._num_tokens.get(name, {}).items():
            before = max((num for other, num in accepted if other < attempt), default=0)
            if delivered.get(sibling, 0) < before:
                raise ChaosError(
                    f"attempt {attempt} of {name} has {delivered.get(sibling, 0)} tokens of its "
                    f"sample {sibling}, and {before} had come before"
                )


def _loses(fault: Fault) -> bool:
    """Return whether a fault may lose what a replica serves, or any message."""
    match fault:
        case DisturbMessages():
            return fault.lost > 0
        case SlowReplica() | PinBlocks() | ResetCaches():
            return False
        case KillReplica() | KillRank() | KillController() | Partition() | PoisonRequest():
            return True
        case _:
            assert_never(fault)


def check_fence(replica: Replica, event: object, commands: tuple[object, ...]) -> None:
    """Check that a replica whose ranks are gone is fenced, and that a fenced one does nothing more.

    Args:
        replica: After it has taken the event in.
        event: What it took in.
        commands: What it answered.

    Raises:
        ChaosError: It goes on.
    """
    name = f"{replica.replica_id} (incarnation {replica.incarnation})"
    if replica.fenced is None:
        if isinstance(event, StepFailed | FenceReplica):
            raise ChaosError(f"{name} is not fenced by {event}")
        return
    if replica.sequences or replica.kv.pool.num_held:
        raise ChaosError(f"{name} is fenced, and has {replica.sequences}")
    if any(isinstance(command, RunStep) for command in commands):
        raise ChaosError(f"{name} is fenced, and runs another step")


class Books:
    """Sees to it that a controller knows of all that a replica told that it serves, and takes in
    nothing of a life that is over.
    """

    def __init__(self) -> None:
        self._told: tuple[RegisterReplica, Inventory] | None = None
        self._unchanged: tuple[ReplicaId, _Known] | None = None

    def hear(self, controller: Controller, event: object) -> None:
        """Note what the controller is about to take in."""
        self._told = self._unchanged = None
        match event:
            case ReplicaReport(replica_id, incarnation):
                live = controller.fleet.replicas.get(replica_id)
                if live is not None and live.incarnation != incarnation:
                    self._unchanged = replica_id, _known(controller, replica_id)
            case RegisterReplica(inventory=Inventory() as inventory):
                live = controller.fleet.replicas.get(event.replica_id)
                # Later reports that have come before say more.
                if live is None or inventory.num_reports >= live.reports.next:
                    self._told = event, inventory

    def check(self, controller: Controller) -> None:
        """Check the books, after the controller has taken it in.

        Raises:
            ChaosError: A request is missing in them, or a life that is over has changed them.
            LedgerError: They do not agree with each other.
        """
        fleet = controller.fleet
        check_books(controller)
        if self._unchanged is not None:
            replica_id, before = self._unchanged
            if _known(controller, replica_id) != before:
                raise ChaosError(f"a report of another life has changed what {replica_id} has")
        if self._told is None:
            return
        event, inventory = self._told
        if controller.replicas.get(event.replica_id) != event.incarnation:
            return
        for one in inventory.served:
            booked = fleet.booked.get(one.request_id)
            is_known = booked is not None and booked.attempt >= one.attempt
            # Reports that were waiting for the inventory may tell its end.
            if not is_known and fleet.ended_at(one.request_id, one.attempt) is None:
                raise ChaosError(f"{event.replica_id} serves {one}, and {booked} is in the books")


class Lives:
    """Sees to it that no life of a replica is started twice, or after a later one."""

    def __init__(self) -> None:
        self._latest: dict[ReplicaId, Incarnation] = {}

    def check(self, commands: tuple[object, ...]) -> None:
        """Check what the controller asks for.

        Raises:
            ChaosError: The life is none that comes next.
        """
        for command in commands:
            if isinstance(command, StartReplica):
                name, incarnation = command.replica_id, command.incarnation
                latest = self._latest.get(name, 0)
                if incarnation <= latest:
                    raise ChaosError(f"life {incarnation} of {name} is started after life {latest}")
                self._latest[name] = incarnation


def check_trials(replica: Replica, controller: Controller) -> None:
    """Check that a replica tries one suspect at a time, where no message is lost or late.

    One that has ended may begin once more, where its assignment was repeated meanwhile: it ended
    without harm, and is in the books no more.

    Raises:
        ChaosError: It tries several.
    """
    tried = {
        sequence.request.request_id
        for sequence in replica.sequences
        if sequence.request.is_suspect
        and not sequence.num_outputs
        and sequence.request.request_id in controller.fleet.booked
    }
    if len(tried) > 1:
        raise ChaosError(f"{tried} are on trial on {replica.replica_id}")


_Known = tuple[Incarnation, int, AbstractSet[RequestId], AbstractSet[BlockKey]]


def _known(controller: Controller, replica_id: ReplicaId) -> _Known:
    """Return what a controller knows of a live replica."""
    live = controller.fleet.replicas[replica_id]
    keys = controller.fleet.placement.held_keys(replica_id)
    return live.incarnation, live.reports.next, set(live.requests), keys


def check_keys(controller: Controller, replica: Replica) -> None:
    """Check that a controller knows which keys a replica has, when all has been told.

    Raises:
        ChaosError: It knows of others.
    """
    known = controller.fleet.placement.held_keys(replica.replica_id)
    held = {key for key, _block_id in replica.kv.index.items()}
    if known != held:
        raise ChaosError(
            f"of the {len(held)} keys of {replica.replica_id} the controller does not know "
            f"{len(held - known)}, and knows of {len(known - held)} others"
        )


def check_time(
    case: ChaosCase, one: ChaosRequest, stream: Stream, name: tuple[RequestId, int]
) -> None:
    """Check when a stream has ended: in time, and not before.

    Raises:
        ChaosError: It ended too late after its deadline or its cancellation, or too early.
    """
    assert stream.ended_s is not None
    if one.request.deadline_s is not None:
        deadline_s = one.arrival_s + one.request.deadline_s
        if stream.ended_s > deadline_s + DEADLINE_SLACK_S + _ROUNDING_S:
            raise ChaosError(f"{name} ends at {stream.ended_s:g}, and had until {deadline_s:g}")
        is_late = stream.finish is FinishReason.DEADLINE
        if is_late and stream.ended_s < deadline_s - _ROUNDING_S:
            raise ChaosError(f"{name} is late at {stream.ended_s:g}, and had until {deadline_s:g}")
    if one.cancel_at_s is None or one.cancelled_sibling not in (None, name[1]):
        return
    if stream.finish is FinishReason.CANCELLED and stream.ended_s < one.cancel_at_s:
        raise ChaosError(f"{name} is cancelled at {stream.ended_s:g}, before it was asked for")
    limit_s = calm_until(case, one.cancel_at_s)
    if limit_s is not None and stream.ended_s > limit_s:
        raise ChaosError(
            f"{name} is cancelled at {one.cancel_at_s:g}, and ends at {stream.ended_s:g}"
        )


def calm_until(case: ChaosCase, from_s: float) -> float | None:
    """Return when something that is asked for must have been done: when nothing has gone wrong for
    as long as it takes; None where a replica may die at any time.

    Args:
        case: The run.
        from_s: Since when it is asked for, in seconds.
    """
    faults = case.plan.faults
    if any(isinstance(one, PoisonRequest) for one in faults):
        return None
    factor = max((one.factor for one in faults if isinstance(one, SlowReplica)), default=1.0)
    # Two steps may be under way; what ends a request comes with the one after.
    needed_s = 2 * WITHDRAW_AGAIN_S + 4 * case.step_s * factor
    until_s = from_s + needed_s
    for begin_s, end_s in sorted(_troubles(case.plan)):
        if begin_s < until_s and end_s + needed_s > until_s:
            until_s = end_s + needed_s
    return until_s


def _troubles(plan: FaultPlan) -> Iterator[tuple[float, float]]:
    """Return from when until when each fault may hold messages up, or whoever answers them."""
    for one in plan.faults:
        match one:
            case KillReplica(at_s=at_s) | KillRank(at_s=at_s):
                yield at_s, at_s + _AFTERMATH_S
            case KillController(at_s=at_s, down_s=down_s):
                yield at_s, at_s + down_s + _AFTERMATH_S
            case DisturbMessages():
                yield one.from_s, one.until_s + one.late_s + _AFTERMATH_S
            case Partition():
                yield one.from_s, one.until_s + _AFTERMATH_S
