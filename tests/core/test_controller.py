import dataclasses

from controller_driver import (
    LIMITS,
    R0,
    R1,
    SCOPE,
    lost,
    make_controller,
    placement,
    postponement,
    refusal,
    register,
    report,
    submit,
    to_replica,
)
from replica_driver import make_request, prompt_keys

from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.controller_messages import (
    EndDeployment,
    LoseReplica,
    Placed,
    RenewLease,
    ReplicaLost,
    SendToReplica,
    StopReplica,
    TakeDown,
    WithdrawRequest,
)
from rayserve_paged.core.errors import (
    CapacityError,
    DuplicateRequestError,
    InvalidInputError,
    NoReplicaError,
)
from rayserve_paged.core.ids import Attempt, ConsumerId, Incarnation, RequestId
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    FenceReplica,
    RegisterReplica,
    Tick,
)


def test_a_request_is_assigned_with_its_keys_and_clamped_and_then_its_consumer_is_told() -> None:
    controller = make_controller(R0)
    request = make_request(range(9), None)
    clamped = dataclasses.replace(
        request, params=dataclasses.replace(request.params, max_tokens=56)
    )
    assert submit(controller, request) == [
        to_replica(R0, AssignRequest(clamped, prompt_keys(request, SCOPE))),
        Placed(RequestId("q0"), Attempt(0), R0, Incarnation(0), 56),
    ]
    assert controller.num_requests(R0) == 1
    assert controller.num_pending_tokens(R0) == 9 + 56


def test_requests_go_where_their_prefix_is_unless_too_much_waits_there() -> None:
    controller = make_controller(R0, R1)
    first = make_request(range(9), 2, request_id="a")
    assert placement(submit(controller, first)) == "r0"
    assert placement(submit(controller, make_request([5], 2, request_id="b"))) == "r1"
    controller.handle(report(R0, first), 0.0)
    # Both have an equal share in what was done of late, and r0 is idle.
    assert placement(submit(controller, make_request([6], 50, request_id="c"))) == "r0"
    # 8 tokens are saved there, which are worth 32: as much as half a sequence.
    same = make_request(range(12), 2, request_id="d")
    assert placement(submit(controller, same)) == "r0"
    assert placement(submit(controller, make_request(range(12), 2, request_id="e"))) == "r1"


def test_a_tenant_is_not_drawn_to_the_blocks_of_another() -> None:
    controller = make_controller(R0, R1)
    first = make_request(range(40), 2, request_id="a")
    submit(controller, first)
    controller.handle(report(R0, first), 0.0)
    other = make_request(range(40), 2, request_id="b", tenant_salt="t")
    assert placement(submit(controller, other)) == "r1"
    same = make_request(range(40), 2, request_id="c")
    assert placement(submit(controller, same)) == "r0"


def test_a_smaller_replica_takes_what_it_can_hold() -> None:
    controller = make_controller(R0)
    small = dataclasses.replace(LIMITS, num_blocks=15)
    controller.handle(register(R1, limits=small), 0.0)
    assert controller.limits == LIMITS
    assert placement(submit(controller, make_request([1] * 20, 2, request_id="a"))) == "r0"
    assert placement(submit(controller, make_request([2] * 20, 2, request_id="b"))) == "r1"
    assert placement(submit(controller, make_request([3] * 60, 2, request_id="c"))) == "r0"
    assert placement(submit(controller, make_request([4] * 60, 1, request_id="d"))) == "r1"


def test_what_no_replica_can_hold_is_refused_with_the_numbers() -> None:
    controller = make_controller(R0)
    error = refusal(submit(controller, make_request([1] * 60, 6)))
    assert isinstance(error, CapacityError)
    assert (error.num_blocks_needed, error.num_blocks) == (17, 16)
    assert controller.num_requests(R0) == 0


def test_what_a_replica_that_is_started_again_can_hold_waits_for_it() -> None:
    large, small = make_request([1] * 60, 2), make_request([1] * 56, 2, request_id="q1")
    controller = make_controller(recovery=RecoveryConfig())
    less = dataclasses.replace(LIMITS, num_blocks=15)
    for name, life, limits in [(R1, 0, less), (R0, 0, LIMITS)]:
        assert controller.handle(register(name, life, limits), 0.0) == []
    controller.handle(lost(R0), 0.0)
    controller.handle(register(R1, 1, less), 0.0)
    assert postponement(submit(controller, large)) == (
        "no replica can take the request: "
        "r0 is lost: a rank is silent (it is being started again); "
        "r1 is lost: replaced by a restart"
    )
    assert placement(submit(controller, small)) == "r1"
    error = refusal(submit(controller, make_request([1] * 60, 6)))
    assert isinstance(error, CapacityError)
    assert (error.num_blocks_needed, error.num_blocks) == (17, 16)


def test_what_only_a_replica_that_stays_lost_could_hold_is_refused() -> None:
    controller = make_controller(R0)
    controller.handle(register(R1, limits=dataclasses.replace(LIMITS, num_blocks=15)), 0.0)
    controller.handle(lost(R0), 0.0)
    error = refusal(submit(controller, make_request([1] * 60, 2)))
    assert isinstance(error, CapacityError)
    assert (error.num_blocks_needed, error.num_blocks) == (16, 15)


