import numpy as np

from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.outbox import LEASES_TO_REMEMBER, Outbox
from rayserve_paged.core.replica_messages import AnswerPoll, PollTokens
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import StreamItem, StreamName, TokenRun

ANN, BOB = ConsumerId("ann"), ConsumerId("bob")
Q = StreamName(RequestId("q"), Attempt(0), 0)


def make_outbox() -> Outbox:
    outbox = Outbox(ReplicaId("r0"), Incarnation(3), lease_s=10.0, poll_timeout_s=2.0)
    outbox.meet(ANN, 0.0)
    return outbox


def put(
    outbox: Outbox,
    index: int,
    *token_ids: int,
    attempt: int = 0,
    finish: FinishReason | None = None,
) -> None:
    name = StreamName(Q.request_id, Attempt(attempt), 0)
    outbox.put(ANN, StreamItem(name, index, token_ids, (), 0, finish, None))


def items(answers: list[AnswerPoll]) -> tuple[StreamItem | TokenRun, ...]:
    (answer,) = answers
    return answer.delivery.items


def single_items(answers: list[AnswerPoll]) -> list[StreamItem]:
    return [item for item in items(answers) if isinstance(item, StreamItem)]


def tokens(answers: list[AnswerPoll]) -> list[tuple[int, tuple[int, ...]]]:
    return [(item.index, item.token_ids) for item in single_items(answers)]


def test_tokens_gather_until_a_poll_takes_them() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    put(outbox, 1, 8)
    (answer,) = outbox.poll(PollTokens(ANN, 1, 0), 1.0)
    assert (answer.consumer_id, answer.poll_id) == (ANN, 1)
    delivery = answer.delivery
    assert (delivery.replica_id, delivery.incarnation, delivery.sequence) == ("r0", 3, 1)
    assert delivery.items == (
        StreamItem(Q, 0, (7,), (), 0, None, None),
        StreamItem(Q, 1, (8,), (), 0, None, None),
    )


def test_runs_of_many_streams_keep_their_place_among_single_items() -> None:
    outbox = make_outbox()
    other = StreamName(RequestId("other"), Attempt(2), 1)
    run = TokenRun((Q, other), np.array([1, 5], np.int32), np.array([[8, 9]], np.int32))
    put(outbox, 0, 7)
    outbox.put(ANN, run)
    put(outbox, 2, 6, finish=FinishReason.STOP)
    first, second, third = items(outbox.poll(PollTokens(ANN, 1, 0), 0.0))
    assert (first, second) == (StreamItem(Q, 0, (7,), (), 0, None, None), run)
    assert third == StreamItem(Q, 2, (6,), (), 0, FinishReason.STOP, None)
    assert items(outbox.poll(PollTokens(ANN, 2, 0), 0.0)) == (first, run, third)
    assert outbox.poll(PollTokens(ANN, 3, 2), 0.0) == []


def test_a_poll_waits_for_news_and_is_answered_once() -> None:
    outbox = make_outbox()
    assert outbox.poll(PollTokens(ANN, 1, 0), 0.0) == []
    assert outbox.flush(0.0) == []
    put(outbox, 0, 7)
    assert tokens(outbox.flush(0.5)) == [(0, (7,))]
    put(outbox, 1, 8)
    assert outbox.flush(0.5) == []


def test_what_was_not_acknowledged_is_given_again_in_order() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    outbox.poll(PollTokens(ANN, 1, 0), 0.0)
    put(outbox, 1, 8)
    assert tokens(outbox.poll(PollTokens(ANN, 2, 0), 0.0)) == [(0, (7,)), (1, (8,))]
    put(outbox, 2, 9, finish=FinishReason.LENGTH)
    again = outbox.poll(PollTokens(ANN, 3, 0), 0.0)
    assert tokens(again) == [(0, (7,)), (1, (8,)), (2, (9,))]
    assert again[0].delivery.sequence == 3


def test_what_was_acknowledged_is_not_given_again() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    outbox.poll(PollTokens(ANN, 1, 0), 0.0)
    assert outbox.poll(PollTokens(ANN, 2, 1), 0.0) == []
    put(outbox, 1, 8)
    assert tokens(outbox.flush(0.0)) == [(1, (8,))]


