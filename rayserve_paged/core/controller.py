"""Central state machine of a deployment: which replicas live, who serves which request.

It sees a request when it is submitted and when it has ended, never a token: consumers read their
streams from the replicas.
"""

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import assert_never

from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.chain_memo import ChainMemo
from rayserve_paged.core.config import BatchConfig, PlacementPolicy
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    ControllerEvent,
    EndDeployment,
    LoseReplica,
    Placed,
    RegisterReplica,
    Rejected,
    RenewLease,
    ReplicaLost,
    SendToReplica,
    StopReplica,
    SubmitRequest,
    TakeDown,
    WithdrawRequest,
)
from rayserve_paged.core.errors import (
    DuplicateRequestError,
    InvalidInputError,
    NoReplicaError,
    OverloadedError,
    PagedError,
)
from rayserve_paged.core.ids import Incarnation, ReplicaId, RequestId
from rayserve_paged.core.placement import Placement
from rayserve_paged.core.placement_policy import estimate_retry_s
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    FenceReplica,
    ReplicaReport,
    Tick,
)
from rayserve_paged.core.request import ModelLimits, Request, admit

_NUM_FINISH_TIMES = 32


@dataclasses.dataclass(slots=True)
class _LiveReplica:
    incarnation: Incarnation
    requests: dict[RequestId, Request] = dataclasses.field(default_factory=dict)
    num_reports: int = 0


