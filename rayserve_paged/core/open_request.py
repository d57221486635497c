"""One request as its consumer owns it: what it has of each sample, and the attempt that goes on."""

from __future__ import annotations

import dataclasses
import math
from array import array
from typing import TYPE_CHECKING

from rayserve_paged.core.controller_messages import SubmitRequest
from rayserve_paged.core.delivered import DeliveredSample
from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId
from rayserve_paged.core.request import Request

if TYPE_CHECKING:
    from rayserve_paged.core.stream_intake import News

Source = tuple[ReplicaId, Incarnation]
"""A life of a replica, from which streams are read."""

_NEVER = math.inf
_MAX_PAUSES = 8
"""How many times as long as the first one the pause between two submissions may become."""

_CLEARING_TOKENS = 16
"""New tokens after which a request whose replica died is as any other. With fewer it may have come
to where it ended the one before: what was sampled there and not handed out comes again."""


@dataclasses.dataclass(slots=True)
class Stream:
    """What is accepted of one sample that has not finished.

    Args:
        token_ids: Its output so far.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        news: What the delivery that is being taken in has brought; None at any other time.
    """

    token_ids: array[int] = dataclasses.field(default_factory=lambda: array("i"))
    num_cached_tokens: int = 0
    news: News | None = None


class OpenRequest:
    """A request that has not finished.

        submitted --Placed--> placed --first item--> pinned --loss--> submitted, as attempt + 1

    Once something of an attempt has come from a source, the attempt is *pinned* to it: what any
    other source has of it is not accepted.

    Args:
        request: As it was opened.
        now: In seconds.
    """

    __slots__ = (
        "attempt",
        "cancelled",
        "complaint",
        "current",
        "deadline_at",
        "deaths",
        "has_died",
        "has_tokens",
        "is_pinned",
        "lost_at",
        "max_tokens",
        "num_new_tokens",
        "num_trial_deaths",
        "on_trial",
        "opened",
        "pause_s",
        "source",
        "streams",
        "submit_at",
        "unplaced_since",
        "was_submitted",
        "why_unplaced",
        "withdraw_at",
    )

    def __init__(self, request: Request, now: float) -> None:
        self.opened = request
        # Its attempt as it is submitted, the deadline apart.
        self.current = request
        self.streams = {sibling: Stream() for sibling in range(request.params.num_siblings)}
        if request.delivered:
            self.streams = {
                one.sibling: Stream(array("i", one.token_ids)) for one in request.delivered
            }
        self.deadline_at = None if request.deadline_s is None else now + request.deadline_s
        # Output tokens have been accepted, in this attempt or one before.
        self.has_tokens = request.has_tokens
        # Samples that are to end as cancelled, as soon as that can be said.
        self.cancelled: set[int] = set()
        self.max_tokens: int | None = None
        # Why replicas died with it, one after the other, each before it had enough new tokens to be
        # cleared; the first of them counts where it had none.
        self.deaths: tuple[str, ...] = ()
        self.has_died = False
        self.num_trial_deaths = 0
        # Where it was last, and the same as long as the controller is to be told.
        self.lost_at: Source | None = None
        self.complaint: Source | None = None
        self._begin(now)

    def _begin(self, now: float) -> None:
        # The one that is accepted.
        self.attempt = self.current.attempt
        self.source: Source | None = None
        self.is_pinned = False
        # Of this attempt.
        self.num_new_tokens = 0
        self.on_trial = False
        self.submit_at = now
        self.pause_s = 0.0
        self.was_submitted = False
        self.unplaced_since: float | None = now
        self.why_unplaced = "its submission was not answered"
        self.withdraw_at = _NEVER

    @property
    def is_cancelled(self) -> bool:
        """Whether all samples that have not finished are to end as cancelled."""
        return self.cancelled.issuperset(self.streams)

    @property
    def submitted_siblings(self) -> frozenset[int]:
        """The samples that its attempt was submitted with."""
        if self.current.delivered:
            return frozenset(one.sibling for one in self.current.delivered)
        return frozenset(range(self.opened.params.num_siblings))

    def place(self, source: Source) -> None:
        """Note where the attempt is served."""
        self.source = source
        self.unplaced_since = None

    def pin(self) -> None:
        """Note that something of the attempt has come from its source: it need not be submitted
        any more.
        """
        self.is_pinned = True
        self.submit_at = _NEVER

    def submit(self, now: float, first_pause_s: float) -> SubmitRequest:
        """Return the submission of the attempt, which is to be repeated after a growing pause."""
        is_repeated, self.was_submitted = self.was_submitted, True
        self.pause_s = min(max(2.0 * self.pause_s, first_pause_s), _MAX_PAUSES * first_pause_s)
        self.submit_at = now + self.pause_s
        request = self.current
        if self.deadline_at is not None and (is_repeated or self.current is not self.opened):
            left_s = max(self.deadline_at - now, math.ulp(now))
            request = dataclasses.replace(request, deadline_s=left_s)
        complaint, self.complaint = self.complaint, None
        return SubmitRequest(request, complaint, is_repeated)

    def hold(self) -> None:
        """Let somebody else submit it."""
        self.submit_at = _NEVER
        self.unplaced_since = None

    def go_on(self, reason: str | None, now: float) -> None:
        """Begin the next attempt, since the source of this one is lost.

        Args:
            reason: How its replica died; None where it did not.
            now: In seconds.
        """
        if self.num_new_tokens >= _CLEARING_TOKENS:
            self.deaths, self.num_trial_deaths, self.has_died = (), 0, False
        elif reason is not None:
            if self.has_died or not self.num_new_tokens:
                self.deaths = (*self.deaths, reason)
                self.num_trial_deaths += self.on_trial and not self.num_new_tokens
            self.has_died = True
        if reason is not None:
            self.complaint = self.lost_at
        params = self.opened.params
        if self.max_tokens is not None:
            params = dataclasses.replace(params, max_tokens=self.max_tokens)
        if self.has_tokens:
            # They came with the first of them.
            params = dataclasses.replace(params, prompt_logprobs=None)
        self.current = dataclasses.replace(
            self.opened,
            attempt=Attempt(self.attempt + 1),
            params=params,
            delivered=self._delivered(),
            num_deaths=len(self.deaths),
        )
        self._begin(now)

    def _delivered(self) -> tuple[DeliveredSample, ...]:
        streams = sorted(self.streams.items())
        is_whole = len(streams) == self.opened.params.num_siblings
        if is_whole and not any(stream.token_ids for _sibling, stream in streams):
            return ()
        return tuple(
            DeliveredSample(sibling, tuple(stream.token_ids)) for sibling, stream in streams
        )
