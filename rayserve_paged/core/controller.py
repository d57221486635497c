"""Central state machine of a deployment: which replicas live, who serves which request.

It sees a request when it is submitted and when it has ended, never a token: consumers read their
streams from the replicas.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import assert_never

from rayserve_paged.core.chain_memo import ChainMemo
from rayserve_paged.core.config import BatchConfig, PlacementPolicy, RecoveryConfig
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    ControllerEvent,
    EndDeployment,
    FoundReplica,
    LeaveDeployment,
    LoseReplica,
    Placed,
    Rejected,
    RenewLease,
    SubmitRequest,
    TakeDown,
    WithdrawRequest,
)
from rayserve_paged.core.errors import (
    CapacityError,
    DuplicateRequestError,
    InvalidInputError,
    NoReplicaError,
    OverloadedError,
    PagedError,
)
from rayserve_paged.core.fleet import Fleet
from rayserve_paged.core.ids import BlockKey, Incarnation, ReplicaId, Term
from rayserve_paged.core.owners import Owners
from rayserve_paged.core.placement import Placement
from rayserve_paged.core.placement_policy import estimate_retry_s
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    RegisterReplica,
    ReplicaReport,
    Tick,
)
from rayserve_paged.core.replica_record import Booked
from rayserve_paged.core.request import ModelLimits, Request, admit

RETRY_S = 0.25
"""When to submit again what no replica can take now."""
_FIRST_TERM = Term(0)
_TICK_S = 1.0


class _NotNow(Exception):
    """No replica can take a request now, and one may later."""


class Controller:
    """All replicas of one deployment.

    Args:
        deployment_lease_s: An owner renews within this long, or everything is taken down; None
            for a deployment that outlives its owners.
        batch: Its queue limits; None for no limits.
        placement: How the replica of a request is chosen.
        recovery: What is done about lost replicas; None to start none again.
        start_timeout_s: A life that has not registered after this long has failed to start.
        term: Counts the lives of the controller.
        expected: Replicas that were there before this term began; nothing is placed until they
            have registered, or `recovery.grace_s` is over.
        farewell_s: Once the last owner has left, another may take over for this long.
    """

    def __init__(
        self,
        deployment_lease_s: float | None,
        batch: BatchConfig | None = None,
        placement: PlacementPolicy = "prefix-aware",
        recovery: RecoveryConfig | None = None,
        start_timeout_s: float = 300.0,
        term: Term = _FIRST_TERM,
        expected: Iterable[ReplicaId] = (),
        farewell_s: float = 10.0,
    ) -> None:
        self._owners = Owners(deployment_lease_s, farewell_s)
        self._batch = batch or BatchConfig()
        self._last_tick = float("-inf")
        self._placement = Placement(placement, self._batch)
        self._memo: ChainMemo | None = None
        self._fleet = Fleet(self._placement, recovery, start_timeout_s, term, expected)
        # The kinds of replicas there were: one that is being started again will hold as much.
        self._largest: ModelLimits | None = None

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Take in one event; return what is to be done, in order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        match event:
            case SubmitRequest():
                return self._submit(event, now)
            case ReplicaReport():
                return self._fleet.report(event, now)
            case WithdrawRequest():
                return self._withdraw(event)
            case RegisterReplica():
                return self._register(event, now)
            case FoundReplica():
                return self._fleet.find(event, now)
            case LoseReplica(replica_id, incarnation, reason):
                return self._fleet.lose(replica_id, incarnation, reason, now)
            case RenewLease(owner):
                self._owners.renew(owner, now)
                return []
            case LeaveDeployment(owner):
                self._owners.leave(owner, now)
                return []
            case EndDeployment(reason):
                return self._end(reason, now)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    @property
    def replicas(self) -> Mapping[ReplicaId, Incarnation]:
        """Live replicas and their incarnations."""
        return {name: live.incarnation for name, live in self._fleet.replicas.items()}

    @property
    def fleet(self) -> Fleet:
        """Its replicas and books, for those who check them."""
        return self._fleet

    @property
    def term(self) -> Term:
        """Which life of the controller this is."""
        return self._fleet.term

    @property
    def is_rebuilding(self) -> bool:
        """Whether it waits for replicas of before its term, and places nothing."""
        return self._fleet.is_rebuilding

    @property
    def is_hopeful(self) -> bool:
        """Whether replicas that do not live may yet come."""
        return self._fleet.is_hopeful

    @property
    def why_none(self) -> str:
        """Why replicas that should live do not, for a person."""
        return self._fleet.why_none()

    def num_requests(self, replica_id: ReplicaId) -> int:
        """Return how many requests a live replica has been given and has not finished."""
        return self._placement.num_requests(replica_id)

    def num_pending_tokens(self, replica_id: ReplicaId) -> int:
        """Return the prompt and output tokens promised to those requests."""
        return self._placement.num_pending_tokens(replica_id)

    def num_queued_tokens(self, replica_id: ReplicaId) -> int:
        """Return the prompt tokens that a live replica has yet to compute, as far as is known."""
        return self._placement.num_queued_tokens(replica_id)

    @property
    def limits(self) -> ModelLimits | None:
        """Limits of the live replica that can hold most; None where there is none."""
        return self._placement.largest_limits

    @property
    def next_tick(self) -> float | None:
        """When a Tick will have something to do unless another event comes before, in seconds.

        A shell on a virtual clock ticks then; one on a real clock may as well tick regularly.
        """
        if self._fleet.ended is not None:
            return None
        due = (
            self._fleet.next_tick,
            self._last_tick + _TICK_S if self._fleet.is_watchful else None,
            self._owners.lapses_at,
        )
        return min((at for at in due if at is not None), default=None)

    # --- replicas -------------------------------------------------------------------------

    def _register(self, event: RegisterReplica, now: float) -> list[ControllerCommand]:
        commands = self._fleet.register(event, now)
        live, known = self.limits, self._largest
        if live is not None and (known is None or live.num_usable_slots > known.num_usable_slots):
            self._largest = live
        return commands

    # --- requests -------------------------------------------------------------------------

    def _submit(self, event: SubmitRequest, now: float) -> list[ControllerCommand]:
        request, commands = event.request, []
        if event.lost_at is not None:
            commands = self._fleet.doubt(event.lost_at, now)
        try:
            known = self._fleet.booked.get(request.request_id)
            if known is not None:
                if known.consumer_id != request.consumer_id or request.attempt < known.attempt:
                    raise DuplicateRequestError(request.request_id)
                if request.attempt == known.attempt:
                    return [*commands, *self._place_again(known, request)]
                # Its consumer has given the older attempt up.
                commands.append(self._fleet.cancel(known))
                self._fleet.forget(known)
            if event.is_repeated:
                ended = self._fleet.ended_at(request.request_id, request.attempt)
                if ended is not None:
                    return [*commands, ended]
            return [*commands, *self._place(event, now)]
        except _NotNow as reason:
            error = NoReplicaError(str(reason))
            return [*commands, Rejected(request.request_id, request.attempt, error, RETRY_S)]
        except PagedError as error:
            return [*commands, Rejected(request.request_id, request.attempt, error)]

    def _place_again(self, known: Booked, request: Request) -> list[ControllerCommand]:
        """Repeat the answer to a submission, and its assignment, since either may have been lost.

        Raises:
            DuplicateRequestError: It is another request under the same name.
        """
        if known.given is None:
            return [known.placed]
        before, assignment = known.given
        if before != dataclasses.replace(request, deadline_s=before.deadline_s):
            raise DuplicateRequestError(request.request_id)
        admitted = dataclasses.replace(assignment.request, deadline_s=request.deadline_s)
        again = dataclasses.replace(assignment, request=admitted)
        return [self._fleet.to(known.source, again), known.placed]

    def _place(self, event: SubmitRequest, now: float) -> list[ControllerCommand]:
        request, fleet = event.request, self._fleet
        admitted = self._admit(request)
        self._check_quota(admitted, now)
        assert fleet.scope is not None, "a replica has registered"
        if self._memo is None:
            self._memo = ChainMemo(fleet.scope.block_size)
        root = fleet.scope.root(request.scope)
        keys = tuple(self._memo.keys(root, request.prompt_token_ids, request.attachments))
        max_tokens = admitted.params.max_tokens
        assert max_tokens is not None, "admit sets it"
        replica_id = self._choose(admitted, keys)
        live = fleet.replicas[replica_id]
        placed = Placed(
            request.request_id,
            request.attempt,
            replica_id,
            live.incarnation,
            max_tokens,
            on_trial=request.is_suspect,
        )
        if request.is_suspect:
            live.trial = (request.request_id, request.attempt)
        assignment = AssignRequest(admitted, keys)
        booked = Booked(
            request.request_id,
            request.attempt,
            request.consumer_id,
            placed,
            now,
            (request, assignment),
            is_tried_long=request.is_tried_long,
            tenant=request.tenant,
            num_blocks=admitted.num_tenant_blocks(self._placement.limits(replica_id)),
        )
        fleet.book(booked)
        fleet.tenants.charge(admitted, now)
        return [fleet.to(booked.source, assignment), placed]

    def _admit(self, request: Request) -> Request:
        """Check a request against what the replicas can hold.

        Raises:
            PagedError: It cannot be served.
            _NotNow: No replica is there, or none that is large enough.
        """
        limits = self.limits
        if limits is None and not self._fleet.is_hopeful:
            raise NoReplicaError(self._fleet.why_none())
        if limits is None or self._fleet.is_rebuilding:
            raise _NotNow(self._fleet.why_none())
        if request.params.seed is None:
            raise InvalidInputError("seed", None, "a seed, drawn by the consumer")
        try:
            return admit(request, limits)
        except CapacityError:
            if not self._fleet.is_hopeful:
                raise
            assert self._largest is not None, "one has registered"
            # Raises where the one that is being started again cannot hold it either.
            admit(request, self._largest)
            raise _NotNow(self._fleet.why_none()) from None

    def _check_quota(self, request: Request, now: float) -> None:
        """Check a request that was admitted against what its tenant may use.

        Raises:
            QuotaExceededError: It may not be placed now.
            InvalidInputError: It alone needs more blocks than its tenant may use.
            _NotNow: The same, while a replica is missing with whose blocks it may use as many.
        """
        quota, limits = request.quota, self.limits
        if quota is None or request.attempt:
            return
        assert limits is not None, "it was admitted"
        num_blocks, num_usable = (
            request.num_tenant_blocks(limits),
            self._placement.num_usable_blocks,
        )
        share = quota.block_share
        if share is not None and num_blocks > quota.num_blocks(num_usable):
            if self._fleet.is_hopeful:
                raise _NotNow(self._fleet.why_none())
            accepted = (
                f"what needs at most {quota.num_blocks(num_usable)} blocks and not {num_blocks}, "
                f"since tenant {request.tenant!r} has block_share={share:g} of "
                f"{num_usable}"
            )
            raise InvalidInputError("max_tokens", request.params.max_tokens, accepted)
        exceeded = self._fleet.tenants.check(request, num_blocks, num_usable, now)
        if exceeded is not None:
            raise exceeded

    def _choose(self, request: Request, keys: tuple[BlockKey, ...]) -> ReplicaId:
        """Choose a replica, of those that there is no reason to spare.

        A replica has one suspect at a time, so that its death tells who it was. One that a
        consumer holds for lost is given nothing before it has answered.

        Raises:
            OverloadedError: The queue limits leave no room.
            _NotNow: All that can hold it are spared.
        """
        replicas, spared = self._fleet.replicas, set(self._fleet.doubted)
        if request.is_suspect:
            spared |= {name for name, live in replicas.items() if live.trial is not None}
        replica_id = self._placement.place(request, keys, spared)
        if replica_id is not None:
            return replica_id
        if spared:
            why = "its turn to be tried" if request.is_suspect else "an answer"
            raise _NotNow(f"{', '.join(sorted(spared))} cannot be given it now: it waits for {why}")
        num_waiting, num_pending_tokens = self._placement.shortest_queue(request)
        raise OverloadedError(
            num_waiting,
            self._batch.max_num_waiting,
            num_pending_tokens,
            self._batch.max_pending_tokens,
            estimate_retry_s(tuple(self._fleet.finish_times)),
        )

    def _withdraw(self, event: WithdrawRequest) -> list[ControllerCommand]:
        known = self._fleet.booked.get(event.request_id)
        if known is not None and known.attempt == event.attempt:
            return [self._fleet.cancel(known, event.sibling)]
        if event.placed_at is not None:
            # Placed before this term, or taken out of the books by mistake.
            cancel = CancelRequest(event.request_id, event.attempt, event.sibling)
            return [self._fleet.to(event.placed_at, cancel)]
        return []

    # --- the deployment -------------------------------------------------------------------

    def _tick(self, now: float) -> list[ControllerCommand]:
        self._last_tick = now
        self._owners.watch(now)
        reason = self._owners.lapsed(now)
        return self._fleet.tick(now) if reason is None else self._end(reason, now)

    def _end(self, reason: str, now: float) -> list[ControllerCommand]:
        if self._fleet.ended is not None:
            return []
        return [*self._fleet.end(reason, now), TakeDown(reason)]
