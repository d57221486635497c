"""A controller that was started anew: whom it waits for, and what it takes over from them."""

import pytest
from controller_driver import (
    R0,
    R1,
    asks,
    inventory,
    lost,
    make_controller,
    placement,
    postponement,
    refusal,
    register,
    report,
    serve,
    submit,
    tick,
    to_replica,
    with_attempt,
)
from replica_driver import make_request

from rayserve_paged.core.book_invariants import check_books
from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    EndDeployment,
    FoundReplica,
    Placed,
    StartReplica,
    StopReplica,
    WithdrawRequest,
)
from rayserve_paged.core.errors import NoReplicaError
from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId, RequestId, Term
from rayserve_paged.core.replica_messages import AskInventory, CancelRequest

RECOVERY = RecoveryConfig(restart_delay_s=1.0, grace_s=5.0)
NEVER_CAME = "it did not come back to a controller that was started anew"


def make_new_term(*names: ReplicaId, recovery: RecoveryConfig | None = RECOVERY) -> Controller:
    return Controller(None, recovery=recovery, term=Term(1), expected=names)


def find(
    controller: Controller, name: ReplicaId, life: int, now: float = 0.0
) -> list[ControllerCommand]:
    return controller.handle(FoundReplica(name, Incarnation(life)), now)


# --- whom it waits for ------------------------------------------------------------------------


def test_it_places_nothing_before_all_replicas_have_come_back() -> None:
    controller = make_new_term(R0, R1)
    request = make_request([1])
    assert (controller.is_rebuilding, controller.is_hopeful) == (True, True)
    assert controller.why_none == "the controller was started anew, and waits for r0, r1"
    controller.handle(register(R0, inventory=inventory()), 0.0)
    assert controller.why_none == "the controller was started anew, and waits for r1"
    assert postponement(submit(controller, request)) == (
        "no replica can take the request: the controller was started anew, and waits for r1"
    )
    controller.handle(register(R1, inventory=inventory()), 0.0)
    assert not controller.is_rebuilding
    assert placement(submit(controller, request)) == "r0"


def test_a_life_that_is_found_is_asked_for_its_inventory_until_it_comes() -> None:
    controller = make_new_term(R0)
    (ask,) = find(controller, R0, 3)
    assert ask == to_replica(R0, AskInventory(1, with_keys=True), life=3, term=1)
    assert [asks(tick(controller, now)) for now in (0.0, 0.9, 1.0)] == [
        [("r0", 3, True)],
        [],
        [("r0", 3, True)],
    ]
    assert controller.handle(register(R0, life=3, inventory=inventory()), 1.5) == []
    assert controller.replicas == {R0: 3}
    assert tick(controller, 9.0) == []
    assert find(controller, R0, 3) == [], "it lives"


def test_of_two_lives_that_are_found_the_later_one_is_waited_for() -> None:
    for lives in [(3, 5), (5, 3)]:
        controller = make_new_term(R0)
        for life in lives:
            assert asks(find(controller, R0, life)) == [("r0", life, True)]
        assert asks(tick(controller, 0.0)) == [("r0", 5, True)]
        assert controller.handle(lost(R0, life=3), 1.0) == []
        assert tick(controller, 5.0)[0] == StopReplica(R0, Incarnation(5), NEVER_CAME)


def test_a_replica_that_is_found_is_waited_for_though_it_was_not_expected() -> None:
    controller = make_new_term()
    find(controller, R1, 2)
    assert controller.is_rebuilding
    controller.handle(register(R1, life=2, inventory=inventory()), 0.0)
    assert (controller.is_rebuilding, controller.replicas) == (False, {R1: 2})


def test_what_does_not_come_back_within_the_grace_is_started_again() -> None:
    controller = make_new_term(R0, R1)
    find(controller, R1, 7, now=10.0)
    assert asks(tick(controller, 12.0)) == [("r1", 7, True)]
    assert controller.next_tick == 13.0
    asks(tick(controller, 14.5))
    assert controller.next_tick == 15.0
    assert controller.is_rebuilding
    stop, *starts = tick(controller, 15.0)
    assert stop == StopReplica(R1, Incarnation(7), NEVER_CAME)
    # Above all that any term before may have started.
    assert starts == [
        StartReplica(R0, Incarnation(1_000_000)),
        StartReplica(R1, Incarnation(1_000_000)),
    ]
    assert (controller.is_rebuilding, controller.is_hopeful) == (False, True)
    assert controller.why_none == f"r1 is lost: {NEVER_CAME} (it is being started again)"
    assert controller.next_tick == 16.0
    stopped = StopReplica(R1, Incarnation(7), NEVER_CAME)
    assert controller.handle(register(R1, life=7, inventory=inventory()), 15.5) == [stopped]


