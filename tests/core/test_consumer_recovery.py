"""A consumer whose replicas die, whose messages get lost, and whose requests may be to blame."""

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
from rayserve_paged.core.errors import (
    DuplicateRequestError,
    NoReplicaError,
    PoisonedRequestError,
)
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.poll_log import PollLog
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import Delivery, StreamItem, StreamName
from rayserve_paged.core.stream_update import StreamUpdate

Q = RequestId("q0")
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
LIFE = Incarnation(0)
RECOVERY = RecoveryConfig(resubmit_s=2.0, patience_s=60.0, poison_deaths=2)


def make_consumer(**fields: Any) -> Consumer:  # noqa: ANN401
    consumer = Consumer(ConsumerId("c0"), RECOVERY)
    deadline_s = fields.pop("deadline_s", None)
    request = make_request([1, 2], 9, **fields)
    consumer.open(dataclasses.replace(request, deadline_s=deadline_s), 0.0)
    return consumer


def submissions(consumer: Consumer, now: float = 0.0) -> list[Request]:
    messages, updates = consumer.tick(now)
    assert updates == []
    return [message.request for message in messages if isinstance(message, SubmitRequest)]


def place(
    consumer: Consumer,
    replica_id: ReplicaId = R0,
    attempt: int = 0,
    now: float = 0.0,
    *,
    on_trial: bool = False,
) -> list[StreamUpdate]:
    return consumer.placed(Placed(Q, Attempt(attempt), replica_id, LIFE, 9, on_trial), now)


def items(
    *tokens: tuple[int, ...],
    index: int = 0,
    attempt: int = 0,
    replica_id: ReplicaId = R0,
    finish: FinishReason | None = None,
    fenced: str | None = None,
) -> Delivery:
    """New tokens of each sample, all from one index."""
    told = tuple(
        StreamItem(StreamName(Q, Attempt(attempt), sibling), index, ids, (), 3, finish, None)
        for sibling, ids in enumerate(tokens)
    )
    return Delivery(replica_id, LIFE, 1, told, fenced)


def lose(consumer: Consumer, replica_id: ReplicaId = R0, now: float = 0.0) -> list[StreamUpdate]:
    return consumer.lose([ReplicaLost(replica_id, LIFE, "a rank died", ())], now)


# --- the next attempt -------------------------------------------------------------------------


def test_a_request_whose_replica_is_lost_goes_on_with_what_it_has() -> None:
    consumer = make_consumer(n=3)
    (first,) = submissions(consumer)
    assert (first.attempt, first.delivered) == (0, ())
    place(consumer)
    consumer.deliver(items((5, 6), (7, 8), (9,)), 0.0)
    consumer.deliver(items((), (4,), index=2, finish=FinishReason.STOP), 0.0)
    assert lose(consumer) == []
    (second,) = submissions(consumer)
    assert second == dataclasses.replace(
        first, attempt=Attempt(1), delivered=(DeliveredSample(2, (9,)),)
    )
    place(consumer, R1, 1)
    assert consumer.serving() == {(R1, LIFE)}


def test_the_next_attempt_is_told_where_the_last_one_was_lost() -> None:
    consumer = make_consumer()
    submissions(consumer)
    place(consumer)
    lose(consumer)
    (message,), _updates = consumer.tick(0.0)
    assert isinstance(message, SubmitRequest)
    assert message.lost_at == (R0, LIFE)


def test_an_attempt_has_the_length_that_the_first_one_was_granted() -> None:
    consumer = Consumer(ConsumerId("c0"), RECOVERY)
    consumer.open(make_request([1, 2], None), 0.0)
    submissions(consumer)
    consumer.placed(Placed(Q, Attempt(0), R0, LIFE, 56), 0.0)
    lose(consumer)
    (second,) = submissions(consumer)
    assert second.params.max_tokens == 56


