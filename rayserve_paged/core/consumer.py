"""State machine of a consumer: owns its requests, and accepts each token exactly once.

A consumer submits to the controller, learns which replica serves a request, polls the replicas
that serve any, and drops whatever comes twice or from an attempt that it did not accept.
"""

import dataclasses
from collections.abc import Iterable

from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.messages import (
    Delivery,
    Placed,
    PollTokens,
    ReplicaLost,
    TokenLogprobs,
)
from rayserve_paged.core.request import FinishReason, Request


@dataclasses.dataclass(frozen=True, slots=True)
class StreamUpdate:
    """What is new of one request, each token exactly once.

    Args:
        request_id: The request.
        replica_id: Who serves it.
        token_ids: New output tokens.
        logprobs: One for each of them where asked for, else empty.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        finish: Set once, on the last update.
        error: Reason, where finish is ERROR or CANCELLED.
    """

    request_id: RequestId
    replica_id: ReplicaId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    error: str | None


@dataclasses.dataclass(slots=True)
class _OpenRequest:
    request: Request
    placed: Placed | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0


class Consumer:
    """Open requests of one reader.

    Args:
        consumer_id: Its name, unique in the deployment.
    """

    def __init__(self, consumer_id: ConsumerId) -> None:
        self.consumer_id = consumer_id
        self._open: dict[RequestId, _OpenRequest] = {}
        self._acks: dict[tuple[ReplicaId, Incarnation], int] = {}
        self._lost: dict[tuple[ReplicaId, Incarnation], str] = {}
        self._num_polls = 0

    @property
    def open_requests(self) -> tuple[RequestId, ...]:
        """Requests that have not finished."""
        return tuple(self._open)

    def attempt(self, request_id: RequestId) -> Attempt | None:
        """Return the accepted attempt of an open request; None where it is not open."""
        known = self._open.get(request_id)
        return None if known is None else known.request.attempt

    def open(self, request: Request) -> None:
        """Begin to own a request, before it is submitted."""
        self._open[request.request_id] = _OpenRequest(request)

    def abandon(self, request_id: RequestId) -> None:
        """Stop owning a request; whatever still comes of it is dropped."""
        self._open.pop(request_id, None)

    def placed(self, placed: Placed) -> list[StreamUpdate]:
        """Take in where a request is served; it may have been lost on the way."""
        known = self._open.get(placed.request_id)
        if known is None or known.request.attempt != placed.attempt:
            return []
        known.placed = placed
        reason = self._lost.get((placed.replica_id, placed.incarnation))
        return [] if reason is None else [self._fail(known, placed.replica_id, reason)]

    def serving(self) -> set[tuple[ReplicaId, Incarnation]]:
        """Return the replicas to poll: those that serve an open request."""
        return {
            (known.placed.replica_id, known.placed.incarnation)
            for known in self._open.values()
            if known.placed is not None
        }

    def poll(self, replica_id: ReplicaId, incarnation: Incarnation) -> PollTokens:
        """Make the next poll of a replica, acknowledging all that came from it."""
        self._num_polls += 1
        ack = self._acks.get((replica_id, incarnation), 0)
        return PollTokens(self.consumer_id, self._num_polls, ack)

    def deliver(self, delivery: Delivery) -> list[StreamUpdate]:
        """Accept a delivery: each token once, whatever was delivered twice."""
        source = (delivery.replica_id, delivery.incarnation)
        self._acks[source] = max(self._acks.get(source, 0), delivery.sequence)
        updates = []
        for item in delivery.items:
            known = self._open.get(item.request_id)
            if known is None or known.request.attempt != item.attempt:
                continue
            if item.index > known.num_tokens:
                reason = f"its stream skips from token {known.num_tokens} to token {item.index}"
                updates.append(self._fail(known, delivery.replica_id, reason))
                continue
            have = known.num_tokens - item.index
            token_ids, logprobs = item.token_ids[have:], item.logprobs[have:]
            if not token_ids and item.finish is None:
                continue
            known.num_tokens += len(token_ids)
            known.num_cached_tokens = item.num_cached_tokens
            if item.finish is not None:
                del self._open[item.request_id]
            updates.append(
                StreamUpdate(
                    item.request_id,
                    delivery.replica_id,
                    token_ids,
                    logprobs,
                    item.num_cached_tokens,
                    item.finish,
                    item.error,
                )
            )
        return updates

    def lose(self, notices: Iterable[ReplicaLost]) -> list[StreamUpdate]:
        """Fail the open requests of replicas that are gone."""
        updates = []
        for notice in notices:
            source = (notice.replica_id, notice.incarnation)
            self._lost[source] = notice.reason
            self._acks.pop(source, None)
            updates += self.fail(notice.replica_id, notice.incarnation, notice.reason)
        return updates

    def served_by(self, replica_id: ReplicaId, incarnation: Incarnation) -> list[Request]:
        """Return the open requests that a replica serves."""
        return [
            known.request
            for known in self._open.values()
            if known.placed is not None
            and (known.placed.replica_id, known.placed.incarnation) == (replica_id, incarnation)
        ]

    def fail(
        self, replica_id: ReplicaId, incarnation: Incarnation, reason: str
    ) -> list[StreamUpdate]:
        """Fail the open requests that a replica serves; it may serve others later."""
        return [
            self._fail(self._open[request.request_id], replica_id, reason)
            for request in self.served_by(replica_id, incarnation)
        ]

    def _fail(self, known: _OpenRequest, replica_id: ReplicaId, reason: str) -> StreamUpdate:
        request_id = known.request.request_id
        del self._open[request_id]
        return StreamUpdate(
            request_id, replica_id, (), (), known.num_cached_tokens, FinishReason.ERROR, reason
        )