def test_an_old_acknowledgement_takes_nothing_back() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    outbox.poll(PollTokens(ANN, 1, 0), 0.0)
    outbox.poll(PollTokens(ANN, 2, 1), 0.0)
    assert outbox.poll(PollTokens(ANN, 3, 0), 0.0)[0].delivery.items == ()


def test_a_new_poll_answers_the_one_before_it_empty() -> None:
    outbox = make_outbox()
    outbox.poll(PollTokens(ANN, 1, 0), 0.0)
    (answer,) = outbox.poll(PollTokens(ANN, 2, 0), 0.0)
    assert (answer.poll_id, answer.delivery.items) == (1, ())
    put(outbox, 0, 7)
    (answer,) = outbox.flush(0.0)
    assert answer.poll_id == 2


def test_a_poll_with_nothing_to_say_is_answered_after_its_timeout() -> None:
    outbox = make_outbox()
    outbox.poll(PollTokens(ANN, 1, 0), 5.0)
    assert outbox.tick(6.9) == ([], [])
    answers, expired = outbox.tick(7.0)
    assert items(answers) == ()
    assert expired == []


def test_new_requests_do_not_put_the_answer_to_a_poll_off() -> None:
    outbox = make_outbox()
    outbox.poll(PollTokens(ANN, 1, 0), 5.0)
    outbox.meet(ANN, 6.5)
    assert outbox.next_tick == 7.0
    answers, _expired = outbox.tick(7.0)
    assert items(answers) == ()
    # The lease goes by the last sign of life.
    assert outbox.next_tick == 17.0


def test_each_consumer_gets_its_own() -> None:
    outbox = make_outbox()
    outbox.meet(BOB, 0.0)
    put(outbox, 0, 7)
    assert outbox.poll(PollTokens(BOB, 1, 0), 0.0) == []
    assert [answer.consumer_id for answer in outbox.poll(PollTokens(ANN, 1, 0), 0.0)] == [ANN]


def test_log_probabilities_go_with_their_tokens() -> None:
    outbox = make_outbox()
    logprobs = [TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-1.5, ())]
    for index, one in enumerate(logprobs):
        outbox.put(ANN, StreamItem(Q, index, (7 + index,), (one,), 4, None, None))
    got = single_items(outbox.poll(PollTokens(ANN, 1, 0), 0.0))
    assert [(item.token_ids, item.logprobs) for item in got] == [
        ((7,), (logprobs[0],)),
        ((8,), (logprobs[1],)),
    ]
    assert {item.num_cached_tokens for item in got} == {4}


def test_the_end_of_one_attempt_and_the_begin_of_the_next_are_kept_apart() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    put(outbox, 1, finish=FinishReason.CANCELLED)
    put(outbox, 0, 9, attempt=1)
    got = single_items(outbox.poll(PollTokens(ANN, 1, 0), 0.0))
    assert [(i.name.attempt, i.index, i.token_ids, i.finish) for i in got] == [
        (0, 0, (7,), None),
        (0, 1, (), FinishReason.CANCELLED),
        (1, 0, (9,), None),
    ]


def test_whoever_polls_a_fenced_replica_is_told_what_it_is_owed_and_the_reason() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    outbox.poll(PollTokens(ANN, 1, 0), 0.0)
    outbox.poll(PollTokens(ANN, 2, 1), 0.0)
    outbox.poll(PollTokens(BOB, 1, 0), 0.0)
    put(outbox, 1, 8)
    outbox.fence("step 3 failed")
    ann, bob = outbox.flush(0.0)
    assert (tokens([ann]), ann.delivery.fenced) == ([(1, (8,))], "step 3 failed")
    assert (bob.delivery.items, bob.delivery.fenced) == ((), "step 3 failed")
    assert outbox.flush(0.0) == []
    # At once, though there is nothing more to say.
    (again,) = outbox.poll(PollTokens(ANN, 3, ann.delivery.sequence), 0.0)
    assert (again.poll_id, again.delivery.items) == (3, ())
    assert again.delivery.fenced == "step 3 failed"


# --- leases -----------------------------------------------------------------------------------