def test_the_grace_begins_with_the_first_tick_where_nothing_was_found() -> None:
    controller = make_new_term(R0)
    assert controller.next_tick == float("-inf")
    assert tick(controller, 10.0) == []
    assert (tick(controller, 14.9), controller.next_tick) == ([], 15.0)
    assert tick(controller, 15.0) == [StartReplica(R0, Incarnation(1_000_000))]
    assert controller.why_none == "none has registered yet"


def test_the_next_tick_is_the_earlier_of_the_end_of_the_grace_and_of_a_start() -> None:
    controller = make_new_term(R0, R1)
    controller.handle(register(R1, inventory=inventory()), 0.0)
    controller.handle(lost(R1), 0.0)
    assert tick(controller, 0.0) == [StartReplica(R1, Incarnation(1_000_000))]
    controller.handle(lost(R1, life=1_000_000), 0.5)
    assert tick(controller, 0.7) == []
    assert controller.next_tick == 1.5
    tick(controller, 1.5)
    assert asks(tick(controller, 4.5)) == [("r1", 1_000_001, True)]
    assert controller.next_tick == 5.0


def test_without_recovery_there_is_no_grace_and_nothing_is_started() -> None:
    controller = make_new_term(R0, recovery=None)
    assert (tick(controller, 10.0), controller.is_hopeful) == ([], False)
    assert isinstance(refusal(submit(controller, make_request([1]), 10.0)), NoReplicaError)


def test_a_life_that_comes_back_while_its_next_one_is_started_is_stopped() -> None:
    controller = make_new_term(R0)
    tick(controller, 0.0)
    tick(controller, 5.0)
    late = register(R0, life=2, inventory=inventory())
    assert controller.handle(late, 6.0) == [
        StopReplica(R0, Incarnation(2), "its next life is being started")
    ]
    assert (controller.replicas, controller.is_hopeful) == ({}, True)
    assert controller.handle(register(R0, life=1_000_000), 7.0) == []
    assert controller.replicas == {R0: 1_000_000}


def test_a_life_that_was_found_and_is_lost_is_not_waited_for() -> None:
    controller = make_new_term(R0)
    find(controller, R0, 2)
    assert controller.handle(lost(R0, life=1), 1.0) == []
    assert controller.why_none.endswith("waits for r0")
    stop = StopReplica(R0, Incarnation(2), "a rank is silent")
    assert controller.handle(lost(R0, life=2), 1.0) == [stop]
    assert not controller.is_rebuilding
    assert controller.handle(lost(R0, life=2), 1.0) == []
    assert tick(controller, 1.0) == [StartReplica(R0, Incarnation(1_000_000))]


def test_the_end_of_the_deployment_ends_what_is_waited_for() -> None:
    controller = make_new_term(R0, R1)
    find(controller, R1, 4)
    why = "the deployment ended: down"
    commands = controller.handle(EndDeployment("down"), 1.0)
    assert commands[:-1] == [StopReplica(R1, Incarnation(4), why)]
    assert (controller.is_rebuilding, controller.is_hopeful) == (False, False)
    assert (find(controller, R0, 1), controller.is_rebuilding) == ([], False)


# --- what it takes over -----------------------------------------------------------------------


def adopt(on_trial: bool = False) -> tuple[Controller, ControllerCommand]:
    """A controller that has learned of a request from the inventory of r0."""
    controller = make_new_term(R0, R1)
    one = serve(make_request(range(9), 4), attempt=2, on_trial=on_trial)
    controller.handle(register(R1, inventory=inventory()), 0.0)
    assert controller.handle(register(R0, life=3, inventory=inventory(one)), 0.0) == []
    check_books(controller)
    return controller, Placed(RequestId("q0"), Attempt(2), R0, Incarnation(3), 4, on_trial)


def test_a_request_that_a_replica_serves_is_taken_into_the_books() -> None:
    controller, placed = adopt()
    request = make_request(range(9), 4, attempt=2)
    assert controller.num_requests(R0) == 1
    assert controller.num_pending_tokens(R0) == 9 + 4
    assert controller.fleet.replicas[R0].trial is None
    # As it was assigned is not known, and it is there already.
    assert submit(controller, request) == [placed]
    assert controller.num_requests(R0) == 1
    controller.handle(report(R0, request, life=3), 0.0)
    assert (controller.num_requests(R0), controller.num_pending_tokens(R0)) == (0, 0)


def test_a_request_that_was_taken_over_can_be_cancelled() -> None:
    controller, _placed = adopt()
    cancel = CancelRequest(RequestId("q0"), Attempt(2))
    withdrawal = WithdrawRequest(RequestId("q0"), Attempt(2))
    assert controller.handle(withdrawal, 0.0) == [to_replica(R0, cancel, life=3, term=1)]