def test_scores_of_the_prompt_are_asked_for_until_they_have_come() -> None:
    consumer = make_consumer(prompt_logprobs=1)
    scores = (TokenLogprobs(-0.5, ()),)
    submissions(consumer)
    place(consumer)
    lose(consumer)
    (second,) = submissions(consumer)
    assert second.params.prompt_logprobs == 1
    place(consumer, R1, 1)
    told = StreamItem(StreamName(Q, Attempt(1), 0), 0, (5,), (), 0, None, None, scores)
    (update,) = consumer.deliver(Delivery(R1, LIFE, 1, (told,)), 0.0)
    assert update.prompt_logprobs == scores
    lose(consumer, R1)
    (third,) = submissions(consumer)
    assert (third.params.prompt_logprobs, third.attempt) == (None, 2)


def test_the_cached_tokens_told_are_those_of_the_attempt_that_began_the_output() -> None:
    consumer = make_consumer()
    place(consumer)
    (update,) = consumer.deliver(items((5,)), 0.0)
    assert update.num_cached_tokens == 3
    lose(consumer)
    place(consumer, R1, 1)
    name = StreamName(Q, Attempt(1), 0)
    told = StreamItem(name, 1, (6,), (), 99, FinishReason.LENGTH, None)
    (update,) = consumer.deliver(Delivery(R1, LIFE, 1, (told,)), 0.0)
    assert (update.token_ids, update.num_cached_tokens) == ((6,), 3)


def test_a_fenced_replica_delivers_what_it_has_and_its_requests_go_on() -> None:
    consumer = make_consumer()
    place(consumer)
    (update,) = consumer.deliver(items((5, 6), fenced="step 3 failed"), 0.0)
    assert (update.token_ids, update.finish) == ((5, 6), None)
    (second,) = submissions(consumer)
    assert second.delivered == (DeliveredSample(0, (5, 6)),)


def test_a_replica_that_gave_up_on_its_consumer_is_taken_as_one_that_lost_it() -> None:
    consumer = make_consumer()
    place(consumer)
    consumer.deliver(items((5,)), 0.0)
    assert consumer.deliver(items((), index=1, finish=FinishReason.CANCELLED), 0.0) == []
    (second,) = submissions(consumer)
    # It did not die, so the request is no suspect.
    assert (second.attempt, second.num_deaths) == (1, 0)


def test_a_poll_that_fails_moves_the_requests_and_leaves_the_replica_for_others() -> None:
    consumer = make_consumer()
    place(consumer)
    assert consumer.fail(R0, LIFE, "its poll failed", 0.0) == []
    (second,) = submissions(consumer)
    assert second.attempt == 1
    assert place(consumer, R0, 1) == []
    assert consumer.serving() == {(R0, LIFE)}


def test_a_placement_on_a_replica_that_is_known_to_be_lost_is_an_attempt_lost() -> None:
    consumer = make_consumer()
    lose(consumer)
    assert place(consumer) == []
    (second,) = [request for request in submissions(consumer) if request.attempt == 1]
    assert second.num_deaths == 1
    assert consumer.serving() == set()


# --- who is accepted --------------------------------------------------------------------------


def test_only_the_source_of_the_accepted_attempt_is_read_and_others_are_told_to_stop() -> None:
    consumer = make_consumer()
    place(consumer)
    assert consumer.deliver(items((5,), replica_id=R1), 0.0) == []
    assert consumer.poll(R1, LIFE, 0.0).unwanted == ((Q, 0),)
    # Once is enough, unless it goes on.
    assert consumer.poll(R1, LIFE, 0.0).unwanted == ()
    (update,) = consumer.deliver(items((6,)), 0.0)
    assert update.token_ids == (6,)
    assert consumer.poll(R0, LIFE, 0.0).unwanted == ()


def test_a_later_placement_of_an_attempt_counts_until_something_has_come() -> None:
    consumer = make_consumer()
    place(consumer)
    place(consumer, R1)
    assert consumer.source(Q) == (R1, LIFE)
    consumer.deliver(items((5,), replica_id=R1), 0.0)
    place(consumer, R0)
    assert consumer.source(Q) == (R1, LIFE)


def test_tokens_may_overtake_the_answer_to_the_submission() -> None:
    consumer = make_consumer()
    (update,) = consumer.deliver(items((5,)), 0.0)
    assert update.token_ids == (5,)
    assert consumer.source(Q) == (R0, LIFE)
    assert place(consumer, R1) == []
    assert consumer.source(Q) == (R0, LIFE)


