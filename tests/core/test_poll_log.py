from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.poll_log import PollLog

SOURCE, OTHER = (ReplicaId("r0"), Incarnation(0)), (ReplicaId("r0"), Incarnation(1))
Q = RequestId("q0")


def make_log() -> PollLog:
    """A poll is overdue after 3 s; who lets three of these pass is silent."""
    return PollLog(poll_timeout_s=2.0)


def test_the_highest_sequence_that_came_is_acknowledged_to_the_life_that_it_came_from() -> None:
    polls = make_log()
    for sequence in (2, 5, 3):
        polls.answer(SOURCE, sequence, 0.0, None)
    assert polls.poll(SOURCE, 1.0) == (5, ())
    assert polls.poll(OTHER, 1.0) == (0, ())
    assert polls.num_polls == 2


def test_an_answer_to_an_older_poll_leaves_the_latest_unanswered() -> None:
    polls = make_log()
    polls.poll(SOURCE, 0.0)
    polls.poll(OTHER, 0.0)
    polls.poll(SOURCE, 3.5)
    polls.answer(SOURCE, 1, 4.0, 1)
    assert polls.overdue(6.4) == [OTHER]
    assert polls.overdue(6.5) == [SOURCE, OTHER]
    polls.answer(SOURCE, 2, 6.5, 3)
    assert polls.overdue(99.0) == [OTHER]
    polls.answer(SOURCE, 2, 7.0, 3)
    assert (polls.overdue(99.0), polls.poll(SOURCE, 99.0)) == ([OTHER], (2, ()))


def test_an_answer_that_names_no_poll_is_one_to_the_latest() -> None:
    polls = make_log()
    polls.poll(SOURCE, 0.0)
    polls.answer(SOURCE, 1, 1.0, None)
    assert (polls.overdue(99.0), polls.silent(99.0)) == ([], [])


def test_a_source_is_silent_since_its_last_answer() -> None:
    polls = make_log()
    polls.poll(SOURCE, 0.0)
    polls.poll(SOURCE, 3.0)
    polls.answer(SOURCE, 1, 5.0, 1)
    assert (polls.silent(13.9), polls.silent(14.0)) == ([], [SOURCE])


def test_what_is_not_wanted_is_told_with_the_next_poll_of_its_source() -> None:
    polls = make_log()
    for attempt in (0, 1, 0):
        polls.refuse(SOURCE, Q, Attempt(attempt))
    assert polls.poll(OTHER, 0.0) == (0, ())
    assert polls.poll(SOURCE, 0.0) == (0, ((Q, 0), (Q, 1)))
    assert polls.poll(SOURCE, 0.0) == (0, ())


def test_a_source_that_is_forgotten_goes_on_where_it_was_unless_it_is_gone() -> None:
    for for_good, ack in [(False, 4), (True, 0)]:
        polls = make_log()
        polls.answer(SOURCE, 4, 0.0, None)
        polls.poll(SOURCE, 0.0)
        polls.refuse(SOURCE, Q, Attempt(0))
        polls.forget(SOURCE, for_good=for_good)
        polls.forget(SOURCE, for_good=for_good)
        assert (polls.overdue(99.0), polls.silent(99.0)) == ([], [])
        assert polls.poll(SOURCE, 100.0) == (ack, ())
        assert polls.silent(108.9) == []