def test_a_trial_is_taken_over_with_its_request() -> None:
    controller, placed = adopt(on_trial=True)
    first = with_attempt(make_request(range(9), 4), 2, num_deaths=1)
    assert submit(controller, first) == [placed]
    second, third = (
        with_attempt(make_request([i], request_id=f"x{i}"), 1, num_deaths=1) for i in range(2)
    )
    assert placement(submit(controller, second)) == "r1"
    assert "its turn to be tried" in postponement(submit(controller, third))
    # It is not on trial any more.
    later = inventory(serve(first, attempt=2), num_reports=0)
    controller.handle(register(R0, life=3, inventory=later), 0.0)
    assert placement(submit(controller, third)) == "r0"


def test_the_trial_of_a_search_that_is_taken_over_lasts_to_its_end() -> None:
    controller = make_new_term(R0)
    search = make_request([1], request_id="q0", beam_width=2)
    listed = inventory(serve(search, on_trial=True))
    controller.handle(register(R0, inventory=listed), 0.0)
    next_one = with_attempt(make_request([5], request_id="x"), 1, num_deaths=1)
    controller.handle(report(R0, prefilled=[search]), 0.0)
    assert "its turn to be tried" in postponement(submit(controller, next_one))
    controller.handle(report(R0, search, sequence=1), 0.0)
    assert placement(submit(controller, next_one)) == "r0"


def test_of_two_suspects_that_a_replica_serves_the_trial_is_that_of_the_first() -> None:
    controller = make_new_term(R0)
    suspects = [make_request([i], request_id=f"q{i}") for i in range(2)]
    served = [serve(one, on_trial=True) for one in suspects]
    controller.handle(register(R0, inventory=inventory(*served)), 0.0)
    next_one = with_attempt(make_request([5], request_id="x"), 1, num_deaths=1)
    controller.handle(report(R0, with_attempt(suspects[1], 0)), 0.0)
    assert "its turn to be tried" in postponement(submit(controller, next_one))
    controller.handle(report(R0, with_attempt(suspects[0], 0), sequence=1), 0.0)
    assert placement(submit(controller, next_one)) == "r0"


def test_of_a_request_that_two_replicas_serve_the_later_attempt_counts() -> None:
    request = make_request(range(9), 4)
    old, new = CancelRequest(RequestId("q0"), Attempt(1)), (R1, Incarnation(0))
    for first, second in [((R0, 1), (R1, 2)), ((R1, 2), (R0, 1))]:
        controller = make_new_term(R0, R1)
        found = inventory(serve(request, attempt=first[1]))
        assert controller.handle(register(first[0], inventory=found), 0.0) == []
        found = inventory(serve(request, attempt=second[1]))
        commands = controller.handle(register(second[0], inventory=found), 0.0)
        assert commands == [to_replica(R0, old, term=1)]
        assert controller.fleet.booked[RequestId("q0")].source == new
        assert (controller.num_requests(R0), controller.num_requests(R1)) == (0, 1)
        check_books(controller)


def test_the_same_attempt_on_two_replicas_stays_where_it_was_seen_first() -> None:
    controller, placed = adopt()
    again = inventory(serve(make_request(range(9), 4), attempt=2))
    # Its consumer tells the one that it does not read.
    assert controller.handle(register(R1, inventory=again), 0.0) == []
    assert submit(controller, make_request(range(9), 4, attempt=2)) == [placed]
    check_books(controller)


def test_an_older_attempt_elsewhere_ends_no_trial_of_the_later_one() -> None:
    controller, _placed = adopt(on_trial=True)
    elsewhere = inventory(serve(make_request(range(9), 4), attempt=2))
    controller.handle(register(R1, inventory=elsewhere), 0.0)
    assert controller.fleet.replicas[R0].trial == ("q0", 2)


def test_a_cancel_of_what_is_not_in_the_books_goes_where_its_consumer_says_that_it_is() -> None:
    controller = make_controller(R0)
    source = (R1, Incarnation(3))
    cancel = CancelRequest(RequestId("q9"), Attempt(1), 2)
    withdrawal = WithdrawRequest(RequestId("q9"), Attempt(1), 2, source)
    assert controller.handle(withdrawal, 0.0) == [to_replica(R1, cancel, life=3)]
    # Another attempt of it is in the books.
    submit(controller, make_request([1], request_id="q9", attempt=2))
    assert controller.handle(withdrawal, 0.0) == [to_replica(R1, cancel, life=3)]
    nowhere = WithdrawRequest(RequestId("q9"), Attempt(1), 2)
    assert controller.handle(nowhere, 0.0) == []


@pytest.mark.parametrize("sibling", [None, 1])
def test_a_cancel_of_what_is_in_the_books_goes_where_it_is(sibling: int | None) -> None:
    controller = make_controller(R0)
    request = make_request([1], n=2)
    submit(controller, request)
    elsewhere = (R1, Incarnation(3))
    withdrawal = WithdrawRequest(request.request_id, request.attempt, sibling, elsewhere)
    cancel = CancelRequest(request.request_id, request.attempt, sibling)
    assert controller.handle(withdrawal, 0.0) == [to_replica(R0, cancel)]