def test_a_request_without_a_seed_is_refused() -> None:
    error = refusal(submit(make_controller(R0), make_request([1], seed=None)))
    assert isinstance(error, InvalidInputError)
    assert error.field == "seed"


def test_without_a_replica_the_reason_is_told() -> None:
    controller = make_controller()
    request = make_request([1])
    assert "none has registered yet" in str(refusal(submit(controller, request)))
    controller.handle(register(R0), 0.0)
    controller.handle(LoseReplica(R0, Incarnation(0), "rank 1 is silent"), 0.0)
    error = refusal(submit(controller, request))
    assert isinstance(error, NoReplicaError)
    assert "r0 is lost: rank 1 is silent" in str(error)


def test_a_submission_that_comes_twice_is_placed_once() -> None:
    controller = make_controller(R0, R1)
    request = make_request([1])
    first = submit(controller, request)
    # Its assignment may have been lost as well as the answer.
    assert submit(controller, request) == first
    assert controller.num_requests(R0) == 1


def test_a_submission_that_comes_again_is_given_the_time_that_is_left() -> None:
    controller = make_controller(R0)
    request = dataclasses.replace(make_request([1]), deadline_s=10.0)
    _assigned, placed = submit(controller, request)
    again = dataclasses.replace(request, deadline_s=6.0)
    assignment = AssignRequest(again, prompt_keys(request, SCOPE))
    assert submit(controller, again) == [to_replica(R0, assignment), placed]


def test_another_request_under_a_name_in_use_is_refused() -> None:
    controller = make_controller(R0)
    request = make_request([1], attempt=1)
    submit(controller, request)
    others = [
        dataclasses.replace(request, priority=3),
        dataclasses.replace(request, consumer_id=ConsumerId("another")),
        dataclasses.replace(request, attempt=Attempt(0)),
        dataclasses.replace(request, attempt=Attempt(2), consumer_id=ConsumerId("another")),
    ]
    for other in others:
        error = refusal(submit(controller, other))
        assert isinstance(error, DuplicateRequestError)
    assert controller.fleet.booked[request.request_id].attempt == 1


def test_the_next_attempt_of_a_request_takes_the_place_of_the_one_before() -> None:
    controller = make_controller(R0)
    request = make_request([1])
    submit(controller, request)
    later = dataclasses.replace(request, attempt=Attempt(1))
    assert submit(controller, later) == [
        to_replica(R0, CancelRequest(request.request_id, request.attempt)),
        to_replica(R0, AssignRequest(later, prompt_keys(later, SCOPE))),
        Placed(request.request_id, Attempt(1), R0, Incarnation(0), 4),
    ]
    assert (controller.num_requests(R0), controller.num_pending_tokens(R0)) == (1, 1 + 4)


def test_a_withdrawal_goes_to_the_replica_and_the_books_wait_for_its_report() -> None:
    controller = make_controller(R0)
    request = make_request([1])
    submit(controller, request)
    event = WithdrawRequest(request.request_id, request.attempt)
    cancel = CancelRequest(request.request_id, request.attempt)
    assert controller.handle(event, 0.0) == [to_replica(R0, cancel)]
    assert controller.num_requests(R0) == 1
    controller.handle(report(R0, request), 0.0)
    assert (controller.num_requests(R0), controller.num_pending_tokens(R0)) == (0, 0)
    assert controller.handle(event, 0.0) == []


def test_a_report_that_comes_twice_counts_once() -> None:
    controller = make_controller(R0)
    request = make_request([1])
    submit(controller, request)
    first = report(R0, request)
    controller.handle(first, 0.0)
    submit(controller, request)  # The name is free again, and taken by a new request.
    controller.handle(first, 0.0)
    assert controller.num_requests(R0) == 1


def test_a_prompt_that_is_computed_is_not_queued_any_more() -> None:
    controller = make_controller(R0)
    request = make_request(range(9), 4, attempt=1)
    submit(controller, request)
    other = dataclasses.replace(request, request_id=RequestId("other"))
    older = dataclasses.replace(request, attempt=Attempt(0))
    controller.handle(report(R0, prefilled=[other, older]), 0.0)
    assert controller.num_queued_tokens(R0) == 9
    controller.handle(report(R0, other, sequence=1, prefilled=[request]), 0.0)
    assert (controller.num_queued_tokens(R0), controller.num_pending_tokens(R0)) == (0, 13)


def test_a_report_of_another_life_or_attempt_changes_nothing() -> None:
    controller = make_controller(R0)
    request = make_request([1], attempt=1)
    submit(controller, request)
    controller.handle(report(R0, dataclasses.replace(request, attempt=Attempt(0))), 0.0)
    controller.handle(report(R0, request, life=1, sequence=1), 0.0)
    controller.handle(report(R1, request), 0.0)
    assert controller.num_requests(R0) == 1


# --- lives and deaths -------------------------------------------------------------------------


