"""When a replica is asked what it has, which question an answer is to, and whose trial it is."""

import pytest

from rayserve_paged.core.ids import Attempt, Incarnation, RequestId
from rayserve_paged.core.replica_record import ASK_AGAIN_S, ReplicaRecord


def make_record(now: float = 0.0) -> ReplicaRecord:
    return ReplicaRecord(Incarnation(0), now)


@pytest.mark.parametrize("trouble", ["is_doubted", "lacks_reports"])
def test_a_troubled_replica_is_asked_at_once_and_again_after_a_while(trouble: str) -> None:
    record = make_record()
    assert not record.must_ask(0.0)
    setattr(record, trouble, True)
    assert record.must_ask(0.0)
    record.ask(1, 8.0)
    assert not record.must_ask(8.0)
    assert not record.must_ask(8.0 + ASK_AGAIN_S * 0.99)
    assert record.must_ask(8.0 + ASK_AGAIN_S)


def test_an_answer_tells_when_its_question_was_put_and_settles_those_before_it() -> None:
    record = make_record()
    for number, now in ((1, 1.0), (2, 2.0), (3, 3.0)):
        record.ask(number, now)
    assert record.answer(None, 4.0) is None
    assert record.answer(2, 5.0) == 2.0
    assert record.answer(2, 6.0) is None
    assert record.answer(1, 6.0) is None
    assert record.answer(3, 7.0) == 3.0


def test_a_trial_ends_with_its_own_attempt_alone() -> None:
    record = make_record()
    record.trial = RequestId("q0"), Attempt(1)
    record.end_trial(RequestId("q0"), Attempt(0))
    record.end_trial(RequestId("q1"), Attempt(1))
    assert record.trial == ("q0", 1)
    record.end_trial(RequestId("q0"), Attempt(1))
    assert record.trial is None
