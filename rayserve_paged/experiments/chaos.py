"""Simulated chaos: random faults on the fingerprint model, whose output shows any wrong block.

The state machines are checked after every event, each stream against the one that its request gives
alone, and all books when the last stream has ended.
"""

import dataclasses
from collections.abc import Callable

from rayserve_paged.core import invariants
from rayserve_paged.core.event_log import CONTROLLER, LogEntry, LoggedCommands, LoggedEvent
from rayserve_paged.core.ids import PinId, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import PinPrefix, ResetCache, UnpinPrefix
from rayserve_paged.core.request import FinishReason, ModelLimits, Request
from rayserve_paged.core.step_messages import IntArray, StepPlan, StepResult
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.experiments.chaos_case import ChaosCase, ChaosRequest
from rayserve_paged.experiments.chaos_checks import (
    Attempts,
    Books,
    ChaosError,
    Deadlines,
    Lives,
    Stream,
    check_fence,
    check_keys,
    check_time,
    check_trials,
)
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.cost_model import EvenCost
from rayserve_paged.sim.faults import FaultPlan, PinBlocks, PoisonRequest, ResetCaches
from rayserve_paged.sim.fingerprint_rank import FingerprintRank, oracle

_SETTLE_S = 60.0
"""After the last stream: leases run out, what was lost is said again, the books are closed."""
_STUCK_S = 900.0
"""Requests that are open so long after the last fault never end."""
_MAX_EVENTS = 500_000
"""No run takes a tenth of this, unless messages bring about each other for ever."""


Streams = dict[tuple[RequestId, int], Stream]


@dataclasses.dataclass(frozen=True, slots=True)
class ChaosOutcome:
    """What a run without a violation did.

    Args:
        num_events: Of the simulation.
        num_checks: How often a replica's invariants were checked.
        num_tokens: Accepted, of all streams.
        num_lives: Of replicas, the first ones included.
        streams: Of all requests.
    """

    num_events: int
    num_checks: int
    num_tokens: int
    num_lives: int
    streams: Streams


def run_case(case: ChaosCase) -> ChaosOutcome:
    """Run a case, and check all that must hold.

    Raises:
        Exception: Something does not hold: a `ChaosError`, or whatever a state machine raised.
    """
    run = _Run(case)
    run.go()
    return run.outcome()


