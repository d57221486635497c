"""Whom a controller asks, doubts, gives up and starts again."""

import dataclasses

import pytest
from controller_driver import (
    R0,
    R1,
    SCOPE,
    asks,
    inventory,
    lost,
    make_controller,
    number_of,
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
from replica_driver import make_request, prompt_keys

from rayserve_paged.core.book_invariants import check_books
from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.controller_messages import (
    EndDeployment,
    Placed,
    Rejected,
    ReplicaLost,
    StartReplica,
    StopReplica,
    TakeDown,
)
from rayserve_paged.core.delivered import DeliveredSample
from rayserve_paged.core.errors import NoReplicaError
from rayserve_paged.core.ids import ConsumerId, Incarnation
from rayserve_paged.core.replica_messages import FenceReplica
from rayserve_paged.core.request import Request

RECOVERY = RecoveryConfig(restart_delay_s=1.0, grace_s=5.0)
LATE = "it did not register in time"


# --- lost replicas ----------------------------------------------------------------------------


def test_a_lost_replica_is_started_again_with_the_next_tick_and_asked_until_it_registers() -> None:
    controller = make_controller(R0, recovery=RECOVERY, start_timeout_s=300.0)
    assert tick(controller, 10.0) == []
    controller.handle(lost(R0), 10.0)
    assert controller.why_none == "r0 is lost: a rank is silent (it is being started again)"
    assert (controller.is_hopeful, controller.next_tick) == (True, 10.0)
    assert tick(controller, 10.0) == [StartReplica(R0, Incarnation(1))]
    # That it has started may have been said in vain.
    assert [asks(tick(controller, now)) for now in (10.5, 10.9, 11.0, 11.5, 12.0)] == [
        [],
        [],
        [("r0", 1, True)],
        [],
        [("r0", 1, True)],
    ]
    assert controller.handle(register(R0, life=1), 13.0) == []
    assert controller.replicas == {R0: 1}
    assert (tick(controller, 20.0), controller.is_hopeful, controller.next_tick) == (
        [],
        False,
        None,
    )


def test_a_life_that_does_not_register_in_time_is_stopped_and_followed_by_another() -> None:
    controller = make_controller(R0, recovery=RECOVERY, start_timeout_s=300.0)
    tick(controller, 0.0)
    controller.handle(lost(R0), 0.0)
    tick(controller, 0.0)
    asks(tick(controller, 299.5))
    assert controller.next_tick == 300.0
    assert tick(controller, 300.0) == [StopReplica(R0, Incarnation(1), LATE)]
    assert controller.why_none == f"r0 is lost: {LATE} (it is being started again)"
    assert controller.next_tick == 301.0
    assert tick(controller, 301.0) == [StartReplica(R0, Incarnation(2))]
    assert controller.handle(register(R0, life=1), 302.0) == [StopReplica(R0, Incarnation(1), LATE)]


def test_a_life_that_cannot_be_started_is_followed_by_another_after_a_pause() -> None:
    controller = make_controller(R0, recovery=RECOVERY)
    controller.handle(lost(R0), 0.0)
    tick(controller, 0.0)
    unable = lost(R0, life=1, reason="it could not be started")
    # Nobody read a stream there.
    assert controller.handle(unable, 5.0) == [
        StopReplica(R0, Incarnation(1), "it could not be started")
    ]
    assert controller.handle(unable, 5.0) == []
    assert controller.handle(lost(R0, life=2), 5.0) == [], "it has not been started"
    assert tick(controller, 5.5) == []
    assert tick(controller, 6.0) == [StartReplica(R0, Incarnation(2))]


def test_a_life_that_reports_its_end_before_it_registers_is_lost() -> None:
    controller = make_controller(R0, recovery=RECOVERY)
    controller.handle(lost(R0), 0.0)
    tick(controller, 0.0)
    stop = StopReplica(R0, Incarnation(1), "step 0 failed")
    assert controller.handle(report(R0, life=1, fenced="step 0 failed"), 1.0) == [stop]
    assert controller.handle(report(R0, life=1, fenced="step 0 failed"), 1.0) == []
    assert tick(controller, 2.0) == [StartReplica(R0, Incarnation(2))]


def test_without_recovery_a_lost_replica_stays_lost() -> None:
    controller = make_controller(R0, recovery=RecoveryConfig(restart=False))
    controller.handle(lost(R0), 0.0)
    assert (tick(controller, 99.0), controller.is_hopeful) == ([], False)
    assert controller.why_none == "r0 is lost: a rank is silent"


def test_a_loss_takes_the_requests_out_of_the_books_and_leaves_those_of_others() -> None:
    controller = make_controller(R0, R1, recovery=RECOVERY)
    here, there = (make_request([i], 4, request_id=f"q{i}") for i in range(2))
    assert [placement(submit(controller, one)) for one in (here, there)] == ["r0", "r1"]
    submit(controller, make_request([5], 4, request_id="x", consumer_id="c9"), lost_at=(R0, 0))
    assert controller.fleet.doubted == {R0}
    fence, told, stop = controller.handle(lost(R0), 1.0)
    assert fence == to_replica(R0, FenceReplica("a rank is silent"))
    assert told == ReplicaLost(R0, Incarnation(0), "a rank is silent", (ConsumerId("c0"),))
    assert stop == StopReplica(R0, Incarnation(0), "a rank is silent")
    assert sorted(controller.fleet.booked) == ["q1", "x"]
    assert controller.fleet.doubted == set()
    assert controller.num_requests(R1) == 2
    check_books(controller)


def test_the_reasons_of_all_that_are_lost_are_told_in_order() -> None:
    controller = make_controller(R0, R1)
    assert controller.handle(lost(R1, reason="rank 1 ended"), 0.0)
    assert controller.handle(lost(R0, reason="rank 0 ended"), 0.0)
    assert controller.why_none == "r0 is lost: rank 0 ended; r1 is lost: rank 1 ended"


def test_a_request_waits_for_a_replica_that_is_started_again() -> None:
    controller = make_controller(R0, recovery=RECOVERY)
    controller.handle(lost(R0), 0.0)
    assert postponement(submit(controller, make_request([1]))) == (
        f"no replica can take the request: {controller.why_none}"
    )
    tick(controller, 0.0)
    controller.handle(register(R0, life=1), 1.0)
    assert placement(submit(controller, make_request([1]), 1.0)) == "r0"


def test_a_report_of_another_life_is_answered_with_a_question_or_not_at_all() -> None:
    controller = make_controller(R0, recovery=RECOVERY)
    controller.handle(register(R0, life=5), 0.0)  # Lives 1 to 4 were never seen.
    request = make_request([1])
    submit(controller, request)
    for life in (0, 3):
        assert controller.handle(report(R0, request, life=life), 0.0) == []
    assert asks(controller.handle(report(R0, request, life=6), 0.0)) == [("r0", 6, True)]
    assert asks(controller.handle(report(R1, request, life=2), 0.0)) == [("r1", 2, True)]
    assert controller.num_requests(R0) == 1
    controller.handle(lost(R0, life=5), 0.0)
    for life in (3, 5):
        assert controller.handle(report(R0, life=life), 0.0) == []
    assert asks(controller.handle(report(R0, life=6), 0.0)) == [("r0", 6, True)]
    controller.handle(EndDeployment("down"), 0.0)
    assert controller.handle(report(R0, life=6), 0.0) == []


def test_what_an_older_life_says_or_what_is_said_of_it_changes_nothing() -> None:
    controller = make_controller()
    controller.handle(register(R0, life=5), 0.0)
    told = inventory(serve(make_request([1])))
    assert controller.handle(register(R0, life=3, inventory=told), 0.0) == []
    assert controller.handle(lost(R0, life=3), 0.0) == []
    assert controller.handle(lost(R0, life=6), 0.0) == []
    assert (controller.replicas, controller.num_requests(R0)) == ({R0: 5}, 0)


# --- doubts -----------------------------------------------------------------------------------


def test_a_replica_that_a_consumer_holds_for_lost_is_asked_and_spared_until_it_answers() -> None:
    controller = make_controller(R0, R1)
    request = make_request([1], attempt=1)
    ask, assigned, placed = submit(controller, request, 3.0, lost_at=(R0, 0))
    assert asks([ask]) == [("r0", 0, True)]
    assert placement([assigned, placed]) == "r1"
    check_books(controller)
    for number in range(3):
        assert placement(submit(controller, make_request([2], request_id=f"x{number}"))) == "r1"
    # It is asked again until it says something.
    controller.handle(report(R1), 3.0)
    assert [asks(tick(controller, now)) for now in (3.5, 4.0, 4.5, 5.0)] == [
        [],
        [("r0", 0, True)],
        [],
        [("r0", 0, True)],
    ]
    controller.handle(report(R0), 5.5)
    check_books(controller)
    assert tick(controller, 7.0) == []
    assert placement(submit(controller, make_request([3], request_id="y"))) == "r0"


def test_an_inventory_ends_a_doubt_as_well() -> None:
    controller = make_controller(R0, R1)
    submit(controller, make_request([1], attempt=1), lost_at=(R0, 0))
    controller.handle(register(R0, inventory=inventory(number=1)), 0.5)
    check_books(controller)
    assert tick(controller, 2.0) == []
    assert placement(submit(controller, make_request([3], request_id="y"))) == "r0"


def test_a_doubt_of_a_replica_that_is_doubted_or_lives_anew_asks_nothing() -> None:
    controller = make_controller(R0, R1)
    controller.handle(register(R0, life=1), 0.0)
    controller.handle(lost(R1), 0.0)
    sources = [(R0, 0), (R0, 2), (R1, 0)]
    for number, source in enumerate(sources):
        request = make_request([1], request_id=f"q{number}")
        assigned, placed = submit(controller, request, lost_at=source)
        assert placement([assigned, placed]) == "r0"
    assert controller.fleet.doubted == set()
    for number, length in enumerate([2, 1]):
        request = make_request([1], request_id=f"x{number}")
        assert len(submit(controller, request, lost_at=(R0, 1))) == length
    assert controller.fleet.doubted == {R0}


def test_where_all_are_doubted_a_request_waits_for_an_answer() -> None:
    controller = make_controller(R0)
    request = make_request([1], attempt=1)
    ask, rejected = submit(controller, request, lost_at=(R0, 0))
    assert asks([ask]) == [("r0", 0, True)]
    assert isinstance(rejected, Rejected)
    assert (str(rejected.error), rejected.retry_after_s) == (
        "no replica can take the request: r0 cannot be given it now: it waits for an answer",
        0.25,
    )


def test_a_doubt_is_told_with_whatever_else_a_submission_brings() -> None:
    controller = make_controller(R0, R1)
    request = make_request([1])
    first = submit(controller, request)
    again = submit(controller, request, lost_at=(R1, 0))
    assert asks(again[:1]) == [("r1", 0, True)]
    assert again[1:] == first
    controller.handle(report(R1), 0.0)
    controller.handle(report(R0, request), 0.0)
    ended = submit(controller, request, lost_at=(R1, 0), is_repeated=True)
    assert asks(ended[:1]) == [("r1", 0, True)]
    assert ended[1:] == first[1:]
    controller.handle(report(R1, sequence=1), 0.0)
    unable = submit(controller, make_request([1], seed=None, request_id="q1"), lost_at=(R1, 0))
    assert asks(unable[:1]) == [("r1", 0, True)]
    assert isinstance(unable[1], Rejected)


# --- questions --------------------------------------------------------------------------------


def test_a_replica_with_requests_is_asked_when_it_is_silent_and_an_idle_one_is_not() -> None:
    controller = make_controller(R0)
    assert tick(controller, 100.0) == []
    assert controller.next_tick is None
    controller = make_controller(R0)
    request = make_request([1])
    submit(controller, request, 10.0)
    controller.handle(report(R0), 10.0)
    assert (tick(controller, 14.9), controller.next_tick) == ([], 15.9)
    assert asks(tick(controller, 15.0)) == [("r0", 0, False)]
    assert (tick(controller, 15.9), asks(tick(controller, 16.0))) == ([], [("r0", 0, False)])
    controller.handle(report(R0, request, sequence=1), 16.5)
    assert (tick(controller, 99.0), controller.next_tick) == ([], None)


def test_the_books_of_a_busy_replica_are_compared_with_its_own_at_intervals() -> None:
    controller = make_controller(R0)
    request = make_request([1])
    submit(controller, request)
    told = []
    for second in range(70):
        controller.handle(report(R0, sequence=second), float(second))
        for command in tick(controller, float(second)):
            told.append((second, *asks([command])))
            answer = inventory(
                serve(request), number=number_of([command]), keys=None, num_reports=second + 1
            )
            controller.handle(register(R0, inventory=answer), float(second))
    assert told == [(30, ("r0", 0, False)), (60, ("r0", 0, False))]


def test_a_gap_in_the_reports_is_asked_about_until_it_is_closed() -> None:
    controller = make_controller(R0)
    request = make_request(range(9))
    submit(controller, request)
    assert controller.handle(report(R0, request, sequence=1), 0.0) == []
    assert controller.num_requests(R0) == 1
    assert asks(tick(controller, 0.0)) == [("r0", 0, True)]
    assert (tick(controller, 0.9), asks(tick(controller, 1.0))) == ([], [("r0", 0, True)])
    controller.handle(report(R0, sequence=0), 1.5)
    assert controller.num_requests(R0) == 0
    assert tick(controller, 3.0) == []
    assert controller.fleet.placement.held_keys(R0) == set(prompt_keys(request, SCOPE))


# --- trials -----------------------------------------------------------------------------------


def test_a_suspect_is_tried_where_no_other_is() -> None:
    controller = make_controller(R0, R1)
    suspects = [make_request([i], request_id=f"q{i}", attempt=1) for i in range(3)]
    suspects = [with_attempt(one, 1, num_deaths=1) for one in suspects]
    for number, name in enumerate(["r0", "r1"]):
        other = make_request([5], request_id=f"x{number}")
        assert placement(submit(controller, other)) == name
    commands = [submit(controller, one) for one in suspects]
    assert [placement(each) for each in commands[:2]] == ["r0", "r1"]
    placed = commands[0][-1]
    assert isinstance(placed, Placed)
    assert placed.on_trial
    assert postponement(commands[2]) == (
        "no replica can take the request: r0, r1 cannot be given it now: "
        "it waits for its turn to be tried"
    )
    # Others go there meanwhile, and are not on trial.
    _assigned, placed = submit(controller, make_request([7], request_id="x2"))
    assert isinstance(placed, Placed)
    assert not placed.on_trial
    controller.handle(report(R1, prefilled=[suspects[1]]), 0.0)
    assert placement(submit(controller, suspects[2])) == "r1"


SEARCH = make_request([0], request_id="q0", beam_width=2)
BEYOND = dataclasses.replace(
    make_request([0], request_id="q0"), delivered=(DeliveredSample(0, (7,)),)
)


@pytest.mark.parametrize("request_", [SEARCH, BEYOND], ids=["search", "had tokens before"])
def test_a_trial_that_a_token_does_not_decide_lasts_to_the_end(request_: Request) -> None:
    """A search hands none out; whoever ends replicas after a token may be about to."""
    controller = make_controller(R0)
    first = with_attempt(request_, 1, num_deaths=1)
    second = with_attempt(make_request([1], request_id="q1"), 1, num_deaths=1)
    submit(controller, first)
    controller.handle(report(R0, with_attempt(first, 0), prefilled=[first]), 0.0)
    assert "its turn to be tried" in postponement(submit(controller, second))
    controller.handle(report(R0, first, sequence=1), 0.0)
    assert placement(submit(controller, second)) == "r0"


def test_a_trial_ends_with_the_request() -> None:
    controller = make_controller(R0)
    first, second = (
        with_attempt(make_request([i], request_id=f"q{i}"), 1, num_deaths=1) for i in range(2)
    )
    submit(controller, first)
    controller.handle(report(R0, with_attempt(first, 0), prefilled=[with_attempt(first, 0)]), 0.0)
    assert "its turn to be tried" in postponement(submit(controller, second))
    controller.handle(report(R0, first, sequence=1), 0.0)
    assert placement(submit(controller, second)) == "r0"


# --- ends -------------------------------------------------------------------------------------


def test_a_submission_that_is_repeated_after_the_end_is_answered_with_where_it_was() -> None:
    controller = make_controller(R0)
    request = make_request([1])
    _assigned, placed = submit(controller, request)
    controller.handle(report(R0, request), 0.0)
    assert submit(controller, request, is_repeated=True) == [placed]
    assert controller.num_requests(R0) == 0
    # Another attempt is another matter, and so is another life.
    assert placement(submit(controller, with_attempt(request, 1), is_repeated=True)) == "r0"
    controller.handle(register(R0, life=1), 0.0)
    assert len(submit(controller, request, is_repeated=True)) == 2
    controller.handle(lost(R0, life=1), 0.0)
    assert isinstance(refusal(submit(controller, request, is_repeated=True)), NoReplicaError)


def test_the_places_of_the_last_4096_that_ended_are_remembered() -> None:
    controller = make_controller(R0)
    requests = [make_request([1], request_id=f"q{number}") for number in range(4097)]
    for number, request in enumerate(requests):
        submit(controller, request)
        controller.handle(report(R0, request, sequence=number), 0.0)
    lengths = [len(submit(controller, one, is_repeated=True)) for one in requests[:2]]
    assert lengths == [2, 1], "the first is placed anew"


@pytest.mark.parametrize("starting", [False, True])
def test_the_end_of_a_deployment_ends_all_that_lives_or_starts(starting: bool) -> None:
    controller = make_controller(R0, R1, lease_s=30.0, recovery=RECOVERY)
    tick(controller, 0.0)
    if starting:
        controller.handle(lost(R1), 0.0)
        tick(controller, 0.0)
    why = "the deployment ended: down"
    commands = controller.handle(EndDeployment("down"), 1.0)
    stops = [command for command in commands if isinstance(command, StopReplica)]
    assert stops == [
        StopReplica(R0, Incarnation(0), why),
        StopReplica(R1, Incarnation(int(starting)), why),
    ]
    assert sum(isinstance(command, ReplicaLost) for command in commands) == 2 - starting
    assert commands[-1] == TakeDown("down")
    assert controller.why_none == "the deployment is being taken down"
    assert (controller.is_hopeful, controller.next_tick) == (False, None)
    assert [tick(controller, now) for now in (20.0, 999.0)] == [[], []]
