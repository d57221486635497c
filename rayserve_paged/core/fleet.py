"""The replicas of a deployment as its controller knows them: who lives, what each has, what is done
about those that are lost.

    unknown --register--> live --lose--> lost --pause--> starting --register--> live ...

What an incarnation says after it was lost is ignored. A controller that was started anew begins
with replicas that are *missing*: it knows their names, and waits for their inventories.
"""

from collections import deque
from collections.abc import Iterable

from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    FoundReplica,
    Placed,
    ReplicaLost,
    SendToReplica,
    StartReplica,
    StopReplica,
)
from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId, RequestId, Term
from rayserve_paged.core.placement import Placement
from rayserve_paged.core.replica_messages import (
    AskInventory,
    AssignRequest,
    CancelRequest,
    ControllerMessage,
    FenceReplica,
    Inventory,
    RegisterReplica,
    ReplicaReport,
    ServedRequest,
)
from rayserve_paged.core.replica_record import ASK_AGAIN_S, SETTLE_S, Booked, ReplicaRecord
from rayserve_paged.core.restarts import Restarts
from rayserve_paged.core.tenant_books import TenantBooks

_NUM_FINISH_TIMES = 32
_NUM_ENDED = 4096
"""Requests that have ended whose places are remembered: the answer to the submission, and all
deliveries since, may have been lost."""