class _Run:
    def __init__(self, case: ChaosCase) -> None:
        self._case = case
        self._streams: Streams = {}
        self._num_checks = 0
        self._deadlines = Deadlines(case)
        self._books = Books()
        self._lives = Lives()
        self._attempts = Attempts(case.plan)
        self._event: object = None
        self._is_set_up = False
        self._deadly = {
            (one.request, one.output_index)
            for one in case.plan.faults
            if isinstance(one, PoisonRequest)
        }
        self._cluster = Cluster(
            _spec(case), self._check, self._watch, case.plan, case.seed, self._make_ranks
        )
        self._is_set_up = True

    def go(self) -> None:
        cluster, case = self._cluster, self._case
        engine = cluster.engine
        for one in case.requests:
            host = cluster.consumers[int(one.request.consumer_id[1:])]
            engine.at(one.arrival_s, host.submit, one.request, one.number)
            if one.cancel_at_s is not None:
                engine.at(
                    one.cancel_at_s, host.cancel, one.request.request_id, one.cancelled_sibling
                )
        self._schedule_pins_and_resets()
        last_s = max((one.arrival_s for one in case.requests), default=0.0)
        limit_s = max(case.plan.end_s, last_s) + _STUCK_S
        num_requests = len(case.requests)
        engine.run_while(lambda: cluster.log.num_ended < num_requests and engine.now < limit_s)
        if cluster.log.num_ended < num_requests:
            opened = [host.consumer.open_requests for host in cluster.consumers]
            raise ChaosError(f"{opened} are open {_STUCK_S:g} s after all faults")
        engine.run(max(engine.now, case.plan.end_s) + _SETTLE_S)
        self._compare_streams()
        self._check_books()

    def outcome(self) -> ChaosOutcome:
        return ChaosOutcome(
            self._cluster.engine.num_events,
            self._num_checks,
            sum(len(stream.token_ids) for stream in self._streams.values()),
            len(self._cluster.replicas),
            self._streams,
        )

    # --- what happens ---------------------------------------------------------------------

    def _make_ranks(self, replica_id: ReplicaId) -> "_Ranks":
        return _Ranks(
            self._case.limits, self._deadly, lambda: self._cluster.kill_replica(replica_id)
        )

    def _schedule_pins_and_resets(self) -> None:
        requests = {one.number: one.request for one in self._case.requests}
        at = self._cluster.engine.at
        for place, fault in enumerate(self._case.plan.faults):
            if isinstance(fault, ResetCaches):
                at(fault.at_s, self._tell, fault.replica, ResetCache())
            elif isinstance(fault, PinBlocks):
                for number in fault.requests:
                    pinned = requests.get(number)
                    if pinned is not None:
                        pin_id = PinId(f"{place}/{number}")
                        pin = PinPrefix(pin_id, pinned.prompt_token_ids, pinned.scope)
                        at(fault.from_s, self._tell, fault.replica, pin)
                        at(fault.until_s, self._tell, fault.replica, UnpinPrefix(pin_id))

    def _tell(self, replica: str, event: ResetCache | PinPrefix | UnpinPrefix) -> None:
        self._cluster.latest(ReplicaId(replica)).take(event)

    # --- what must hold -------------------------------------------------------------------

    def _check(self, entry: LogEntry) -> None:
        if not self._is_set_up:
            return
        if self._cluster.engine.num_events > _MAX_EVENTS:
            raise ChaosError(f"{_MAX_EVENTS} events come to no end")
        controller = self._cluster.controller.controller
        match entry:
            case LoggedEvent(machine, now, event):
                if machine == CONTROLLER:
                    self._books.hear(controller, event)
                    self._attempts.check(event)
                else:
                    self._deadlines.check(event, now)
                    self._event = event
            case LoggedCommands(machine, commands):
                if machine == CONTROLLER:
                    self._books.check(controller)
                    self._lives.check(commands)
                else:
                    self._num_checks += 1
                    replica = self._cluster.life(machine).replica
                    invariants.check(replica)
                    check_fence(replica, self._event, commands)
                    if self._deadly:
                        check_trials(replica, controller)

    def _watch(self, update: StreamUpdate, now: float) -> None:
        stream = self._streams.setdefault((update.request_id, update.sibling), Stream())
        if stream.finish is not None:
            raise ChaosError(f"{update} comes after the end of its stream")
        stream.token_ids += update.token_ids
        stream.finish, stream.error = update.finish, update.error
        if update.finish is not None:
            stream.ended_s = now
        attempts = (host.consumer.attempt(update.request_id) for host in self._cluster.consumers)
        attempt = next((one for one in attempts if one is not None), None)
        self._attempts.accept(update, len(stream.token_ids), attempt)

    def _compare_streams(self) -> None:
        for one in self._case.requests:
            for sibling in range(one.request.params.num_siblings):
                name = (one.request.request_id, sibling)
                stream = self._streams.get(name)
                if stream is None or stream.finish is None:
                    raise ChaosError(f"the stream {name} has no end")
                self._compare(one, stream, _alone(one.request, self._case, sibling), name)
                check_time(self._case, one, stream, name)

    def _compare(
        self, one: ChaosRequest, stream: Stream, expected: Stream, name: tuple[RequestId, int]
    ) -> None:
        if stream.token_ids != expected.token_ids[: len(stream.token_ids)]:
            raise ChaosError(
                f"the stream {name} is {stream.token_ids}, and {expected.token_ids} alone"
            )
        is_whole = stream.token_ids == expected.token_ids
        match stream.finish:
            case FinishReason.STOP | FinishReason.LENGTH:
                is_right = is_whole and stream.finish is expected.finish
            case FinishReason.CANCELLED:
                sibling = one.cancelled_sibling
                is_right = one.cancel_at_s is not None and sibling in (None, name[1])
            case FinishReason.DEADLINE:
                is_right = one.request.deadline_s is not None
            case _:
                is_right = stream.error is not None and self._may_fail(one, stream.error)
        if not is_right:
            raise ChaosError(
                f"the stream {name} ends with {stream.finish} ({stream.error}) after "
                f"{len(stream.token_ids)} tokens, and with {expected.finish} after "
                f"{len(expected.token_ids)} alone"
            )

    def _may_fail(self, one: ChaosRequest, error: str) -> bool:
        """Return whether a request may end with an error: one that has killed replicas."""
        return any(number == one.number for number, _index in self._deadly) and "killed" in error

    def _check_books(self) -> None:
        controller = self._cluster.controller.controller
        for index in range(self._case.num_replicas):
            host = self._cluster.latest(ReplicaId(f"r{index}"))
            replica_id, replica = host.replica.replica_id, host.replica
            if host.stopped is not None or replica_id not in controller.replicas:
                raise ChaosError(f"{replica_id} is not up again")
            for source, life in self._cluster.replicas.items():
                if source[0] == replica_id and life is not host and life.stopped is None:
                    raise ChaosError(f"{source} goes on, and its next life has begun")
            invariants.check(replica)
            if replica.sequences:
                raise ChaosError(f"{replica_id} still has {replica.sequences}")
            if replica.kv.pool.num_held:
                raise ChaosError(f"{replica.kv.pool.num_held} blocks of {replica_id} are held")
            booked = controller.num_requests(replica_id), controller.num_pending_tokens(replica_id)
            if booked != (0, 0):
                raise ChaosError(f"{booked} requests and tokens of {replica_id} are in the books")
            if controller.fleet.replicas[replica_id].is_troubled:
                raise ChaosError(f"{replica_id} is asked again and again")
            if not self._case.plan.disturbs_messages:
                check_keys(controller, replica)
        for reader in self._cluster.consumers:
            if reader.consumer.open_requests:
                raise ChaosError(f"{reader.consumer.open_requests} are open")


