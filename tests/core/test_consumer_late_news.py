"""A consumer that is told things late, twice, out of order, or by somebody else."""

import dataclasses
from typing import Any

import pytest
from replica_driver import make_request

from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.consumer import Consumer
from rayserve_paged.core.controller_messages import (
    Placed,
    Rejected,
    ReplicaLost,
    SubmitRequest,
    WithdrawRequest,
)
from rayserve_paged.core.delivered import DeliveredSample
from rayserve_paged.core.errors import InvalidInputError, NoReplicaError, PoisonedRequestError
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.stream_messages import Delivery, StreamItem, StreamName
from rayserve_paged.core.stream_update import StreamUpdate

Q = RequestId("q0")
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
LIFE = Incarnation(0)
RECOVERY = RecoveryConfig(resubmit_s=2.0, patience_s=60.0, poison_deaths=2)
BUSY = NoReplicaError("r0 is being started")


def make_consumer(
    now: float = 0.0,
    deadline_s: float | None = None,
    max_tokens: int | None = 9,
    **fields: Any,  # noqa: ANN401
) -> Consumer:
    consumer = Consumer(ConsumerId("c0"), RECOVERY)
    delivered = fields.pop("delivered", ())
    request = make_request([1, 2], max_tokens, **fields)
    consumer.open(dataclasses.replace(request, deadline_s=deadline_s, delivered=delivered), now)
    return consumer


def submissions(consumer: Consumer, now: float = 0.0) -> list[Request]:
    messages, updates = consumer.tick(now)
    assert updates == []
    return [message.request for message in messages if isinstance(message, SubmitRequest)]


def place(
    consumer: Consumer,
    name: ReplicaId = R0,
    attempt: int = 0,
    now: float = 0.0,
    max_tokens: int = 9,
    *,
    on_trial: bool = False,
) -> list[StreamUpdate]:
    placed = Placed(Q, Attempt(attempt), name, LIFE, max_tokens, on_trial)
    return consumer.placed(placed, now)


def item(
    sibling: int,
    index: int,
    *token_ids: int,
    attempt: int = 0,
    finish: FinishReason | None = None,
    error: str | None = None,
) -> StreamItem:
    name = StreamName(Q, Attempt(attempt), sibling)
    return StreamItem(name, index, token_ids, (), 0, finish, error)


def deliver(
    consumer: Consumer, *items: StreamItem, name: ReplicaId = R0, now: float = 0.0
) -> list[StreamUpdate]:
    return consumer.deliver(Delivery(name, LIFE, 1, items), now)


def lose(consumer: Consumer, name: ReplicaId = R0, now: float = 0.0) -> list[StreamUpdate]:
    return consumer.lose([ReplicaLost(name, LIFE, "a rank died", ())], now)


def withdrawal(
    attempt: int = 0, sibling: int | None = None, name: ReplicaId = R0
) -> WithdrawRequest:
    return WithdrawRequest(Q, Attempt(attempt), sibling, (name, LIFE))


# --- replicas that give a consumer up ---------------------------------------------------------


def test_what_came_of_all_samples_is_told_before_a_replica_that_gave_them_up_is_left() -> None:
    consumer = make_consumer(n=2)
    place(consumer)
    tokens = [item(0, 0, 5), item(1, 0, 6, 7)]
    lease = "the consumer's lease ran out"
    ends = [item(i, i + 1, finish=FinishReason.CANCELLED, error=lease) for i in range(2)]
    updates = deliver(consumer, *tokens, *ends)
    assert [(u.sibling, u.token_ids, u.finish, u.error) for u in updates] == [
        (0, (5,), None, None),
        (1, (6, 7), None, None),
    ]
    (second,) = submissions(consumer)
    assert second.attempt == 1
    assert second.delivered == (DeliveredSample(0, (5,)), DeliveredSample(1, (6, 7)))


def test_a_request_that_was_given_up_before_a_token_is_no_suspect_and_its_replica_not_doubted() -> (
    None
):
    consumer = make_consumer()
    submissions(consumer)
    place(consumer)
    assert deliver(consumer, item(0, 0, finish=FinishReason.CANCELLED)) == []
    (message,), updates = consumer.tick(0.0)
    assert updates == []
    assert isinstance(message, SubmitRequest)
    assert (message.request.attempt, message.request.num_deaths, message.lost_at) == (1, 0, None)


