"""What a replica tells its controller: what changed since it last did, or all that there is."""

from rayserve_paged.core.batcher import Batcher
from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import (
    AskInventory,
    Inventory,
    ReplicaReport,
    ServedRequest,
)
from rayserve_paged.core.request import ModelLimits, Request

REPORT_INTERVAL_S = 0.05


class ReportLog:
    """News of one incarnation, and when they are to be told.

    Args:
        replica_id: The replica.
        incarnation: Its life.
        batcher: Whose figures and keys are told.
    """

    def __init__(self, replica_id: ReplicaId, incarnation: Incarnation, batcher: Batcher) -> None:
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._batcher = batcher
        self._num_reports = 0
        self._last_report = float("-inf")
        self._finished: list[tuple[RequestId, Attempt]] = []
        self._prefilled: list[tuple[RequestId, Attempt]] = []
        # Requests without a token from here.
        self._prefilling: set[RequestId] = set()
        # A trial has come out well, and the next suspect waits for that.
        self._is_urgent = False

    @property
    def num_prefilling(self) -> int:
        """Requests that have come, have not ended and have had no token."""
        return len(self._prefilling)

    def begin(self, request: Request) -> None:
        """Note a request that has come."""
        self._prefilling.add(request.request_id)

    def prefill(self, request: Request) -> None:
        """Note that a request has had a token."""
        if request.request_id in self._prefilling:
            self._prefilling.remove(request.request_id)
            self._prefilled.append((request.request_id, request.attempt))
            self._is_urgent |= request.is_suspect

    def finish(self, request: Request) -> None:
        """Note that a request has ended."""
        self._prefilling.discard(request.request_id)
        self._finished.append((request.request_id, request.attempt))
        self._is_urgent |= request.is_suspect

    @property
    def next_due(self) -> float | None:
        """When a busy replica is to report, in seconds; None where it has nothing to tell."""
        return self._last_report + REPORT_INTERVAL_S if self._has_news else None

    @property
    def _has_news(self) -> bool:
        index = self._batcher.kv.index
        return bool(self._finished or self._prefilled) or index.has_changes

    def take_due(self, now: float, *, is_idle: bool) -> ReplicaReport | None:
        """Return a report of what changed, where one is due: at intervals while busy, at once when
        idle, and at once where a trial has ended.
        """
        if not self._has_news:
            return None
        if not (is_idle or self._is_urgent or now >= self._last_report + REPORT_INTERVAL_S):
            return None
        self._last_report = now
        return self._report(None)

    def last_report(self, fenced: str) -> ReplicaReport:
        """Return a report of the incarnation's end."""
        return self._report(fenced)

    def _report(self, fenced: str | None) -> ReplicaReport:
        batcher = self._batcher
        published, evicted = batcher.kv.index.take_changes()
        report = ReplicaReport(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            sequence=self._num_reports,
            published=published,
            evicted=evicted,
            prefilled=tuple(self._prefilled),
            finished=tuple(self._finished),
            num_running=batcher.num_running,
            num_waiting=batcher.num_waiting,
            num_free_blocks=batcher.kv.pool.num_free,
            num_cached_blocks=batcher.kv.pool.num_cached,
            num_queried_tokens=batcher.num_queried_tokens,
            num_hit_tokens=batcher.num_hit_tokens,
            num_resumed_tokens=batcher.num_resumed_tokens,
            fenced=fenced,
        )
        self._num_reports += 1
        self._finished = []
        self._prefilled = []
        self._is_urgent = False
        return report

    def inventory(
        self, requests: list[Request], limits: ModelLimits, ask: AskInventory | None
    ) -> Inventory:
        """Return all that the replica has; no report before it matters any more.

        Args:
            requests: Those that have not ended.
            limits: Of the replica.
            ask: The question; None where a new term was the reason.
        """
        keys = None
        if ask is None or ask.with_keys:
            index = self._batcher.kv.index
            index.take_changes()
            keys = tuple(key for key, _block_id in index.items())
        return Inventory(
            number=None if ask is None else ask.number,
            served=tuple(self._served(request, limits) for request in requests),
            keys=keys,
            num_reports=self._num_reports,
        )

    def _served(self, request: Request, limits: ModelLimits) -> ServedRequest:
        assert request.params.max_tokens is not None, "requests are clamped at the door"
        has_token = request.request_id not in self._prefilling
        return ServedRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            consumer_id=request.consumer_id,
            num_rows=request.num_rows,
            num_tokens=request.num_promised_tokens,
            max_tokens=request.params.max_tokens,
            is_prefilled=has_token,
            on_trial=request.is_suspect and (request.is_tried_long or not has_token),
            is_tried_long=request.is_tried_long,
            tenant=request.tenant,
            num_blocks=request.num_tenant_blocks(limits),
        )