def test_a_placement_of_a_request_that_is_not_open_is_withdrawn() -> None:
    consumer = make_consumer()
    submissions(consumer)
    assert consumer.abandon(Q) == WithdrawRequest(Q, Attempt(0))
    place(consumer)
    assert consumer.tick(0.0).messages == [WithdrawRequest(Q, Attempt(0), None, (R0, LIFE))]
    assert consumer.next_tick is None


# --- repetition -------------------------------------------------------------------------------


def test_a_submission_is_repeated_after_growing_pauses_until_something_comes_of_it() -> None:
    consumer = make_consumer()
    times = []
    for quarter in range(240):
        if quarter == 30:
            place(consumer)  # The assignment may have been lost all the same.
        for request in submissions(consumer, quarter / 4):
            assert request.attempt == 0
            times.append(quarter / 4)
    assert times == [0.0, 2.0, 6.0, 14.0, 30.0, 46.0]
    consumer.deliver(items((5,)), 60.0)
    assert consumer.next_tick is None


def test_a_submission_says_that_it_is_repeated() -> None:
    consumer = make_consumer()
    messages = [consumer.tick(now).messages[0] for now in (0.0, 2.0)]
    assert [m.is_repeated for m in messages if isinstance(m, SubmitRequest)] == [False, True]


def test_one_that_cannot_be_taken_now_comes_again_when_it_is_told_to() -> None:
    consumer = make_consumer()
    submissions(consumer)
    refused = Rejected(Q, Attempt(0), NoReplicaError("r0 is being started"), 0.25)
    assert consumer.rejected(refused, 1.0) == []
    assert submissions(consumer, 1.2) == []
    (again,) = submissions(consumer, 1.25)
    assert again.attempt == 0


def test_one_that_is_refused_for_good_ends_with_the_reason() -> None:
    consumer = make_consumer(n=2)
    submissions(consumer)
    error = DuplicateRequestError("q0")
    updates = consumer.rejected(Rejected(Q, Attempt(0), error), 1.0)
    assert [(u.sibling, u.finish, u.cause) for u in updates] == [
        (0, FinishReason.ERROR, error),
        (1, FinishReason.ERROR, error),
    ]
    assert (consumer.open_requests, consumer.next_tick) == ((), None)


def test_patience_ends_with_a_reason_and_begins_anew_with_each_attempt() -> None:
    consumer = make_consumer()
    submissions(consumer)
    place(consumer, now=50.0)
    consumer.deliver(items((5,)), 50.0)
    lose(consumer, now=100.0)
    consumer.tick(100.0)
    refused = Rejected(Q, Attempt(1), NoReplicaError("r0 is lost: a rank died"), 0.25)
    consumer.rejected(refused, 101.0)
    assert consumer.tick(159.9).updates == []
    (update,) = consumer.tick(160.0).updates
    assert update.finish is FinishReason.ERROR
    assert isinstance(update.cause, NoReplicaError)
    assert "for 60 s none could: no replica can take the request: r0 is lost" in str(update.error)


def test_a_held_request_is_left_to_whoever_submits_it() -> None:
    consumer = make_consumer()
    submissions(consumer)
    consumer.hold(Q)
    assert consumer.next_tick is None
    place(consumer, now=500.0)
    consumer.deliver(items((5,)), 500.0)
    lose(consumer, now=500.0)
    assert [request.attempt for request in submissions(consumer, 500.0)] == [1]


def test_polls_that_must_have_been_lost_are_repeated_and_silence_is_a_loss() -> None:
    consumer = make_consumer()
    place(consumer)
    consumer.poll(R0, LIFE, 10.0)
    assert consumer.overdue_polls(12.9) == []
    assert consumer.overdue_polls(13.0) == [(R0, LIFE)]
    consumer.poll(R0, LIFE, 13.0)
    assert (consumer.overdue_polls(13.0), consumer.silent(18.9)) == ([], [])
    assert consumer.silent(19.0) == [(R0, LIFE)]
    consumer.deliver(Delivery(R0, LIFE, 0, ()), 19.0)
    assert (consumer.overdue_polls(99.0), consumer.silent(99.0)) == ([], [])


# --- deadlines and cancels --------------------------------------------------------------------