class _Ranks:
    """The ranks of one life of a replica; a `sim.executor.Ranks`.

    Args:
        limits: Of the replica.
        deadly: (number of a request, output index) of draws that end the processes.
        die: Ends them.
    """

    def __init__(
        self, limits: ModelLimits, deadly: set[tuple[int, int]], die: Callable[[], None]
    ) -> None:
        self._rank = FingerprintRank(limits)
        self._deadly = deadly
        self._die = die

    def run(self, plan: StepPlan, num_steps: int) -> StepResult:
        """As `sim.executor.Ranks`."""
        rank = self._rank
        rank.history.clear()
        rank.interrupt = lambda: len(rank.history) == num_steps
        result = rank.run(plan)
        if self._deadly and self._kills(plan.sample_indices):
            self._die()
        return result

    def _kills(self, sample_indices: IntArray) -> bool:
        for step in self._rank.history:
            for index in sample_indices.tolist():
                row, num_computed, num_tokens, _num_samples = step[index]
                start = self._rank.starts[row]
                output_index = num_computed + num_tokens - start.num_prompt_tokens
                if (start.params.seed, output_index) in self._deadly:
                    return True
        return False


def _alone(request: Request, case: ChaosCase, sibling: int) -> Stream:
    """Return what a sample of a request gives on its own."""
    if request.params.beam_width is None:
        token_ids, finish = oracle(request, case.limits, sibling)
        return Stream(token_ids, finish)
    quiet = dataclasses.replace(
        case,
        num_replicas=1,
        requests=(),
        plan=FaultPlan(),
        batch=case.batch.model_copy(update={"pipeline_depth": 1}),
    )
    run = _Run(quiet)
    number = int(request.request_id[1:])
    alone = dataclasses.replace(request, deadline_s=None)
    run._cluster.consumers[int(request.consumer_id[1:])].submit(alone, number)
    run._cluster.engine.run_while(lambda: not run._cluster.log.num_ended)
    return run._streams[request.request_id, sibling]


def _spec(case: ChaosCase) -> ClusterSpec:
    return ClusterSpec(
        num_replicas=case.num_replicas,
        limits=case.limits,
        cost=EvenCost(case.step_s),
        batch=case.batch,
        ranks_per_node=1,
        placement=case.placement,
        num_consumers=case.num_consumers,
        recovery=case.recovery,
        start_s=case.start_s,
        partial_reuse=case.partial_reuse,
    )
