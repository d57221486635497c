"""What a replica owes its consumers: stream items, polls that wait, leases.

Delivery is pulled. Items gather per request until a poll takes them; they are kept until a later
poll acknowledges them, so that an answer lost on the way is given again. A consumer that has no
poll pending and does not come back within its lease has expired: its requests are to be ended. How
they ended is kept for some more leases, so that one that was only held up learns of it.
"""

import dataclasses

from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.messages import AnswerPoll, Delivery, PollTokens, StreamItem, TokenLogprobs
from rayserve_paged.core.request import FinishReason

LEASES_TO_REMEMBER = 10


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
    expired: bool = False
    poll_id: int | None = None
    sequence: int = 0
    ended: list[StreamItem] = dataclasses.field(default_factory=list)
    gathering: dict[RequestId, _Gathering] = dataclasses.field(default_factory=dict)
    unacknowledged: list[tuple[int, tuple[StreamItem, ...]]] = dataclasses.field(
        default_factory=list
    )

    @property
    def has_news(self) -> bool:
        return bool(self.ended or self.gathering)


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
        # Over all consumers: one that is forgotten and comes back still acknowledges by it.
        self._sequence = 0
        self._boxes: dict[ConsumerId, _ConsumerBox] = {}

    def meet(self, consumer_id: ConsumerId, now: float) -> None:
        """Take a request or a poll as a sign of life; the consumer's lease begins anew."""
        box = self._boxes.setdefault(consumer_id, _ConsumerBox(now))
        box.last_seen = now
        box.expired = False

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
        if finish is not None:
            # Closed, since another request or attempt may come under the same name.
            box.ended.append(box.gathering.pop(request_id).freeze(request_id))

    def poll(self, event: PollTokens, now: float) -> list[AnswerPoll]:
        """Take in a poll; a poll that was pending before is answered empty."""
        self.meet(event.consumer_id, now)
        box = self._boxes[event.consumer_id]
        answers = []
        if box.poll_id is not None:
            answers.append(self._answer(event.consumer_id, box, now, ()))
        box.poll_id = event.poll_id
        box.unacknowledged = [sent for sent in box.unacknowledged if sent[0] > event.ack]
        if box.unacknowledged or box.has_news:
            answers.append(self._deliver(event.consumer_id, box, now))
        return answers

    def flush(self, now: float) -> list[AnswerPoll]:
        """Answer the pending polls of consumers that are owed something."""
        return [
            self._deliver(consumer_id, box, now)
            for consumer_id, box in self._boxes.items()
            if box.poll_id is not None and box.has_news
        ]

    def tick(self, now: float) -> tuple[list[AnswerPoll], list[ConsumerId]]:
        """Answer polls that have waited long enough; return consumers whose lease ran out now.

        After LEASES_TO_REMEMBER leases a consumer is forgotten, with what it is owed.
        """
        answers = []
        expired = []
        forgotten = []
        for consumer_id, box in self._boxes.items():
            silent_s = now - box.last_seen
            if box.poll_id is not None:
                if silent_s >= self._poll_timeout_s:
                    answers.append(self._answer(consumer_id, box, now, ()))
            elif silent_s >= self._lease_s and not box.expired:
                box.expired = True
                expired.append(consumer_id)
            elif silent_s >= self._lease_s * LEASES_TO_REMEMBER:
                forgotten.append(consumer_id)
        for consumer_id in forgotten:
            del self._boxes[consumer_id]
        return answers, expired

    def _deliver(self, consumer_id: ConsumerId, box: _ConsumerBox, now: float) -> AnswerPoll:
        growing = [item.freeze(request_id) for request_id, item in box.gathering.items()]
        fresh = (*box.ended, *growing)
        box.ended = []
        box.gathering = {}
        # What an unacknowledged answer held comes first, so that indices stay in order.
        items = tuple(item for _sequence, sent in box.unacknowledged for item in sent) + fresh
        self._sequence += 1
        box.sequence = self._sequence
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
