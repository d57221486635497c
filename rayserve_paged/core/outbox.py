"""What a replica owes its consumers: stream items, polls that wait, leases.

Delivery is pulled. Items gather per request until a poll takes them; they are kept until a later
poll acknowledges them, so that an answer lost on the way is given again. A consumer that has no
poll pending and does not come back within its lease is gone.
"""

import dataclasses

from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.messages import AnswerPoll, Delivery, PollTokens, StreamItem, TokenLogprobs
from rayserve_paged.core.request import FinishReason


@dataclasses.dataclass(slots=True)
class _Gathering:
    """The next item of one request, as it grows."""

    attempt: Attempt
    index: int
    num_cached_tokens: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    def freeze(self, request_id: RequestId) -> StreamItem:
        return StreamItem(
            request_id,
            self.attempt,
            self.index,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.num_cached_tokens,
            self.finish,
            self.error,
        )


@dataclasses.dataclass(slots=True)
class _ConsumerBox:
    """One consumer: its lease, its pending poll, what it is owed."""

    last_seen: float
    poll_id: int | None = None
    sequence: int = 0
    gathering: dict[RequestId, _Gathering] = dataclasses.field(default_factory=dict)
    unacknowledged: list[tuple[int, tuple[StreamItem, ...]]] = dataclasses.field(
        default_factory=list
    )


class Outbox:
    """All consumers of one replica incarnation.

    Args:
        replica_id: Who answers.
        incarnation: In which life.
        lease_s: A consumer without a poll for this long is expired.
        poll_timeout_s: A poll with nothing to say is answered after this long.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        incarnation: Incarnation,
        lease_s: float,
        poll_timeout_s: float,
    ) -> None:
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._poll_timeout_s = poll_timeout_s
        self._boxes: dict[ConsumerId, _ConsumerBox] = {}

    def meet(self, consumer_id: ConsumerId, now: float) -> None:
        """Know a consumer from its first request on; its lease begins."""
        if consumer_id not in self._boxes:
            self._boxes[consumer_id] = _ConsumerBox(last_seen=now)

    def put(
        self,
        consumer_id: ConsumerId,
        request_id: RequestId,
        attempt: Attempt,
        index: int,
        token_ids: tuple[int, ...],
        logprobs: TokenLogprobs | None = None,
        num_cached_tokens: int = 0,
        finish: FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        """Add to what a consumer is owed; dropped where the consumer is gone.

        Args:
            consumer_id: Who reads.
            request_id: The request.
            attempt: Its attempt.
            index: Output index of the first of `token_ids`, or of the next where there is none.
            token_ids: New output tokens.
            logprobs: Of the one new token, where asked for.
            num_cached_tokens: Of the request's first admission.
            finish: Set on the last item.
            error: Reason, where finish is ERROR or CANCELLED.
        """
        box = self._boxes.get(consumer_id)
        if box is None:
            return
        item = box.gathering.get(request_id)
        if item is None:
            item = box.gathering[request_id] = _Gathering(attempt, index, num_cached_tokens)
        item.token_ids += token_ids
        if logprobs is not None:
            item.logprobs.append(logprobs)
        item.finish = finish
        item.error = error

    def poll(self, event: PollTokens, now: float) -> list[AnswerPoll]:
        """Take in a poll; a poll that was pending before is answered empty."""
        self.meet(event.consumer_id, now)
        box = self._boxes[event.consumer_id]
        answers = []
        if box.poll_id is not None:
            answers.append(self._answer(event.consumer_id, box, now, ()))
        box.last_seen = now
        box.poll_id = event.poll_id
        box.unacknowledged = [sent for sent in box.unacknowledged if sent[0] > event.ack]
        if box.unacknowledged or box.gathering:
            answers.append(self._deliver(event.consumer_id, box, now))
        return answers

    def flush(self, now: float) -> list[AnswerPoll]:
        """Answer the pending polls of consumers that are owed something."""
        return [
            self._deliver(consumer_id, box, now)
            for consumer_id, box in self._boxes.items()
            if box.poll_id is not None and box.gathering
        ]

    def tick(self, now: float) -> tuple[list[AnswerPoll], list[ConsumerId]]:
        """Answer polls that have waited long enough; return consumers whose lease ran out.

        Expired consumers are forgotten together with what they are owed.
        """
        answers = []
        expired = []
        for consumer_id, box in self._boxes.items():
            if box.poll_id is not None:
                if now - box.last_seen >= self._poll_timeout_s:
                    answers.append(self._answer(consumer_id, box, now, ()))
            elif now - box.last_seen >= self._lease_s:
                expired.append(consumer_id)
        for consumer_id in expired:
            del self._boxes[consumer_id]
        return answers, expired

    def _deliver(self, consumer_id: ConsumerId, box: _ConsumerBox, now: float) -> AnswerPoll:
        fresh = tuple(item.freeze(request_id) for request_id, item in box.gathering.items())
        box.gathering = {}
        # What an unacknowledged answer held comes first, so that indices stay in order.
        items = tuple(item for _sequence, sent in box.unacknowledged for item in sent) + fresh
        box.sequence += 1
        box.unacknowledged = [(box.sequence, items)]
        return self._answer(consumer_id, box, now, items)

    def _answer(
        self, consumer_id: ConsumerId, box: _ConsumerBox, now: float, items: tuple[StreamItem, ...]
    ) -> AnswerPoll:
        assert box.poll_id is not None
        poll_id, box.poll_id = box.poll_id, None
        box.last_seen = now
        delivery = Delivery(self._replica_id, self._incarnation, box.sequence, items)
        return AnswerPoll(consumer_id, poll_id, delivery)