class Fleet:
    """All replicas, and the books of their requests.

    Args:
        placement: Their loads and keys.
        recovery: What is done about lost ones; None for nothing.
        start_timeout_s: A life that has not registered after this long has failed to start.
        term: Of the controller.
        expected: Replicas that were there before this term began.
    """

    def __init__(
        self,
        placement: Placement,
        recovery: RecoveryConfig | None,
        start_timeout_s: float,
        term: Term,
        expected: Iterable[ReplicaId],
    ) -> None:
        self.term = term
        self.placement = placement
        self.restarts = Restarts(recovery, start_timeout_s, term)
        self.replicas: dict[ReplicaId, ReplicaRecord] = {}
        # Live ones that a consumer holds for lost; they are given nothing until they answer.
        self.doubted: set[ReplicaId] = set()
        self.booked: dict[RequestId, Booked] = {}
        self.tenants = TenantBooks()
        # Where requests were that ended last, oldest first.
        self._ended: dict[tuple[RequestId, Attempt], Placed] = {}
        # The last incarnation of each that was lost, and why.
        self.lost: dict[ReplicaId, tuple[Incarnation, str]] = {}
        self.scope: BlockScope | None = None
        self.finish_times: deque[float] = deque(maxlen=_NUM_FINISH_TIMES)
        self.ended: str | None = None
        self._grace_s = 0.0 if recovery is None else recovery.grace_s
        self._grace_until: float | None = None
        # Those of before this term that have not registered, and lives of them that were found.
        self._missing = dict.fromkeys(expected)
        self._found: dict[ReplicaId, Incarnation] = {}
        self._num_asks = 0
        self._last_ask = float("-inf")

    # --- what others ask ------------------------------------------------------------------

    @property
    def is_rebuilding(self) -> bool:
        """Whether replicas of before this term may still come."""
        return bool(self._missing)

    @property
    def is_hopeful(self) -> bool:
        """Whether replicas that do not live may yet come."""
        return self.ended is None and (self.is_rebuilding or self.restarts.is_hopeful)

    def why_none(self) -> str:
        """Say why there is no replica."""
        if self.ended is not None:
            return "the deployment is being taken down"
        if self._missing:
            return f"the controller was started anew, and waits for {', '.join(self._missing)}"
        reasons = []
        for replica_id in sorted(self.lost):
            again = " (it is being started again)" if self.restarts.expects(replica_id) else ""
            reasons.append(f"{replica_id} is lost: {self.lost[replica_id][1]}{again}")
        return "; ".join(reasons) or "none has registered yet"

    def to(
        self,
        source: tuple[ReplicaId, Incarnation],
        event: AssignRequest | CancelRequest | FenceReplica | AskInventory,
    ) -> SendToReplica:
        """Return the command that carries an event to an incarnation."""
        return SendToReplica(*source, ControllerMessage(self.term, event))

    @property
    def is_watchful(self) -> bool:
        """Whether time alone may bring something to ask."""
        return bool(self.booked or self._missing or self.restarts.is_hopeful) or any(
            live.is_troubled for live in self.replicas.values()
        )

    # --- who lives ------------------------------------------------------------------------

    def register(self, event: RegisterReplica, now: float) -> list[ControllerCommand]:
        """Take in a replica that has started, or the inventory of one."""
        replica_id, incarnation = event.replica_id, event.incarnation
        live = self.replicas.get(replica_id)
        if live is not None and live.incarnation > incarnation:
            return []
        if self.ended is not None:
            return [StopReplica(replica_id, incarnation, self.why_none())]
        lost = self.lost.get(replica_id)
        if lost is not None and lost[0] >= incarnation:
            return [StopReplica(replica_id, incarnation, lost[1])]
        if self.restarts.is_overtaken(replica_id, incarnation):
            # It came back to a controller that had given it up without having seen it.
            return [StopReplica(replica_id, incarnation, "its next life is being started")]
        if self.scope is None:
            self.scope = event.scope
        elif self.scope != event.scope:
            reason = f"its KV differs from the deployment's: {event.scope} is not {self.scope}"
            return [StopReplica(replica_id, incarnation, reason)]
        commands: list[ControllerCommand] = []
        if live is not None and live.incarnation < incarnation:
            commands += self.lose(replica_id, live.incarnation, "replaced by a restart", now)
            live = None
        if live is None:
            live = self.replicas[replica_id] = ReplicaRecord(incarnation, now)
            self.placement.add(replica_id, event.limits)
            self.restarts.register(replica_id, incarnation, now)
            self._missing.pop(replica_id, None)
            self._found.pop(replica_id, None)
        if event.inventory is not None:
            commands += self._take_inventory(replica_id, live, event.inventory, now)
        return commands

    def find(self, event: FoundReplica, now: float) -> list[ControllerCommand]:
        """Wait for a life that may be left of before this term."""
        if event.replica_id in self.replicas or self.ended is not None:
            return []
        self.wait(now)
        self._missing[event.replica_id] = None
        known = self._found.get(event.replica_id, event.incarnation)
        self._found[event.replica_id] = max(known, event.incarnation)
        return [self._ask((event.replica_id, event.incarnation))]

    def lose(
        self, replica_id: ReplicaId, incarnation: Incarnation, reason: str, now: float
    ) -> list[ControllerCommand]:
        """Give a life up, and plan the next one."""
        live = self.replicas.get(replica_id)
        if live is None or live.incarnation != incarnation:
            if not self._is_awaited(replica_id, incarnation):
                return []
            self._found.pop(replica_id, None)
            self._missing.pop(replica_id, None)
            self._bury(replica_id, incarnation, reason, now)
            return [StopReplica(replica_id, incarnation, reason)]
        del self.replicas[replica_id]
        self.doubted.discard(replica_id)
        self.placement.remove(replica_id)
        consumers = {booked.consumer_id for booked in live.requests.values()}
        for booked in live.requests.values():
            del self.booked[booked.request_id]
            self.tenants.leave(booked.tenant, booked.num_blocks)
        self._bury(replica_id, incarnation, reason, now)
        return [
            # Where its first rank still lives, streams end at once and with the reason.
            self.to((replica_id, incarnation), FenceReplica(reason)),
            ReplicaLost(replica_id, incarnation, reason, tuple(sorted(consumers))),
            StopReplica(replica_id, incarnation, reason),
        ]

    def _is_awaited(self, replica_id: ReplicaId, incarnation: Incarnation) -> bool:
        starting = self.restarts.is_starting(replica_id, incarnation)
        return starting or self._found.get(replica_id) == incarnation

    def _bury(
        self, replica_id: ReplicaId, incarnation: Incarnation, reason: str, now: float
    ) -> None:
        self.lost[replica_id] = (incarnation, reason)
        self.restarts.lose(replica_id, incarnation, now)

    def end(self, reason: str, now: float) -> list[ControllerCommand]:
        """Give up all that lives or starts, for good."""
        self.ended = reason
        why = f"the deployment ended: {reason}"
        commands: list[ControllerCommand] = []
        lives = [(name, live.incarnation) for name, live in self.replicas.items()]
        for source in (*lives, *self.restarts.starting, *list(self._found.items())):
            commands += self.lose(*source, why, now)
        self._missing.clear()
        return commands

    # --- time -----------------------------------------------------------------------------

    def wait(self, now: float) -> None:
        """Begin to wait for what is missing, unless that has begun."""
        if self._grace_until is None:
            self._grace_until = now + self._grace_s

    def tick(self, now: float) -> list[ControllerCommand]:
        """Ask whom there is reason to ask, and start what is to be started."""
        if self.ended is not None:
            return []
        commands: list[ControllerCommand] = []
        self.wait(now)
        assert self._grace_until is not None
        if now >= self._grace_until:
            commands += self._give_up_missing(now)
        for source in self.restarts.overdue(now):
            commands += self.lose(*source, "it did not register in time", now)
        if now - self._last_ask >= ASK_AGAIN_S:
            self._last_ask = now
            # One that has started may have said so in vain.
            for source in (*self._found.items(), *self.restarts.starting):
                commands.append(self._ask(source))
        for replica_id, live in self.replicas.items():
            if live.must_ask(now):
                ask = self._ask((replica_id, live.incarnation), with_keys=live.is_troubled)
                live.ask(self._num_asks, now)
                commands.append(ask)
        commands += [StartReplica(*source) for source in self.restarts.take_due(now)]
        return commands

    @property
    def next_tick(self) -> float | None:
        """When a life is to be started or given up, in seconds."""
        due = [self.restarts.next_tick, self._grace_until if self._missing else None]
        return min((at for at in due if at is not None), default=None)

    def _give_up_missing(self, now: float) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        reason = "it did not come back to a controller that was started anew"
        for replica_id in list(self._missing):
            found = self._found.get(replica_id)
            if found is not None:
                commands += self.lose(replica_id, found, reason, now)
            else:
                self.restarts.lose(replica_id, None, now)
        self._missing.clear()
        return commands

    def _ask(
        self, source: tuple[ReplicaId, Incarnation], *, with_keys: bool = True
    ) -> ControllerCommand:
        self._num_asks += 1
        return self.to(source, AskInventory(self._num_asks, with_keys))

    def doubt(self, source: tuple[ReplicaId, Incarnation], now: float) -> list[ControllerCommand]:
        """Take in that a consumer holds a life for lost; it is asked, and given nothing until
        it answers.
        """
        live = self.replicas.get(source[0])
        if live is None or live.incarnation != source[1] or live.is_doubted:
            return []
        live.is_doubted = True
        self.doubted.add(source[0])
        ask = self._ask(source)
        live.ask(self._num_asks, now)
        return [ask]

    # --- what replicas say ----------------------------------------------------------------

    def report(self, report: ReplicaReport, now: float) -> list[ControllerCommand]:
        """Take in a report: each once, in order, and only of a life that was not given up."""
        replica_id, incarnation = report.replica_id, report.incarnation
        live = self.replicas.get(replica_id)
        if live is None or live.incarnation != incarnation:
            if report.fenced is not None:
                return self.lose(replica_id, incarnation, report.fenced, now)
            lost = self.lost.get(replica_id)
            is_old = live is not None and live.incarnation > incarnation
            if is_old or self.ended is not None or (lost is not None and lost[0] >= incarnation):
                return []
            return [self._ask((replica_id, incarnation))]
        self._hear(replica_id, live, now)
        for one in live.reports.take(report):
            self._apply(live, one, now)
        if report.fenced is not None:
            return self.lose(replica_id, incarnation, report.fenced, now)
        return []

    def _hear(self, replica_id: ReplicaId, live: ReplicaRecord, now: float) -> None:
        live.hear(now)
        self.doubted.discard(replica_id)

    def _apply(self, live: ReplicaRecord, report: ReplicaReport, now: float) -> None:
        for request_id, attempt in report.prefilled:
            booked = live.requests.get(request_id)
            if booked is None or not booked.is_tried_long:
                live.end_trial(request_id, attempt)
            if booked is not None and booked.attempt == attempt:
                self.placement.note_prefilled(report.replica_id, request_id)
        for request_id, attempt in report.finished:
            booked = live.requests.get(request_id)
            if booked is not None and booked.attempt == attempt:
                self.forget(booked)
                self._ended[request_id, attempt] = booked.placed
                if len(self._ended) > _NUM_ENDED:
                    del self._ended[next(iter(self._ended))]
                self.finish_times.append(now)
        self.placement.update(report.replica_id, report.published, report.evicted)

    def _take_inventory(
        self, replica_id: ReplicaId, live: ReplicaRecord, inventory: Inventory, now: float
    ) -> list[ControllerCommand]:
        self._hear(replica_id, live, now)
        asked_at = live.answer(inventory.number, now)
        if inventory.num_reports < live.reports.next:
            return []  # Overtaken by later reports.
        if inventory.keys is None:
            live.lacks_reports = inventory.num_reports > live.reports.next
        else:
            live.lacks_reports = False
            self.placement.replace_keys(replica_id, inventory.keys)
        served = {one.request_id: one for one in inventory.served}
        for booked in list(live.requests.values()):
            one = served.get(booked.request_id)
            is_gone = one is None or one.attempt != booked.attempt
            if is_gone and asked_at is not None and booked.placed_at + SETTLE_S <= asked_at:
                self.forget(booked)
        commands: list[ControllerCommand] = []
        for one in inventory.served:
            commands += self._reconcile((replica_id, live.incarnation), live, one, now)
        if inventory.keys is not None:
            for report in live.reports.skip_to(inventory.num_reports):
                self._apply(live, report, now)
        return commands

    def _reconcile(
        self,
        source: tuple[ReplicaId, Incarnation],
        live: ReplicaRecord,
        one: ServedRequest,
        now: float,
    ) -> list[ControllerCommand]:
        """Bring the books in line with a request that a replica serves."""
        commands: list[ControllerCommand] = []
        booked = self.booked.get(one.request_id)
        if booked is not None and booked.attempt > one.attempt:
            return [self.to(source, CancelRequest(one.request_id, one.attempt))]
        if booked is not None and booked.attempt < one.attempt:
            commands.append(self.cancel(booked))
            self.forget(booked)
            booked = None
        if booked is None:
            placed = Placed(one.request_id, one.attempt, *source, one.max_tokens, one.on_trial)
            self.book(
                Booked(
                    one.request_id,
                    one.attempt,
                    one.consumer_id,
                    placed,
                    now,
                    is_tried_long=one.is_tried_long,
                    tenant=one.tenant,
                    num_blocks=one.num_blocks,
                )
            )
            self.placement.adopt(source[0], one.request_id, one.num_rows, one.num_tokens)
            if one.on_trial and live.trial is None:
                live.trial = (one.request_id, one.attempt)
        elif not one.on_trial:
            live.end_trial(one.request_id, one.attempt)
        return commands

    # --- the books ------------------------------------------------------------------------

    def book(self, booked: Booked) -> None:
        """Enter a request that was given to a live replica."""
        self.booked[booked.request_id] = booked
        self.replicas[booked.placed.replica_id].requests[booked.request_id] = booked
        self.tenants.enter(booked.tenant, booked.num_blocks, booked.placed_at)

    def ended_at(self, request_id: RequestId, attempt: Attempt) -> Placed | None:
        """Return where an attempt was that has ended, if what it gave may still be read there."""
        placed = self._ended.get((request_id, attempt))
        if placed is None:
            return None
        live = self.replicas.get(placed.replica_id)
        return placed if live is not None and live.incarnation == placed.incarnation else None

    def forget(self, booked: Booked) -> None:
        """Take a request out of the books."""
        replica_id = booked.placed.replica_id
        live = self.replicas[replica_id]
        live.end_trial(booked.request_id, booked.attempt)
        del live.requests[booked.request_id]
        del self.booked[booked.request_id]
        self.tenants.leave(booked.tenant, booked.num_blocks)
        self.placement.settle(replica_id, booked.request_id)

    def cancel(self, booked: Booked, sibling: int | None = None) -> ControllerCommand:
        """Return the command that ends a request, or one of its samples, where it is."""
        cancel = CancelRequest(booked.request_id, Attempt(booked.attempt), sibling)
        return self.to(booked.source, cancel)
