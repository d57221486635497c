"""State machine of a consumer: owns its requests, and accepts each token exactly once.

A consumer submits to the controller, learns which replica serves a request, polls the replicas
that serve any, and drops whatever comes twice or from an attempt that it did not accept.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from rayserve_paged.core.controller_messages import Placed, ReplicaLost
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.replica_messages import PollTokens
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import Delivery, StreamItem, StreamName, TokenRun


@dataclasses.dataclass(frozen=True, slots=True)
class StreamUpdate:
    """What is new of one request, each token exactly once.

    Args:
        request_id: The request.
        sibling: Which of its parallel samples.
        replica_id: Who serves it; None where it was given to none.
        token_ids: New output tokens.
        logprobs: One for each of them where asked for, else empty.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        finish: Set once, on the last update of the sibling.
        error: Reason, where finish is ERROR or CANCELLED.
        prompt_logprobs: Of the prompt tokens but the first, where asked for; with one sibling.
    """

    request_id: RequestId
    sibling: int
    replica_id: ReplicaId | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    error: str | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(slots=True)
class _Stream:
    """What is accepted of one sibling."""

    num_tokens: int = 0
    num_cached_tokens: int = 0


@dataclasses.dataclass(slots=True)
class _OpenRequest:
    request: Request
    streams: dict[int, _Stream]
    placed: Placed | None = None


@dataclasses.dataclass(slots=True)
class _News:
    """What a delivery brings for one stream, gathered over its items."""

    stream: _Stream
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None


class Consumer:
    """Open requests of one reader.

    Args:
        consumer_id: Its name, unique in the deployment.
    """

    def __init__(self, consumer_id: ConsumerId) -> None:
        self.consumer_id = consumer_id
        self._open: dict[RequestId, _OpenRequest] = {}
        # Open requests that each replica serves; none that serves no request.
        self._num_served: Counter[tuple[ReplicaId, Incarnation]] = Counter()
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
        streams = {sibling: _Stream() for sibling in range(request.params.num_siblings)}
        if request.delivered:
            streams = {one.sibling: _Stream(len(one.token_ids)) for one in request.delivered}
        self._open[request.request_id] = _OpenRequest(request, streams)

    def abandon(self, request_id: RequestId) -> None:
        """Stop owning a request; whatever still comes of it is dropped."""
        if request_id in self._open:
            self._close(request_id)

    def placed(self, placed: Placed) -> list[StreamUpdate]:
        """Take in where a request is served; it may have been lost on the way."""
        known = self._open.get(placed.request_id)
        if known is None or known.request.attempt != placed.attempt:
            return []
        if known.placed is not None:
            self._leave(known.placed)
        known.placed = placed
        self._num_served[placed.replica_id, placed.incarnation] += 1
        reason = self._lost.get((placed.replica_id, placed.incarnation))
        if reason is None:
            return []
        return self._end(known, placed.replica_id, FinishReason.ERROR, reason)

    def end_unplaced(self, request_id: RequestId, finish: FinishReason) -> list[StreamUpdate]:
        """End a request that was given to no replica."""
        known = self._open.get(request_id)
        return [] if known is None else self._end(known, None, finish, None)

    def serving(self) -> AbstractSet[tuple[ReplicaId, Incarnation]]:
        """Return the replicas to poll: those that serve an open request, as of when it is read."""
        return self._num_served.keys()

    def poll(self, replica_id: ReplicaId, incarnation: Incarnation) -> PollTokens:
        """Make the next poll of a replica, acknowledging all that came from it."""
        self._num_polls += 1
        ack = self._acks.get((replica_id, incarnation), 0)
        return PollTokens(self.consumer_id, self._num_polls, ack)

    def deliver(self, delivery: Delivery) -> list[StreamUpdate]:
        """Accept a delivery: each token once, whatever was delivered twice."""
        source = (delivery.replica_id, delivery.incarnation)
        self._acks[source] = max(self._acks.get(source, 0), delivery.sequence)
        gathered: dict[StreamName, _News] = {}
        for item in delivery.items:
            if isinstance(item, TokenRun):
                streams = zip(
                    item.names, item.indices.tolist(), item.token_ids.T.tolist(), strict=True
                )
                for name, index, token_ids in streams:
                    self._gather(gathered, name, index, token_ids, None)
            else:
                self._gather(gathered, item.name, item.index, item.token_ids, item)
        updates = []
        for name, news in gathered.items():
            updates += self._accept(name, news, delivery.replica_id)
        return updates

    def _gather(
        self,
        gathered: dict[StreamName, _News],
        name: StreamName,
        index: int,
        token_ids: Sequence[int],
        item: StreamItem | None,
    ) -> None:
        """Add what is new of one item; nothing follows the end of a stream."""
        news = gathered.get(name)
        if news is None:
            known = self._open.get(name.request_id)
            if known is None or known.request.attempt != name.attempt:
                return
            stream = known.streams.get(name.sibling)
            if stream is None:
                return
            news = gathered[name] = _News(stream)
        if news.finish is not None:
            return
        stream = news.stream
        have = stream.num_tokens - index
        if have < 0:
            news.finish = FinishReason.ERROR
            news.error = f"its stream skips from token {stream.num_tokens} to token {index}"
            return
        fresh = token_ids[have:]
        news.token_ids += fresh
        stream.num_tokens += len(fresh)
        if item is not None:
            news.logprobs += item.logprobs[have:]
            if index == have == 0:
                news.prompt_logprobs = item.prompt_logprobs
            stream.num_cached_tokens = item.num_cached_tokens
            news.finish, news.error = item.finish, item.error

    def _accept(self, name: StreamName, news: _News, replica_id: ReplicaId) -> list[StreamUpdate]:
        if not news.token_ids and news.finish is None:
            return []
        if news.finish is not None:
            known = self._open[name.request_id]
            del known.streams[name.sibling]
            if not known.streams:
                self._close(name.request_id)
        update = StreamUpdate(
            name.request_id,
            name.sibling,
            replica_id,
            tuple(news.token_ids),
            tuple(news.logprobs),
            news.stream.num_cached_tokens,
            news.finish,
            news.error,
            news.prompt_logprobs,
        )
        return [update]

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
            update
            for request in self.served_by(replica_id, incarnation)
            for update in self._end(
                self._open[request.request_id], replica_id, FinishReason.ERROR, reason
            )
        ]

    def _end(
        self,
        known: _OpenRequest,
        replica_id: ReplicaId | None,
        finish: FinishReason,
        error: str | None,
    ) -> list[StreamUpdate]:
        request_id = known.request.request_id
        self._close(request_id)
        return [
            StreamUpdate(
                request_id,
                sibling,
                replica_id,
                (),
                (),
                stream.num_cached_tokens,
                finish,
                error,
            )
            for sibling, stream in known.streams.items()
        ]

    def _close(self, request_id: RequestId) -> None:
        placed = self._open.pop(request_id).placed
        if placed is not None:
            self._leave(placed)

    def _leave(self, placed: Placed) -> None:
        source = (placed.replica_id, placed.incarnation)
        self._num_served[source] -= 1
        if not self._num_served[source]:
            del self._num_served[source]