class Controller:
    """All replicas of one deployment.

    Args:
        deployment_lease_s: The owner renews within this long, or everything is taken down; None
            for a deployment that outlives its owner.
        batch: Its queue limits; None for no limits.
        placement: How the replica of a request is chosen.
    """

    def __init__(
        self,
        deployment_lease_s: float | None,
        batch: BatchConfig | None = None,
        placement: PlacementPolicy = "prefix-aware",
    ) -> None:
        self._deployment_lease_s = deployment_lease_s
        self._batch = batch or BatchConfig()
        self._finish_times: deque[float] = deque(maxlen=_NUM_FINISH_TIMES)
        self._last_renewal: float | None = None
        self._replicas: dict[ReplicaId, _LiveReplica] = {}
        # The last incarnation of each that was lost, and why.
        self._lost: dict[ReplicaId, tuple[Incarnation, str]] = {}
        self._placement = Placement(placement, self._batch)
        self._placed: dict[RequestId, tuple[Request, Placed]] = {}
        self._scope: BlockScope | None = None
        self._memo: ChainMemo | None = None
        self._ending = False

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Take in one event; return what is to be done, in order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        match event:
            case SubmitRequest(request):
                return self._submit(request)
            case ReplicaReport():
                return self._report(event, now)
            case WithdrawRequest():
                return self._withdraw(event)
            case RegisterReplica():
                return self._register(event)
            case LoseReplica(replica_id, incarnation, reason):
                return self._lose(replica_id, incarnation, reason)
            case RenewLease():
                self._last_renewal = now
                return []
            case EndDeployment(reason):
                return self._end(reason)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    @property
    def replicas(self) -> Mapping[ReplicaId, Incarnation]:
        """Live replicas and their incarnations."""
        return {replica_id: live.incarnation for replica_id, live in self._replicas.items()}

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

    # --- replicas -------------------------------------------------------------------------

    def _register(self, event: RegisterReplica) -> list[ControllerCommand]:
        known = self._replicas.get(event.replica_id)
        if known is not None and known.incarnation >= event.incarnation:
            return []
        if self._ending:
            return [StopReplica(event.replica_id, event.incarnation, self._why_none())]
        lost = self._lost.get(event.replica_id)
        if lost is not None and lost[0] >= event.incarnation:
            return [StopReplica(event.replica_id, event.incarnation, lost[1])]
        if self._scope is None:
            self._scope = event.scope
            self._memo = ChainMemo(event.scope.block_size)
        elif self._scope != event.scope:
            reason = f"its KV differs from the deployment's: {event.scope} is not {self._scope}"
            return [StopReplica(event.replica_id, event.incarnation, reason)]
        commands: list[ControllerCommand] = []
        if known is not None:
            commands = self._lose(event.replica_id, known.incarnation, "replaced by a restart")
        self._replicas[event.replica_id] = _LiveReplica(event.incarnation)
        self._placement.add(event.replica_id, event.limits)
        return commands

    def _lose(
        self, replica_id: ReplicaId, incarnation: Incarnation, reason: str
    ) -> list[ControllerCommand]:
        live = self._replicas.get(replica_id)
        if live is None or live.incarnation != incarnation:
            return []
        del self._replicas[replica_id]
        self._lost[replica_id] = (incarnation, reason)
        self._placement.remove(replica_id)
        consumers = {request.consumer_id for request in live.requests.values()}
        for request_id in live.requests:
            del self._placed[request_id]
        return [
            # Where its first rank still lives, streams end at once and with the reason.
            SendToReplica(replica_id, incarnation, FenceReplica(reason)),
            ReplicaLost(replica_id, incarnation, reason, tuple(sorted(consumers))),
            StopReplica(replica_id, incarnation, reason),
        ]

    def _report(self, report: ReplicaReport, now: float) -> list[ControllerCommand]:
        live = self._replicas.get(report.replica_id)
        if live is None or live.incarnation != report.incarnation:
            return []
        if report.sequence < live.num_reports:
            # Once more: its names may mean other requests by now.
            return []
        live.num_reports = report.sequence + 1
        for request_id, attempt in report.prefilled:
            request = live.requests.get(request_id)
            if request is not None and request.attempt == attempt:
                self._placement.note_prefilled(report.replica_id, request_id)
        for request_id, attempt in report.finished:
            request = live.requests.get(request_id)
            if request is not None and request.attempt == attempt:
                self._forget_request(report.replica_id, live, request)
                self._finish_times.append(now)
        self._placement.update(report.replica_id, report.published, report.evicted)
        if report.fenced is not None:
            return self._lose(report.replica_id, report.incarnation, report.fenced)
        return []

    # --- requests -------------------------------------------------------------------------

    def _submit(self, request: Request) -> list[ControllerCommand]:
        known = self._placed.get(request.request_id)
        if known is not None and known[0] == request:
            return [known[1]]
        try:
            if known is not None:
                raise DuplicateRequestError(request.request_id)
            return self._place(request)
        except PagedError as error:
            return [Rejected(request.request_id, request.attempt, error)]

    def _place(self, request: Request) -> list[ControllerCommand]:
        limits = self.limits
        if self._ending or limits is None or self._scope is None or self._memo is None:
            raise NoReplicaError(self._why_none())
        if request.params.seed is None:
            raise InvalidInputError("seed", None, "a seed, drawn by the consumer")
        admitted = admit(request, limits)
        root = self._scope.root(request.scope)
        keys = tuple(self._memo.keys(root, request.prompt_token_ids, request.attachments))
        max_tokens = admitted.params.max_tokens
        assert max_tokens is not None, "admit sets it"
        replica_id = self._placement.place(admitted, keys)
        if replica_id is None:
            raise self._overloaded(admitted)
        live = self._replicas[replica_id]
        placed = Placed(
            request.request_id, request.attempt, replica_id, live.incarnation, max_tokens
        )
        live.requests[request.request_id] = admitted
        self._placed[request.request_id] = (request, placed)
        return [
            SendToReplica(replica_id, live.incarnation, AssignRequest(admitted, keys)),
            placed,
        ]

    def _overloaded(self, request: Request) -> OverloadedError:
        num_waiting, num_pending_tokens = self._placement.shortest_queue(request)
        return OverloadedError(
            num_waiting,
            self._batch.max_num_waiting,
            num_pending_tokens,
            self._batch.max_pending_tokens,
            estimate_retry_s(tuple(self._finish_times)),
        )

    def _withdraw(self, event: WithdrawRequest) -> list[ControllerCommand]:
        known = self._placed.get(event.request_id)
        if known is None or known[0].attempt != event.attempt:
            return []
        placed = known[1]
        cancel = CancelRequest(event.request_id, event.attempt, event.sibling)
        return [SendToReplica(placed.replica_id, placed.incarnation, cancel)]

    def _forget_request(self, replica_id: ReplicaId, live: _LiveReplica, request: Request) -> None:
        del live.requests[request.request_id]
        del self._placed[request.request_id]
        self._placement.settle(replica_id, request.request_id)

    def _why_none(self) -> str:
        if self._ending:
            return "the deployment is being taken down"
        if self._lost:
            reasons = ((name, self._lost[name][1]) for name in sorted(self._lost))
            return "; ".join(f"{name} is lost: {why}" for name, why in reasons)
        return "none has registered yet"

    # --- the deployment -------------------------------------------------------------------

    def _tick(self, now: float) -> list[ControllerCommand]:
        if self._last_renewal is None:
            self._last_renewal = now
        lease = self._deployment_lease_s
        if lease is None or now - self._last_renewal < lease:
            return []
        return self._end(f"its owner has not renewed the lease for {lease:g} s")

    def _end(self, reason: str) -> list[ControllerCommand]:
        if self._ending:
            return []
        self._ending = True
        commands: list[ControllerCommand] = []
        for replica_id, incarnation in self.replicas.items():
            commands += self._lose(replica_id, incarnation, f"the deployment ended: {reason}")
        return [*commands, TakeDown(reason)]