# --- placements -------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [0, 2])
def test_a_placement_of_another_attempt_is_withdrawn(attempt: int) -> None:
    consumer = make_consumer()
    place(consumer)
    consumer.fail(R0, LIFE, "its poll failed", 0.0)
    assert submissions(consumer)[0].attempt == 1
    assert place(consumer, R1, attempt) == []
    assert consumer.next_tick == float("-inf")
    assert consumer.tick(0.0).messages == [withdrawal(attempt, name=R1)]
    assert (consumer.source(Q), consumer.serving()) == (None, set())


def test_a_placement_after_the_first_token_is_still_read() -> None:
    consumer = make_consumer(max_tokens=None)
    deliver(consumer, item(0, 0, 5))
    assert place(consumer, max_tokens=56) == []
    lose(consumer)
    (second,) = submissions(consumer)
    assert second.params.max_tokens == 56


def test_an_attempt_that_is_lost_before_its_placement_was_told_has_its_own_length() -> None:
    consumer = make_consumer()
    deliver(consumer, item(0, 0, 5))
    lose(consumer)
    (second,) = submissions(consumer)
    assert second.params.max_tokens == 9


def test_a_cancel_follows_its_request_to_where_it_is_placed_later() -> None:
    consumer = make_consumer()
    submissions(consumer)
    place(consumer)
    consumer.cancel(Q, None, 0.0)
    assert consumer.tick(0.0).messages == [withdrawal()]
    place(consumer, R1, now=0.25)
    assert consumer.next_tick == 0.25
    assert consumer.tick(0.25).messages == [withdrawal(name=R1)]


def test_a_submission_that_is_due_repeats_no_cancel() -> None:
    consumer = make_consumer()
    submissions(consumer)
    place(consumer)
    consumer.cancel(Q, None, 1.5)
    assert consumer.tick(1.5).messages == [withdrawal()]
    (again,) = consumer.tick(2.0).messages
    assert isinstance(again, SubmitRequest)
    assert consumer.tick(2.5).messages == [withdrawal()]


def test_samples_that_had_ended_before_the_placement_are_withdrawn_there_once() -> None:
    consumer = make_consumer(n=2)
    submissions(consumer)
    consumer.cancel(Q, 1, 0.0)
    consumer.tick(0.0)
    place(consumer, now=0.5)
    assert consumer.tick(0.5).messages == [withdrawal(sibling=1)]
    place(consumer, now=0.75)
    assert consumer.tick(0.75).messages == []
    assert consumer.next_tick == 2.0, "when it is submitted again"


def test_samples_that_had_ended_before_news_that_overtake_the_placement_are_withdrawn_there() -> (
    None
):
    consumer = make_consumer(n=2)
    submissions(consumer)
    consumer.cancel(Q, 1, 0.0)
    consumer.tick(0.0)
    deliver(consumer, item(0, 0, 5), now=0.5)
    assert consumer.tick(0.5).messages == [withdrawal(sibling=1)]
    place(consumer, now=0.75)
    assert consumer.tick(0.75).messages == []


def test_samples_that_ended_in_an_attempt_before_are_not_withdrawn() -> None:
    consumer = make_consumer(n=2)
    submissions(consumer)
    place(consumer)
    deliver(consumer, item(0, 0, 5, finish=FinishReason.STOP), item(1, 0, 6))
    lose(consumer)
    submissions(consumer)
    place(consumer, R1, 1)
    assert consumer.tick(0.0).messages == []


def test_a_replica_that_is_lost_is_not_listened_to_any_more() -> None:
    consumer = make_consumer()
    lose(consumer)
    assert deliver(consumer, item(0, 0, 5)) == []
    assert (consumer.source(Q), consumer.serving()) == (None, set())
    assert [u.token_ids for u in deliver(consumer, item(0, 0, 5), name=R1)] == [(5,)]


