"""What a controller makes of an inventory: its books, keys and reports are brought in line."""

from controller_driver import (
    R0,
    R1,
    SCOPE,
    asks,
    inventory,
    make_controller,
    number_of,
    placement,
    postponement,
    register,
    report,
    serve,
    submit,
    tick,
    to_replica,
    with_attempt,
)
from replica_driver import make_request, prompt_keys

from rayserve_paged.core.book_invariants import check_books
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.ids import Attempt, Incarnation
from rayserve_paged.core.replica_messages import CancelRequest, ServedRequest
from rayserve_paged.core.replica_record import ReplicaRecord, ReportOrder

ONE, TWO = make_request(range(9), request_id="a"), make_request(range(20, 29), request_id="b")
KEYS = prompt_keys(ONE, SCOPE)


def ask_when_silent(controller: Controller, now: float) -> int:
    """Put the question that silence leads to; return its number."""
    commands = tick(controller, now)
    assert asks(commands) == [("r0", 0, False)]
    return number_of(commands)


def answer(
    controller: Controller, number: int | None, *served: ServedRequest, now: float = 10.0
) -> None:
    """Let r0 answer with what it serves."""
    told = register(R0, inventory=inventory(*served, number=number, keys=None))
    assert controller.handle(told, now) == []
    check_books(controller)


# --- requests that are gone -------------------------------------------------------------------


def test_a_request_that_is_not_listed_has_ended_or_never_came() -> None:
    controller = make_controller(R0)
    submit(controller, ONE)
    submit(controller, TWO)
    answer(controller, ask_when_silent(controller, 5.0), serve(TWO))
    assert list(controller.fleet.booked) == ["b"]
    assert controller.num_pending_tokens(R0) == 9 + 4
    assert placement(submit(controller, ONE, 10.0)) == "r0"


def test_an_assignment_may_be_on_its_way_for_some_time_before_it_is_missed() -> None:
    controller = make_controller(R0)
    submit(controller, ONE, 2.9)
    submit(controller, TWO, 3.0)
    third = make_request([1], request_id="c")
    submit(controller, third, 3.1)
    answer(controller, ask_when_silent(controller, 8.0))
    assert list(controller.fleet.booked) == ["c"]


def test_an_inventory_that_was_not_asked_for_takes_nothing_out_of_the_books() -> None:
    controller = make_controller(R0)
    submit(controller, ONE)
    number = ask_when_silent(controller, 7.0)
    answer(controller, None, now=7.0)
    answer(controller, number + 1, now=7.0)
    assert list(controller.fleet.booked) == ["a"]
    answer(controller, number, now=7.5)
    assert list(controller.fleet.booked) == []


def test_an_answer_counts_from_its_own_question_and_once() -> None:
    controller = make_controller(R0)
    submit(controller, ONE)
    first = ask_when_silent(controller, 5.0)
    submit(controller, TWO, 5.5)
    second = ask_when_silent(controller, 6.0)
    third = ask_when_silent(controller, 11.0)
    answer(controller, second, serve(ONE), now=11.5)
    assert list(controller.fleet.booked) == ["a", "b"], "the second was placed 0.5 s before it"
    # It was put before the one that is answered, and what it tells may be older.
    answer(controller, first, now=11.5)
    assert list(controller.fleet.booked) == ["a", "b"]
    answer(controller, third, serve(TWO), now=11.5)
    assert list(controller.fleet.booked) == ["b"]
    answer(controller, third, now=99.0)
    assert list(controller.fleet.booked) == ["b"]


def test_an_older_attempt_that_is_listed_is_ended_and_is_not_the_one_in_the_books() -> None:
    controller = make_controller(R0)
    submit(controller, with_attempt(ONE, 2))
    cancel = to_replica(R0, CancelRequest(ONE.request_id, Attempt(1)))
    listed = inventory(serve(ONE, attempt=1), number=None)
    assert controller.handle(register(R0, inventory=listed), 0.0) == [cancel]
    assert controller.fleet.booked[ONE.request_id].attempt == 2
    number = ask_when_silent(controller, 5.0)
    listed = inventory(serve(ONE, attempt=1), number=number)
    # Its assignment was lost; the older attempt is in the books until it has ended.
    assert controller.handle(register(R0, inventory=listed), 5.0) == []
    assert controller.fleet.booked[ONE.request_id].attempt == 1