def test_a_consumer_without_a_poll_expires_once_after_its_lease() -> None:
    outbox = make_outbox()
    assert outbox.tick(9.9) == ([], [])
    assert outbox.tick(10.0) == ([], [ANN])
    assert outbox.tick(11.0) == ([], [])


def test_a_pending_poll_keeps_the_lease_and_its_answer_renews_it() -> None:
    outbox = make_outbox()
    outbox.poll(PollTokens(ANN, 1, 0), 9.0)
    answers, expired = outbox.tick(30.0)
    assert (len(answers), expired) == (1, [])
    assert outbox.tick(39.9) == ([], [])
    assert outbox.tick(40.0) == ([], [ANN])


def test_a_request_that_arrives_renews_the_lease() -> None:
    outbox = make_outbox()
    outbox.meet(ANN, 9.75)
    assert outbox.tick(10.0) == ([], [])
    assert outbox.tick(19.75) == ([], [ANN])


def test_a_consumer_that_was_held_up_learns_how_its_requests_ended() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    assert outbox.tick(10.0) == ([], [ANN])
    put(outbox, 1, finish=FinishReason.CANCELLED)
    token, end = single_items(outbox.poll(PollTokens(ANN, 1, 0), 30.0))
    assert (token.token_ids, token.finish) == ((7,), None)
    assert (end.index, end.token_ids, end.finish) == (1, (), FinishReason.CANCELLED)


def test_a_consumer_that_came_back_expires_again() -> None:
    outbox = make_outbox()
    assert outbox.tick(10.0) == ([], [ANN])
    outbox.meet(ANN, 12.0)
    assert outbox.next_tick == 22.0
    assert outbox.tick(22.0) == ([], [ANN])


def test_a_consumer_is_forgotten_after_many_leases_with_what_it_is_owed() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    outbox.tick(10.0)
    outbox.tick(10.0 * LEASES_TO_REMEMBER)
    assert outbox.poll(PollTokens(ANN, 1, 0), 101.0) == []
    put(outbox, 5, 8)
    assert tokens(outbox.flush(101.0)) == [(5, (8,))]


def test_a_forgotten_consumer_that_comes_back_cannot_acknowledge_what_it_has_not_seen() -> None:
    outbox = make_outbox()
    put(outbox, 0, 7)
    (answer,) = outbox.poll(PollTokens(ANN, 1, 0), 0.0)
    ack = answer.delivery.sequence
    outbox.tick(10.0)
    outbox.tick(10.0 * LEASES_TO_REMEMBER)
    outbox.meet(ANN, 101.0)
    put(outbox, 0, 8)
    lost = outbox.poll(PollTokens(ANN, 2, ack), 101.0)
    assert tokens(lost) == [(0, (8,))]
    assert tokens(outbox.poll(PollTokens(ANN, 3, ack), 101.0)) == [(0, (8,))]


def test_nothing_is_kept_for_a_consumer_that_was_never_met() -> None:
    outbox = make_outbox()
    outbox.put(BOB, StreamItem(Q, 0, (7,), (), 0, None, None))
    assert outbox.poll(PollTokens(BOB, 1, 0), 0.0) == []


def test_the_next_tick_is_when_silence_changes_something() -> None:
    outbox = Outbox(ReplicaId("r0"), Incarnation(3), lease_s=10.0, poll_timeout_s=2.0)
    assert outbox.next_tick is None
    outbox.meet(ANN, 0.0)
    assert outbox.next_tick == 10.0
    outbox.poll(PollTokens(ANN, 1, 0), 1.0)
    outbox.meet(BOB, 1.5)
    assert outbox.next_tick == 3.0
    assert outbox.tick(2.9) == ([], [])
    answers, _ = outbox.tick(3.0)
    assert [answer.poll_id for answer in answers] == [1]
    assert outbox.next_tick == 11.5
    assert outbox.tick(11.5) == ([], [BOB])
    assert outbox.next_tick == 13.0
    assert outbox.tick(13.0) == ([], [ANN])
    assert outbox.next_tick == 1.5 + 10.0 * LEASES_TO_REMEMBER
    outbox.tick(103.0)
    assert outbox.next_tick is None
