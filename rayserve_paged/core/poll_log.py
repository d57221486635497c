"""What a consumer keeps of the replicas that it polls: acknowledgements, silences, strangers."""

from rayserve_paged.core.ids import Attempt, RequestId
from rayserve_paged.core.open_request import Source

ANSWER_SLACK_S = 1.0
"""How long after its timeout a poll counts as lost."""
SILENT_POLLS = 3
"""So many polls in a row that are not answered make a replica lost."""


class PollLog:
    """The polls of one consumer.

    Args:
        poll_timeout_s: After which replicas answer a poll with nothing to say.
    """

    def __init__(self, poll_timeout_s: float) -> None:
        self.num_polls = 0
        self._answer_s = poll_timeout_s + ANSWER_SLACK_S
        self._acks: dict[Source, int] = {}
        # The latest poll of each and when it was sent, while that was not answered; and since when
        # the source is silent: its last answer, or the first poll after it.
        self._polled: dict[Source, tuple[int, float]] = {}
        self._heard: dict[Source, float] = {}
        # What each delivered that was not accepted from there.
        self._unwanted: dict[Source, dict[tuple[RequestId, Attempt], None]] = {}

    def poll(self, source: Source, now: float) -> tuple[int, tuple[tuple[RequestId, Attempt], ...]]:
        """Note a poll; return the acknowledgement, and the attempts that are not wanted."""
        self.num_polls += 1
        if source not in self._polled:
            # Since it answered the last one nothing was asked of it.
            self._heard[source] = now
        self._polled[source] = (self.num_polls, now)
        return self._acks.get(source, 0), tuple(self._unwanted.pop(source, ()))

    def answer(self, source: Source, sequence: int, now: float, poll_id: int | None) -> None:
        """Note a delivery that answers a poll; None for the latest.

        That an older one is answered, or once more, does not say that the latest will be.
        """
        if poll_id is None or (source in self._polled and self._polled[source][0] == poll_id):
            self._polled.pop(source, None)
        self._heard[source] = now
        self._acks[source] = max(self._acks.get(source, 0), sequence)

    def refuse(self, source: Source, request_id: RequestId, attempt: Attempt) -> None:
        """Let the next poll of a source say that an attempt is not wanted from there."""
        self._unwanted.setdefault(source, {})[request_id, attempt] = None

    def overdue(self, now: float) -> list[Source]:
        """Return the sources whose poll must have been lost."""
        return [s for s, (_id, at) in self._polled.items() if now - at >= self._answer_s]

    def silent(self, now: float) -> list[Source]:
        """Return the sources that have let too many polls pass."""
        limit_s = SILENT_POLLS * self._answer_s
        return [source for source in self._polled if now - self._heard.get(source, now) >= limit_s]

    def forget(self, source: Source, *, for_good: bool) -> None:
        """Forget a source.

        Args:
            source: The source.
            for_good: It is gone; else it may be polled again, and goes on where it was.
        """
        for of_source in (self._polled, self._heard, self._unwanted):
            of_source.pop(source, None)
        if for_good:
            self._acks.pop(source, None)