def test_a_later_attempt_that_is_listed_takes_the_place_of_the_one_in_the_books() -> None:
    controller = make_controller(R0)
    submit(controller, ONE)
    cancel = to_replica(R0, CancelRequest(ONE.request_id, Attempt(0)))
    listed = inventory(serve(ONE, attempt=1))
    assert controller.handle(register(R0, inventory=listed), 0.0) == [cancel]
    assert controller.fleet.booked[ONE.request_id].attempt == 1
    assert controller.num_requests(R0) == 1
    check_books(controller)


def test_a_request_that_is_listed_as_it_is_booked_stays_as_it_was_placed() -> None:
    controller = make_controller(R0)
    first = submit(controller, ONE)
    answer(controller, None, serve(ONE))
    assert submit(controller, ONE) == first
    assert controller.num_queued_tokens(R0) == 9


def test_a_suspect_that_is_listed_with_a_token_is_not_on_trial_any_more() -> None:
    controller = make_controller(R0)
    first, second = (with_attempt(one, 1, num_deaths=1) for one in (ONE, TWO))
    submit(controller, first)
    answer(controller, None, serve(first, attempt=1, on_trial=True))
    assert "its turn to be tried" in postponement(submit(controller, second))
    answer(controller, None, serve(first, attempt=1))
    assert placement(submit(controller, second)) == "r0"


# --- keys and reports -------------------------------------------------------------------------


def test_the_keys_that_are_listed_take_the_place_of_all_that_were_known() -> None:
    controller = make_controller(R0)
    submit(controller, TWO)
    controller.handle(report(R0, TWO), 0.0)
    told = register(R0, inventory=inventory(keys=KEYS, num_reports=1))
    controller.handle(told, 0.0)
    assert controller.fleet.placement.held_keys(R0) == set(KEYS)


def test_an_inventory_that_reports_have_overtaken_only_says_that_the_replica_lives() -> None:
    controller = make_controller(R0, R1)
    submit(controller, ONE)
    controller.handle(report(R0, ONE), 0.0)
    submit(controller, make_request([1], attempt=1), lost_at=(R0, 0))
    old = register(R0, inventory=inventory(serve(ONE), keys=(), num_reports=0))
    assert controller.handle(old, 1.0) == []
    assert ONE.request_id not in controller.fleet.booked
    assert controller.fleet.placement.held_keys(R0) == set(KEYS)
    assert controller.fleet.doubted == set()


def test_an_inventory_with_all_keys_stands_for_the_reports_before_it() -> None:
    controller = make_controller(R0)
    for one in (ONE, TWO):
        submit(controller, one)
    controller.handle(report(R0, ONE, sequence=1), 0.0)
    controller.handle(report(R0, TWO, sequence=3), 0.0)
    told = register(R0, inventory=inventory(serve(TWO), keys=KEYS, num_reports=3))
    controller.handle(told, 0.0)
    # The one after it is taken in, and the one before it is not.
    assert list(controller.fleet.booked) == ["a"]
    assert controller.fleet.placement.held_keys(R0) == set(KEYS) | set(prompt_keys(TWO, SCOPE))
    assert tick(controller, 1.0) == []
    controller.handle(report(R0, ONE, sequence=2), 1.0)
    assert list(controller.fleet.booked) == ["a"]
    controller.handle(report(R0, ONE, sequence=4), 1.0)
    assert list(controller.fleet.booked) == []