def test_the_next_attempt_has_the_time_that_is_left() -> None:
    consumer = make_consumer(deadline_s=10.0)
    (first,) = submissions(consumer)
    assert first.deadline_s == 10.0
    (again,) = submissions(consumer, 4.0)
    assert again.deadline_s == 6.0
    place(consumer, now=4.0)
    lose(consumer, now=7.5)
    (second,) = submissions(consumer, 7.5)
    assert (second.attempt, second.deadline_s) == (1, 2.5)
    _messages, (update,) = consumer.tick(10.0)
    assert update.finish is FinishReason.DEADLINE


def test_a_deadline_that_a_silent_replica_does_not_keep_is_kept_here() -> None:
    consumer = make_consumer(deadline_s=10.0)
    submissions(consumer)
    place(consumer)
    consumer.deliver(items((5,)), 0.0)
    assert consumer.tick(10.9).updates == []
    _messages, (update,) = consumer.tick(11.0)
    assert update.finish is FinishReason.DEADLINE
    assert consumer.tick(11.0).messages == [WithdrawRequest(Q, Attempt(0), None, (R0, LIFE))]


def test_a_cancel_is_repeated_until_the_stream_has_ended() -> None:
    consumer = make_consumer()
    submissions(consumer)
    place(consumer)
    consumer.deliver(items((5,)), 0.0)
    assert consumer.cancel(Q, None, 3.0) == []
    withdrawal = WithdrawRequest(Q, Attempt(0), None, (R0, LIFE))
    assert [consumer.tick(now).messages for now in (3.0, 3.5, 4.0)] == [
        [withdrawal],
        [],
        [withdrawal],
    ]
    end = items((6,), index=1, finish=FinishReason.CANCELLED)
    (update,) = consumer.deliver(end, 4.5)
    assert (update.token_ids, update.finish) == ((6,), FinishReason.CANCELLED)
    assert consumer.next_tick is None


def test_a_cancel_of_an_attempt_that_is_lost_is_not_forgotten() -> None:
    consumer = make_consumer()
    submissions(consumer)
    place(consumer)
    consumer.cancel(Q, None, 0.0)
    (update,) = lose(consumer)
    assert (update.finish, update.replica_id) == (FinishReason.CANCELLED, R0)
    assert consumer.open_requests == ()


def test_a_cancel_without_a_replica_holds_at_once() -> None:
    consumer = make_consumer(n=2)
    submissions(consumer)
    (update,) = consumer.cancel(Q, 1, 1.0)
    assert (update.sibling, update.finish) == (1, FinishReason.CANCELLED)
    assert consumer.tick(1.0).messages == [WithdrawRequest(Q, Attempt(0), 1)]
    # It was submitted with both, and is the same attempt.
    (again,) = submissions(consumer, 2.0)
    assert again.delivered == ()
    # Placed with both of them after all.
    place(consumer, now=2.5)
    assert consumer.tick(2.5).messages == [WithdrawRequest(Q, Attempt(0), 1, (R0, LIFE))]
    (update,) = consumer.cancel(Q, 0, 2.5) or lose(consumer, now=2.5)
    assert (update.sibling, update.finish) == (0, FinishReason.CANCELLED)
    assert consumer.open_requests == ()


def test_one_sample_that_was_cancelled_is_not_part_of_the_next_attempt() -> None:
    consumer = make_consumer(n=2)
    submissions(consumer)
    place(consumer)
    consumer.deliver(items((5,), (6,)), 0.0)
    consumer.cancel(Q, 0, 0.0)
    (update,) = lose(consumer)
    assert (update.sibling, update.finish) == (0, FinishReason.CANCELLED)
    (second,) = submissions(consumer)
    assert second.delivered == (DeliveredSample(1, (6,)),)


# --- poison -----------------------------------------------------------------------------------


def test_a_request_that_ends_its_replicas_while_on_trial_is_failed_with_their_names() -> None:
    consumer = make_consumer()
    submissions(consumer)
    updates: list[StreamUpdate] = []
    for attempt, name in enumerate("abc"):
        place(consumer, ReplicaId(name), attempt, on_trial=attempt > 0)
        updates = lose(consumer, ReplicaId(name))
        if attempt < 2:
            assert updates == []
            (request,) = submissions(consumer)
            assert (request.attempt, request.num_deaths) == (attempt + 1, attempt + 1)
    (update,) = updates
    assert update.finish is FinishReason.ERROR
    assert isinstance(update.cause, PoisonedRequestError)
    assert update.cause.deaths == tuple(f"{name} (incarnation 0): a rank died" for name in "abc")
    assert consumer.open_requests == ()