def test_a_lost_replica_is_fenced_and_stopped_and_its_consumers_are_told() -> None:
    controller = make_controller(R0)
    for name, consumer in (("a", "c2"), ("b", "c1"), ("c", "c2")):
        submit(controller, make_request([1], request_id=name, consumer_id=consumer))
    commands = controller.handle(LoseReplica(R0, Incarnation(0), "silent"), 0.0)
    assert commands == [
        to_replica(R0, FenceReplica("silent")),
        ReplicaLost(R0, Incarnation(0), "silent", (ConsumerId("c1"), ConsumerId("c2"))),
        StopReplica(R0, Incarnation(0), "silent"),
    ]
    assert controller.replicas == {}
    assert controller.handle(LoseReplica(R0, Incarnation(0), "silent"), 0.0) == []


def test_a_replica_that_reports_its_fence_is_lost() -> None:
    controller = make_controller(R0)
    commands = controller.handle(report(R0, fenced="step 3 failed"), 0.0)
    assert commands[-1] == StopReplica(R0, Incarnation(0), "step 3 failed")
    assert controller.replicas == {}


def test_names_of_a_lost_replica_can_be_used_again() -> None:
    controller = make_controller(R0)
    request = make_request([1])
    submit(controller, request)
    controller.handle(LoseReplica(R0, Incarnation(0), "silent"), 0.0)
    controller.handle(register(R0, life=1), 0.0)
    commands = submit(controller, dataclasses.replace(request, attempt=Attempt(1)))
    assert placement(commands) == "r0"
    assert controller.num_requests(R0) == 1


def test_a_new_life_replaces_the_old_one() -> None:
    controller = make_controller(R0)
    submit(controller, make_request([1]))
    commands = controller.handle(register(R0, life=1), 0.0)
    assert [type(command) for command in commands] == [SendToReplica, ReplicaLost, StopReplica]
    assert controller.replicas == {R0: 1}
    assert controller.num_requests(R0) == 0


def test_a_life_that_was_lost_does_not_come_back() -> None:
    controller = make_controller(R0)
    controller.handle(LoseReplica(R0, Incarnation(0), "silent"), 0.0)
    assert controller.handle(register(R0), 0.0) == [StopReplica(R0, Incarnation(0), "silent")]
    assert controller.replicas == {}
    assert controller.handle(register(R0, life=1), 0.0) == []


def test_a_new_life_has_no_cached_blocks_until_it_reports() -> None:
    controller = make_controller(R0, R1)
    request = make_request(range(9), 2)
    submit(controller, request)
    controller.handle(report(R0, request), 0.0)
    controller.handle(register(R0, life=1), 0.0)
    submit(controller, make_request([5], 2, request_id="load"))
    assert placement(submit(controller, request)) == "r1"


def test_a_replica_of_another_scope_is_stopped() -> None:
    controller = make_controller(R0)
    other = dataclasses.replace(SCOPE, dtype="bf16")
    (stop,) = controller.handle(RegisterReplica(R1, Incarnation(0), LIMITS, other), 0.0)
    assert isinstance(stop, StopReplica)
    assert "its KV differs from the deployment's" in stop.reason
    assert controller.replicas == {R0: 0}


# --- the deployment ---------------------------------------------------------------------------


def test_a_deployment_ends_when_its_owner_stops_renewing() -> None:
    controller = make_controller(R0, lease_s=30.0)
    controller.handle(Tick(), 100.0)
    assert controller.handle(Tick(), 129.0) == []
    controller.handle(RenewLease("driver"), 129.0)
    assert controller.handle(Tick(), 158.0) == []
    commands = controller.handle(Tick(), 159.0)
    assert isinstance(commands[-1], TakeDown)
    assert "has not renewed the lease for 30 s" in commands[-1].reason
    assert any(isinstance(command, StopReplica) for command in commands)
    assert controller.handle(Tick(), 999.0) == []


def test_the_next_tick_is_no_later_than_the_end_of_the_lease() -> None:
    controller = make_controller(R0, lease_s=30.0)
    assert controller.next_tick == float("-inf"), "the lease begins with the first tick"
    controller.handle(Tick(), 100.0)
    assert controller.next_tick == 130.0
    controller.handle(RenewLease("driver"), 110.0)
    assert controller.next_tick == 140.0
    submit(controller, make_request([1]))
    assert controller.next_tick == 101.0


def test_a_deployment_without_a_lease_lives_on() -> None:
    controller = make_controller(R0)
    controller.handle(Tick(), 0.0)
    assert controller.handle(Tick(), 1e9) == []


def test_an_ended_deployment_takes_neither_requests_nor_replicas() -> None:
    controller = make_controller(R0)
    commands = controller.handle(EndDeployment("down"), 0.0)
    assert commands[-1] == TakeDown("down")
    assert controller.handle(EndDeployment("down"), 0.0) == []
    assert "being taken down" in str(refusal(submit(controller, make_request([1]))))
    (stop,) = controller.handle(register(R1), 0.0)
    assert isinstance(stop, StopReplica)
    assert controller.replicas == {}