def test_reports_that_must_have_been_lost_are_made_good_by_all_keys() -> None:
    controller = make_controller(R0)
    submit(controller, ONE)
    number = ask_when_silent(controller, 5.0)
    told = inventory(serve(ONE), number=number, keys=None, num_reports=1)
    controller.handle(register(R0, inventory=told), 5.0)
    # Something was published or evicted that has not been told.
    assert tick(controller, 5.9) == []
    assert controller.next_tick == 6.9
    commands = tick(controller, 6.0)
    assert asks(commands) == [("r0", 0, True)]
    told = inventory(serve(ONE), number=number_of(commands), keys=KEYS, num_reports=1)
    controller.handle(register(R0, inventory=told), 6.0)
    assert controller.fleet.placement.held_keys(R0) == set(KEYS)
    assert tick(controller, 10.9) == []
    controller.handle(report(R0, sequence=1), 10.9)
    assert tick(controller, 12.0) == []


def test_reports_that_an_inventory_without_keys_has_overtaken_are_still_taken_in() -> None:
    controller = make_controller(R0)
    submit(controller, ONE)
    told = inventory(serve(ONE), keys=None, num_reports=1)
    controller.handle(register(R0, inventory=told), 0.0)
    controller.handle(report(R0, ONE), 0.5)
    assert list(controller.fleet.booked) == []
    assert controller.fleet.placement.held_keys(R0) == set(KEYS)


def test_an_inventory_that_tells_of_no_other_reports_leads_to_no_question() -> None:
    controller = make_controller(R0)
    submit(controller, ONE)
    controller.handle(report(R0), 0.0)
    number = ask_when_silent(controller, 5.0)
    told = inventory(serve(ONE), number=number, keys=None, num_reports=1)
    controller.handle(register(R0, inventory=told), 5.0)
    assert tick(controller, 9.9) == []


def test_a_replica_that_has_lost_reports_is_asked_though_it_has_no_requests() -> None:
    controller = make_controller(R0)
    told = register(R0, inventory=inventory(keys=None, num_reports=1))
    controller.handle(told, 0.0)
    assert asks(tick(controller, 0.0)) == [("r0", 0, True)]
    assert [controller.next_tick] == [1.0]
    controller.handle(report(R0), 0.5)
    controller.handle(told, 0.5)
    assert (tick(controller, 2.0), controller.next_tick) == ([], None)


def test_a_question_that_was_put_before_one_that_is_answered_is_forgotten() -> None:
    record = ReplicaRecord(Incarnation(0), 0.0)
    for number, now in enumerate([5.0, 6.0, 6.0, 7.0]):
        record.ask(number, now)
    assert record.answer(2, 8.0) == 6.0
    assert [record.answer(number, 8.0) for number in (None, 0, 1, 2)] == [None] * 4
    assert record.answer(3, 8.0) == 7.0


# --- the order of reports ---------------------------------------------------------------------


def test_reports_are_taken_once_and_in_order() -> None:
    order = ReportOrder()
    reports = [report(R0, sequence=number) for number in range(6)]
    assert (order.take(reports[1]), order.has_gap) == ([], True)
    assert (order.take(reports[3]), order.has_gap) == ([], True)
    assert (order.take(reports[0]), order.has_gap) == ([reports[0], reports[1]], True)
    assert (order.take(reports[0]), order.take(reports[1])) == ([], [])
    assert (order.take(reports[2]), order.has_gap) == ([reports[2], reports[3]], False)
    # One that comes again is no report that follows a gap.
    assert (order.take(reports[3]), order.has_gap, order.next) == ([], False, 4)


def test_reports_before_one_that_is_skipped_to_are_not_waited_for() -> None:
    order = ReportOrder()
    reports = [report(R0, sequence=number) for number in range(6)]
    for number in (1, 3, 5):
        assert order.take(reports[number]) == []
    assert order.skip_to(3) == [reports[3]]
    assert (order.next, order.has_gap) == (4, True)
    assert order.skip_to(2) == []
    assert order.next == 4
    assert order.take(reports[4]) == [reports[4], reports[5]]


def test_a_trial_ends_for_the_attempt_that_is_on_it() -> None:
    record = ReplicaRecord(Incarnation(0), 0.0)
    record.trial = (ONE.request_id, Attempt(1))
    record.end_trial(ONE.request_id, Attempt(0))
    record.end_trial(TWO.request_id, Attempt(1))
    assert record.trial == (ONE.request_id, 1)
    record.end_trial(ONE.request_id, Attempt(1))
    assert record.trial is None