@pytest.mark.parametrize("progress_at", [0, 1, 2])
def test_sixteen_new_tokens_clear_a_request(progress_at: int) -> None:
    consumer = make_consumer()
    submissions(consumer)
    num_deaths = num_tokens = 0
    for attempt in range(4):
        place(consumer, ReplicaId(f"r{attempt}"), attempt, on_trial=num_deaths > 0)
        num_deaths += 1
        if attempt == progress_at:
            name = StreamName(Q, Attempt(attempt), 0)
            told = StreamItem(name, num_tokens, (5,) * 16, (), 0, None, None)
            consumer.deliver(Delivery(ReplicaId(f"r{attempt}"), LIFE, 1, (told,)), 0.0)
            num_tokens, num_deaths = 16, 0
        updates = lose(consumer, ReplicaId(f"r{attempt}"))
        if num_deaths == 3:
            assert attempt - progress_at == 3
            assert isinstance(updates[0].cause, PoisonedRequestError)
            return
        assert updates == []
        (request,) = submissions(consumer)
        assert request.num_deaths == num_deaths


def test_a_suspect_that_dies_again_soon_after_a_new_token_stays_one() -> None:
    """What had been sampled and not handed out comes again before what ended the replica."""
    consumer = make_consumer()
    submissions(consumer)
    for attempt, (num_tokens, num_deaths) in enumerate([(0, 1), (1, 2), (14, 3), (15, 4)]):
        source = ReplicaId(f"r{attempt}")
        place(consumer, source, attempt, on_trial=num_tokens == 1)
        if num_tokens:
            name, first = StreamName(Q, Attempt(attempt), 0), {1: 0, 14: 1, 15: 15}[num_tokens]
            told = StreamItem(name, first, (5,) * num_tokens, (), 0, None, None)
            consumer.deliver(Delivery(source, LIFE, 1, (told,)), 0.0)
        assert lose(consumer, source) == []
        (request,) = submissions(consumer)
        assert request.num_deaths == num_deaths


def test_two_deaths_in_a_row_make_a_suspect_of_a_request_that_had_a_few_tokens() -> None:
    """It may end each replica a little further on."""
    consumer = make_consumer()
    submissions(consumer)
    first = 0
    for attempt, (num_tokens, num_deaths) in enumerate([(3, 0), (2, 1), (16, 0), (1, 0), (1, 1)]):
        source = ReplicaId(f"r{attempt}")
        place(consumer, source, attempt, on_trial=num_tokens == 16)
        name = StreamName(Q, Attempt(attempt), 0)
        told = StreamItem(name, first, (5,) * num_tokens, (), 0, None, None)
        consumer.deliver(Delivery(source, LIFE, 1, (told,)), 0.0)
        first += num_tokens
        assert lose(consumer, source) == []
        (request,) = submissions(consumer)
        assert request.num_deaths == num_deaths


def test_a_request_that_was_never_on_trial_is_never_failed_for_deaths() -> None:
    consumer = make_consumer()
    submissions(consumer)
    for attempt in range(20):
        place(consumer, ReplicaId(f"r{attempt}"), attempt)
        assert lose(consumer, ReplicaId(f"r{attempt}")) == []
        (request,) = submissions(consumer)
        assert request.num_deaths == attempt + 1


def test_a_replica_that_nobody_asked_for_long_is_not_silent_once_it_is_polled_again() -> None:
    polls, source = PollLog(poll_timeout_s=2.0), (R0, LIFE)
    polls.poll(source, 0.0)
    polls.answer(source, 1, 0.5, None)
    polls.poll(source, 100.0)
    assert polls.silent(101.0) == []
    polls.poll(source, 103.0)  # Repeated, since no answer came.
    assert polls.silent(108.9) == []
    assert polls.silent(109.0) == [source]
