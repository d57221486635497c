"""What a replica owes its consumers: stream items, polls that wait, leases.

Delivery is pulled. Items gather until a poll takes them; they are kept until a later poll
acknowledges them, so that an answer lost on the way is given again. A consumer that has no
poll pending and does not come back within its lease has expired: its requests are to be ended. How
they ended is kept for some more leases, so that one that was only held up learns of it.
"""

import dataclasses

from rayserve_paged.core.ids import ConsumerId, Incarnation, ReplicaId
from rayserve_paged.core.replica_messages import AnswerPoll, PollTokens
from rayserve_paged.core.stream_messages import Delivery, StreamItem, TokenRun

LEASES_TO_REMEMBER = 10


@dataclasses.dataclass(slots=True)
class _ConsumerBox:
    """One consumer: its lease, its pending poll, what it is owed in order."""

    last_seen: float
    expired: bool = False
    poll_id: int | None = None
    polled_at: float = 0.0
    sequence: int = 0
    fresh: list[StreamItem | TokenRun] = dataclasses.field(default_factory=list)
    unacknowledged: list[StreamItem | TokenRun] = dataclasses.field(default_factory=list)


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
        self._fenced: str | None = None

    def meet(self, consumer_id: ConsumerId, now: float) -> None:
        """Take a request or a poll as a sign of life; the consumer's lease begins anew."""
        box = self._boxes.setdefault(consumer_id, _ConsumerBox(now))
        box.last_seen = now
        box.expired = False

    def put(self, consumer_id: ConsumerId, item: StreamItem | TokenRun) -> None:
        """Add to what a consumer is owed; dropped where the consumer was never met."""
        box = self._boxes.get(consumer_id)
        if box is not None:
            box.fresh.append(item)

    def poll(self, event: PollTokens, now: float) -> list[AnswerPoll]:
        """Take in a poll; a poll that was pending before is answered empty."""
        self.meet(event.consumer_id, now)
        box = self._boxes[event.consumer_id]
        answers = []
        if box.poll_id is not None:
            answers.append(self._answer(event.consumer_id, box, now, ()))
        box.poll_id, box.polled_at = event.poll_id, now
        if event.ack >= box.sequence:
            box.unacknowledged = []
        if box.unacknowledged or box.fresh or self._fenced is not None:
            answers.append(self._deliver(event.consumer_id, box, now))
        return answers

    def fence(self, reason: str) -> None:
        """Tell whoever polls what it is owed, and that nothing follows."""
        self._fenced = reason

    def flush(self, now: float) -> list[AnswerPoll]:
        """Answer the pending polls of consumers that are owed something."""
        return [
            self._deliver(consumer_id, box, now)
            for consumer_id, box in self._boxes.items()
            if box.poll_id is not None and (box.fresh or self._fenced is not None)
        ]

    @property
    def next_tick(self) -> float | None:
        """When `tick` will have something to do, in seconds; None where it never will."""
        return min(map(self._deadline, self._boxes.values()), default=None)

    def tick(self, now: float) -> tuple[list[AnswerPoll], list[ConsumerId]]:
        """Answer polls that have waited long enough; return consumers whose lease ran out now.

        After LEASES_TO_REMEMBER leases a consumer is forgotten, with what it is owed.
        """
        answers = []
        expired = []
        forgotten = []
        for consumer_id, box in self._boxes.items():
            if now < self._deadline(box):
                continue
            if box.poll_id is not None:
                answers.append(self._answer(consumer_id, box, now, ()))
            elif not box.expired:
                box.expired = True
                expired.append(consumer_id)
            else:
                forgotten.append(consumer_id)
        for consumer_id in forgotten:
            del self._boxes[consumer_id]
        return answers, expired

    def _deadline(self, box: _ConsumerBox) -> float:
        """Return when silence changes something: a poll's answer, the lease, the memory of it."""
        if box.poll_id is not None:
            # Not from the last sign of life: new requests would put the answer off for ever.
            return box.polled_at + self._poll_timeout_s
        num_leases = LEASES_TO_REMEMBER if box.expired else 1
        return box.last_seen + self._lease_s * num_leases

    def _deliver(self, consumer_id: ConsumerId, box: _ConsumerBox, now: float) -> AnswerPoll:
        # What an unacknowledged answer held comes first, so that indices stay in order.
        box.unacknowledged += box.fresh
        box.fresh = []
        self._sequence += 1
        box.sequence = self._sequence
        return self._answer(consumer_id, box, now, tuple(box.unacknowledged))

    def _answer(
        self,
        consumer_id: ConsumerId,
        box: _ConsumerBox,
        now: float,
        items: tuple[StreamItem | TokenRun, ...],
    ) -> AnswerPoll:
        assert box.poll_id is not None
        poll_id, box.poll_id = box.poll_id, None
        box.last_seen = now
        delivery = Delivery(self._replica_id, self._incarnation, box.sequence, items, self._fenced)
        return AnswerPoll(consumer_id, poll_id, delivery)