def test_a_stranger_at_the_end_of_its_stream_is_not_told_to_stop() -> None:
    consumer = make_consumer()
    place(consumer)
    assert deliver(consumer, item(0, 0, 5, finish=FinishReason.STOP), name=R1) == []
    assert consumer.poll(R1, LIFE, 0.0).unwanted == ()
    assert consumer.open_requests == (Q,)


# --- refusals ---------------------------------------------------------------------------------


def test_a_refusal_that_comes_late_is_ignored() -> None:
    consumer = make_consumer()
    deliver(consumer, item(0, 0, 5))
    assert consumer.rejected(Rejected(Q, Attempt(0), BUSY), 0.0) == []
    lose(consumer)
    assert submissions(consumer)[0].attempt == 1
    assert consumer.rejected(Rejected(Q, Attempt(0), BUSY), 0.0) == []
    other = Rejected(RequestId("other"), Attempt(0), BUSY)
    assert consumer.rejected(other, 0.0) == []
    assert (consumer.open_requests, consumer.attempt(Q)) == ((Q,), 1)


def test_the_pause_between_submissions_begins_anew_after_one_that_was_put_off() -> None:
    consumer = make_consumer()
    times = []
    for twentieth in range(200):
        now = twentieth / 20
        if now == 2.5:
            consumer.rejected(Rejected(Q, Attempt(0), BUSY, 0.25), now)
        times += [now] * len(submissions(consumer, now))
    assert times == [0.0, 2.0, 2.75, 4.75, 8.75]


def test_why_an_attempt_was_put_off_says_nothing_of_the_next_one() -> None:
    consumer = make_consumer()
    submissions(consumer)
    consumer.rejected(Rejected(Q, Attempt(0), BUSY, 0.25), 0.0)
    place(consumer)
    lose(consumer)
    (update,) = consumer.tick(60.0).updates
    assert str(update.error).endswith("for 60 s none could: its submission was not answered")


def test_a_request_that_cannot_be_submitted_ends_where_it_is() -> None:
    consumer = make_consumer(n=2)
    error = InvalidInputError("seed", None, "a seed")
    updates = consumer.refuse(Q, error)
    assert [(u.sibling, u.finish, u.cause) for u in updates] == [
        (0, FinishReason.ERROR, error),
        (1, FinishReason.ERROR, error),
    ]
    assert (consumer.refuse(Q, error), consumer.open_requests) == ([], ())


def test_a_request_that_was_given_to_no_replica_can_be_ended() -> None:
    consumer = make_consumer()
    (update,) = consumer.end_unplaced(Q, FinishReason.CANCELLED)
    assert (update.finish, update.replica_id, update.error) == (FinishReason.CANCELLED, None, None)
    assert (consumer.end_unplaced(Q, FinishReason.CANCELLED), consumer.next_tick) == ([], None)


def test_what_is_said_of_a_request_that_is_not_open_changes_nothing() -> None:
    consumer = make_consumer(n=2)
    submissions(consumer)
    assert consumer.cancel(Q, 2, 0.0) == []
    place(consumer)
    deliver(consumer, item(1, 0, 5, finish=FinishReason.STOP))
    assert consumer.cancel(Q, 1, 0.0) == []
    assert consumer.tick(0.0).messages == []
    consumer.abandon(Q)
    consumer.hold(Q)
    assert (consumer.cancel(Q, None, 0.0), consumer.source(Q)) == ([], None)
    assert (consumer.tick(99.0), consumer.next_tick) == (([], []), None)


# --- time -------------------------------------------------------------------------------------


def test_a_deadline_counts_from_when_the_request_was_opened() -> None:
    consumer = make_consumer(now=0.1, deadline_s=0.2)
    assert consumer.next_tick == 0.1
    assert submissions(consumer, 0.1)[0].deadline_s == 0.2, "0.1 + 0.2 - 0.1 is more"
    assert consumer.next_tick == 0.1 + 0.2
    place(consumer, now=0.1)
    assert consumer.next_tick == 0.1 + 0.2 + 1.0


def test_a_request_that_a_replica_serves_is_not_ended_here_at_its_very_deadline() -> None:
    consumer = make_consumer(deadline_s=5.5)
    submissions(consumer)
    submissions(consumer, 2.0)
    place(consumer, now=2.0)
    assert len(submissions(consumer, 6.0)) == 1, "its assignment may have been lost"
    (update,) = consumer.tick(6.5).updates
    assert update.finish is FinishReason.DEADLINE


