"""State machine of a consumer: owns its requests, and accepts each token exactly once.

A consumer submits to the controller, learns which replica serves a request, polls the replicas
that serve any, and drops whatever comes twice or from an attempt that it did not accept. When a
replica is lost, its requests go on as their next attempts, with all that was delivered.

The shell calls `tick` after every other call and when `next_tick` has come, sends what it returns,
and hands what the consumer returns to whoever reads the streams.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.controller_messages import (
    Placed,
    Rejected,
    ReplicaLost,
    SubmitRequest,
    WithdrawRequest,
)
from rayserve_paged.core.errors import NoReplicaError, PoisonedRequestError
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.keyed_heap import KeyedHeap
from rayserve_paged.core.open_request import OpenRequest, Source
from rayserve_paged.core.poll_log import PollLog
from rayserve_paged.core.replica_messages import PollTokens
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.stream_intake import News, take_in
from rayserve_paged.core.stream_messages import Delivery, StreamName
from rayserve_paged.core.stream_update import Outgoing, StreamUpdate, end_of

WITHDRAW_AGAIN_S = 1.0
"""A cancellation is repeated after this long, until the stream has ended."""
DEADLINE_SLACK_S = 1.0
"""How long after its deadline a request that a replica serves is ended here."""
_RECOVERY = RecoveryConfig()


class Consumer:
    """Open requests of one reader.

    Args:
        consumer_id: Its name, unique in the deployment.
        recovery: How long it is patient with what.
        poll_timeout_s: After which replicas answer a poll with nothing to say.
    """

    def __init__(
        self,
        consumer_id: ConsumerId,
        recovery: RecoveryConfig = _RECOVERY,
        poll_timeout_s: float = 2.0,
    ) -> None:
        self.consumer_id = consumer_id
        self._recovery = recovery
        self._open: dict[RequestId, OpenRequest] = {}
        # When something is to be done about each, were nothing to come.
        self._due: KeyedHeap[RequestId] = KeyedHeap()
        # Open requests that each replica serves; none that serves no request.
        self._num_served: Counter[Source] = Counter()
        self._polls = PollLog(poll_timeout_s)
        self._lost: dict[Source, str] = {}
        self._unsent: list[WithdrawRequest] = []

    @property
    def open_requests(self) -> tuple[RequestId, ...]:
        """Requests that have not finished."""
        return tuple(self._open)

    def attempt(self, request_id: RequestId) -> Attempt | None:
        """Return the accepted attempt of an open request; None where it is not open."""
        known = self._open.get(request_id)
        return None if known is None else known.attempt

    def source(self, request_id: RequestId) -> Source | None:
        """Return where an open request is served; None where it is not, or not open."""
        known = self._open.get(request_id)
        return None if known is None else known.source

    # --- requests -------------------------------------------------------------------------

    def open(self, request: Request, now: float) -> None:
        """Begin to own a request; it is submitted at the next tick."""
        known = self._open[request.request_id] = OpenRequest(request, now)
        self._schedule(known)

    def hold(self, request_id: RequestId) -> None:
        """Submit a request no more: somebody else does, and hands in the answer."""
        known = self._open.get(request_id)
        if known is not None:
            known.hold()
            self._schedule(known)

    def abandon(self, request_id: RequestId) -> WithdrawRequest | None:
        """Stop owning a request; whatever still comes of it is dropped.

        Returns:
            What tells the controller; None where it was not open.
        """
        known = self._open.get(request_id)
        if known is None:
            return None
        withdrawal = WithdrawRequest(request_id, known.attempt, None, known.source)
        self._close(known)
        return withdrawal

    def cancel(self, request_id: RequestId, sibling: int | None, now: float) -> list[StreamUpdate]:
        """End a request, or one of its samples, as cancelled: at once where nobody serves it, and
        else as soon as who serves it has said so, or is lost.
        """
        known = self._open.get(request_id)
        if known is None or not (sibling is None or sibling in known.streams):
            return []
        known.cancelled |= set(known.streams) if sibling is None else {sibling}
        if known.source is not None:
            known.withdraw_at = now
            self._schedule(known)
            return []
        # Its submission may be on its way all the same.
        self._unsent.append(WithdrawRequest(request_id, known.attempt, sibling))
        return self._end_cancelled(known)

    def placed(self, placed: Placed, now: float) -> list[StreamUpdate]:
        """Take in where a request is served; it may have been lost on the way."""
        source = (placed.replica_id, placed.incarnation)
        known = self._open.get(placed.request_id)
        if known is None or known.attempt != placed.attempt:
            self._unsent.append(WithdrawRequest(placed.request_id, placed.attempt, None, source))
            return []
        if known.is_pinned and known.source != source:
            return []  # If it is there as well, it is told so as soon as it delivers.
        known.max_tokens = placed.max_tokens
        known.on_trial = placed.on_trial
        if known.source != source:
            self._leave(known)
            self._serve(known, source)
            if known.cancelled:
                known.withdraw_at = now
        reason = self._lost.get(source)
        if reason is not None:
            return self._lose_attempt(known, reason, now)
        self._schedule(known)
        return []

    def rejected(self, rejected: Rejected, now: float) -> list[StreamUpdate]:
        """Take in that a request was refused, for good or for now."""
        known = self._open.get(rejected.request_id)
        if known is None or known.attempt != rejected.attempt or known.is_pinned:
            return []
        if rejected.retry_after_s is None:
            return self._end(known, FinishReason.ERROR, rejected.error)
        known.why_unplaced = str(rejected.error)
        known.submit_at = now + rejected.retry_after_s
        known.pause_s = 0.0
        self._schedule(known)
        return []

    def end_unplaced(self, request_id: RequestId, finish: FinishReason) -> list[StreamUpdate]:
        """End a request that was given to no replica."""
        known = self._open.get(request_id)
        return [] if known is None else self._end(known, finish, None)

    def refuse(self, request_id: RequestId, error: BaseException) -> list[StreamUpdate]:
        """End a request that cannot be submitted."""
        known = self._open.get(request_id)
        return [] if known is None else self._end(known, FinishReason.ERROR, error)

    # --- time -----------------------------------------------------------------------------

    @property
    def next_tick(self) -> float | None:
        """When `tick` will have something to do, in seconds; None where it never will."""
        if self._unsent:
            return float("-inf")
        first = self._due.first()
        return None if first is None else self._due.key(first)[0]

    def tick(self, now: float) -> Outgoing:
        """Return what is due: submissions and cancellations, repeated until they have led to
        something, and the ends of requests whose time is over.
        """
        messages: list[SubmitRequest | WithdrawRequest] = [*self._unsent]
        updates: list[StreamUpdate] = []
        self._unsent = []
        while (first := self._due.first()) is not None and self._due.key(first)[0] <= now:
            known = self._open[first]
            if (ends := self._end_late(known, now)) is not None:
                updates += ends
                continue
            if known.submit_at <= now:
                messages.append(known.submit(now, self._recovery.resubmit_s))
            if known.withdraw_at <= now:
                withdrawals = self._withdrawals(known)
                messages += withdrawals
                known.withdraw_at = now + WITHDRAW_AGAIN_S if withdrawals else float("inf")
            self._schedule(known)
        return Outgoing(messages, updates)

    def _schedule(self, known: OpenRequest) -> None:
        due = min(known.submit_at, known.withdraw_at)
        if known.deadline_at is not None:
            slack_s = 0.0 if known.source is None else DEADLINE_SLACK_S
            due = min(due, known.deadline_at + slack_s)
        if known.unplaced_since is not None:
            due = min(due, known.unplaced_since + self._recovery.patience_s)
        if due < float("inf"):
            self._due.put(known.opened.request_id, (due,))
        else:
            self._due.remove(known.opened.request_id)

    def _end_late(self, known: OpenRequest, now: float) -> list[StreamUpdate] | None:
        """End a request whose deadline has come, or that nobody takes; None where it goes on."""
        if known.deadline_at is not None:
            slack_s = 0.0 if known.source is None else DEADLINE_SLACK_S
            if now >= known.deadline_at + slack_s:
                self._unsent.append(
                    WithdrawRequest(known.opened.request_id, known.attempt, None, known.source)
                )
                return self._end(known, FinishReason.DEADLINE, None)
        patience_s = self._recovery.patience_s
        if known.unplaced_since is not None and now >= known.unplaced_since + patience_s:
            reason = f"for {patience_s:g} s none could: {known.why_unplaced}"
            return self._end(known, FinishReason.ERROR, NoReplicaError(reason))
        return None

    def _withdrawals(self, known: OpenRequest) -> list[WithdrawRequest]:
        name = known.opened.request_id, known.attempt
        if known.is_cancelled:
            return [WithdrawRequest(*name, None, known.source)]
        return [
            WithdrawRequest(*name, sibling, known.source)
            for sibling in sorted(known.cancelled.intersection(known.streams))
        ]

    # --- polls ----------------------------------------------------------------------------

    def serving(self) -> AbstractSet[Source]:
        """Return the replicas to poll: those that serve an open request, as of when it is read."""
        return self._num_served.keys()

    def poll(self, replica_id: ReplicaId, incarnation: Incarnation, now: float) -> PollTokens:
        """Make the next poll of a replica, acknowledging all that came from it."""
        ack, unwanted = self._polls.poll((replica_id, incarnation), now)
        return PollTokens(self.consumer_id, self._polls.num_polls, ack, unwanted)

    def overdue_polls(self, now: float) -> list[Source]:
        """Return the replicas whose poll must have been lost, and is to be repeated."""
        return self._polls.overdue(now)

    def silent(self, now: float) -> list[Source]:
        """Return the replicas that have let so many polls pass that they count as lost."""
        return self._polls.silent(now)

    def deliver(
        self, delivery: Delivery, now: float, poll_id: int | None = None
    ) -> list[StreamUpdate]:
        """Accept a delivery: each token once, whatever was delivered twice.

        Args:
            delivery: What has come.
            now: In seconds.
            poll_id: The poll that it answers; None for the latest.
        """
        source = (delivery.replica_id, delivery.incarnation)
        if source in self._lost:
            return []
        self._polls.answer(source, delivery.sequence, now, poll_id)
        updates: list[StreamUpdate] = []
        given_up: dict[OpenRequest, None] = {}
        find = functools.partial(self._find, source)
        for news in take_in(delivery, self._open, find):
            if self._accept(news, delivery.replica_id, updates):
                given_up[news.known] = None
        # With what has come of their other samples as well.
        for known in given_up:
            updates += self._lose_attempt(known, None, now)
        if delivery.fenced is not None:
            updates += self.lose([ReplicaLost(*source, delivery.fenced, ())], now)
        return updates

    def _find(self, source: Source, name: StreamName, is_end: bool) -> OpenRequest | None:
        """Return the request of a stream that is accepted from a source; None for a stranger,
        which is told so, unless it is at its end.
        """
        known = self._open.get(name.request_id)
        if known is not None and known.attempt == name.attempt and self._is_from(known, source):
            return known
        if not is_end:
            self._polls.refuse(source, name.request_id, name.attempt)
        return None

    def _is_from(self, known: OpenRequest, source: Source) -> bool:
        """Return whether an attempt is accepted from a source; the first item pins it there."""
        if known.is_pinned:
            return known.source == source
        if known.source is None:
            # It overtook the answer to the submission.
            self._serve(known, source)
        elif known.source != source:
            return False
        known.pin()
        self._schedule(known)
        return True

    def _accept(self, news: News, replica_id: ReplicaId, updates: list[StreamUpdate]) -> bool:
        """Add what is to be handed out of one stream; return whether the replica gave it up,
        and with it this consumer, which is there after all.
        """
        name, known = news.name, news.known
        finish = news.finish
        given_up = finish is FinishReason.CANCELLED and name.sibling not in known.cancelled
        if given_up:
            finish = None
        if news.token_ids or finish is not None:
            updates.append(
                StreamUpdate(
                    name.request_id,
                    name.sibling,
                    replica_id,
                    tuple(news.token_ids),
                    tuple(news.logprobs),
                    news.stream.num_cached_tokens,
                    finish,
                    news.error if finish is not None else None,
                    news.prompt_logprobs,
                )
            )
        if news.token_ids:
            known.has_tokens = True
            known.num_new_tokens += len(news.token_ids)
        if finish is not None:
            del known.streams[name.sibling]
            if not known.streams:
                self._close(known)
        return given_up

    # --- loss -----------------------------------------------------------------------------

    def lose(self, notices: Iterable[ReplicaLost], now: float) -> list[StreamUpdate]:
        """Let the open requests of replicas that are gone for good go on elsewhere."""
        updates = []
        for notice in notices:
            source = (notice.replica_id, notice.incarnation)
            self._lost[source] = notice.reason
            updates += self.fail(*source, notice.reason, now)
        return updates

    def fail(
        self, replica_id: ReplicaId, incarnation: Incarnation, reason: str, now: float
    ) -> list[StreamUpdate]:
        """Let the open requests that a replica serves go on as other attempts; it may serve others
        later.
        """
        source = (replica_id, incarnation)
        self._polls.forget(source, for_good=source in self._lost)
        served = [known for known in self._open.values() if known.source == source]
        return [update for known in served for update in self._lose_attempt(known, reason, now)]

    def _lose_attempt(
        self, known: OpenRequest, reason: str | None, now: float
    ) -> list[StreamUpdate]:
        """Begin the next attempt, unless the request ends here.

        Args:
            known: The request.
            reason: How its replica died; None where it lives, and gave the attempt up.
            now: In seconds.
        """
        source = known.source
        assert source is not None, "it was served"
        self._leave(known)
        known.lost_at = source
        updates = self._end_cancelled(known)
        if not known.streams:
            return updates
        death = None if reason is None else f"{source[0]} (incarnation {source[1]}): {reason}"
        known.go_on(death, now)
        if known.num_trial_deaths >= self._recovery.poison_deaths:
            error = PoisonedRequestError(known.opened.request_id, known.deaths)
            return [*updates, *self._end(known, FinishReason.ERROR, error)]
        self._schedule(known)
        return updates

    # --- ends -----------------------------------------------------------------------------

    def _end_cancelled(self, known: OpenRequest) -> list[StreamUpdate]:
        """End the samples that are to be cancelled, of a request that nobody serves."""
        if known.is_cancelled:
            return self._end(known, FinishReason.CANCELLED, None)
        ended = sorted(known.cancelled.intersection(known.streams))
        streams = {sibling: known.streams.pop(sibling) for sibling in ended}
        return [
            end_of(known, sibling, stream, FinishReason.CANCELLED, None)
            for sibling, stream in streams.items()
        ]

    def _end(
        self, known: OpenRequest, finish: FinishReason, error: BaseException | None
    ) -> list[StreamUpdate]:
        self._close(known)
        streams, known.streams = known.streams, {}
        return [
            end_of(known, sibling, stream, finish, error) for sibling, stream in streams.items()
        ]

    def _close(self, known: OpenRequest) -> None:
        del self._open[known.opened.request_id]
        self._due.remove(known.opened.request_id)
        self._leave(known)

    def _serve(self, known: OpenRequest, source: Source) -> None:
        known.place(source)
        self._num_served[source] += 1
        # Those that have ended here meanwhile were submitted with it all the same.
        name = known.opened.request_id, known.attempt
        self._unsent += [
            WithdrawRequest(*name, sibling, source)
            for sibling in sorted(known.submitted_siblings.difference(known.streams))
        ]

    def _leave(self, known: OpenRequest) -> None:
        source, known.source = known.source, None
        if source is None:
            return
        self._num_served[source] -= 1
        if not self._num_served[source]:
            del self._num_served[source]