def test_a_replica_that_is_lost_is_not_polled_again() -> None:
    consumer = make_consumer()
    place(consumer)
    consumer.poll(R0, LIFE, 0.0)
    lose(consumer)
    assert (consumer.overdue_polls(99.0), consumer.silent(99.0)) == ([], [])


# --- attempts ---------------------------------------------------------------------------------


def test_a_request_may_be_opened_with_what_was_delivered_of_it() -> None:
    consumer = make_consumer(n=2, delivered=(DeliveredSample(1, (5, 6)),))
    (first,) = submissions(consumer)
    assert first.delivered == (DeliveredSample(1, (5, 6)),)
    place(consumer)
    assert consumer.tick(0.0).messages == []
    assert deliver(consumer, item(0, 0, 9)) == []
    (update,) = deliver(consumer, item(1, 1, 6, 7))
    assert (update.sibling, update.token_ids) == (1, (7,))


def test_an_attempt_of_which_nothing_came_is_followed_by_a_first_one() -> None:
    consumer = make_consumer(n=2)
    place(consumer)
    lose(consumer)
    assert submissions(consumer)[0].delivered == ()
    place(consumer, R1, 1)
    deliver(consumer, item(0, 0, attempt=1, finish=FinishReason.ERROR), name=R1)
    lose(consumer, R1)
    assert submissions(consumer)[0].delivered == (DeliveredSample(1, ()),)


def test_an_end_without_a_token_does_not_clear_a_request() -> None:
    consumer = make_consumer(n=2, prompt_logprobs=1)
    place(consumer)
    deliver(consumer, item(0, 0, finish=FinishReason.ERROR))
    lose(consumer)
    (second,) = submissions(consumer)
    assert (second.num_deaths, second.params.prompt_logprobs) == (1, 1)


def test_a_death_counts_as_one_on_trial_only_where_that_was_told_of_this_attempt() -> None:
    consumer = make_consumer(n=4)
    for attempt, name in enumerate("abc"):
        source = ReplicaId(name)
        if attempt == 1:
            place(consumer, source, attempt, on_trial=True)
        # An end overtakes the answer to the submission.
        end = item(attempt, 0, attempt=attempt, finish=FinishReason.ERROR)
        assert len(deliver(consumer, end, name=source)) == 1
        assert lose(consumer, source) == []
        assert submissions(consumer)[0].num_deaths == attempt + 1


def test_the_samples_of_a_poisoned_request_that_were_cancelled_end_as_cancelled() -> None:
    consumer = make_consumer(n=2)
    place(consumer, on_trial=True)
    assert lose(consumer) == []
    assert submissions(consumer)[0].attempt == 1
    place(consumer, R1, 1, on_trial=True)
    consumer.cancel(Q, 0, 0.0)
    updates = lose(consumer, R1)
    assert [(u.sibling, u.finish) for u in updates] == [
        (0, FinishReason.CANCELLED),
        (1, FinishReason.ERROR),
    ]
    assert isinstance(updates[1].cause, PoisonedRequestError)
    assert consumer.next_tick is None


def test_a_request_that_was_cancelled_is_not_gone_on_with() -> None:
    consumer = make_consumer()
    submissions(consumer)
    place(consumer)
    consumer.cancel(Q, None, 0.0)
    (update,) = lose(consumer)
    assert update.finish is FinishReason.CANCELLED
    assert (consumer.next_tick, consumer.tick(99.0)) == (None, ([], []))


def test_a_request_with_a_sample_that_was_cancelled_has_nothing_to_do_once_that_has_ended() -> None:
    consumer = make_consumer(n=2)
    submissions(consumer)
    place(consumer)
    deliver(consumer, item(0, 0, 5), item(1, 0, 6))
    consumer.cancel(Q, 1, 0.0)
    assert consumer.tick(0.0).messages == [withdrawal(sibling=1)]
    deliver(consumer, item(1, 1, finish=FinishReason.CANCELLED))
    assert consumer.tick(1.0) == ([], [])
    assert consumer.next_tick is None
