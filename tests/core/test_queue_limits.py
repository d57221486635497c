"""Submissions that are refused because as much waits as may wait."""

import pytest
from replica_driver import ReplicaDriver, make_limits, make_report, make_request, make_scope

from rayserve_paged.core.config import BatchConfig
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import (
    Placed,
    Rejected,
    SendToReplica,
    SubmitRequest,
)
from rayserve_paged.core.errors import OverloadedError
from rayserve_paged.core.ids import Incarnation, ReplicaId
from rayserve_paged.core.replica_messages import RegisterReplica
from rayserve_paged.core.request import Request
from rayserve_paged.sim.fingerprint_rank import oracle

LIMITS = make_limits(num_blocks=64, max_num_seqs=2)
R0, R1 = ReplicaId("r0"), ReplicaId("r1")


def make_controller(*names: ReplicaId, **limits: int) -> Controller:
    controller = Controller(None, BatchConfig.model_validate({"max_num_seqs": 2, **limits}))
    for name in names:
        controller.handle(RegisterReplica(name, Incarnation(0), LIMITS, make_scope()), 0.0)
    return controller


def submit(controller: Controller, request: Request) -> str | OverloadedError:
    """The replica that takes it, or the refusal."""
    *_sent, answer = controller.handle(SubmitRequest(request), 0.0)
    if isinstance(answer, Placed):
        return answer.replica_id
    assert isinstance(answer, Rejected)
    assert isinstance(answer.error, OverloadedError)
    return answer.error


def named(index: int, num_prompt: int = 4, n: int = 1) -> Request:
    return make_request([index] * num_prompt, 4, request_id=f"q{index}", n=n)


def finish(controller: Controller, sequence: int, now: float, *finished: Request) -> None:
    report = make_report(R0, *finished, sequence=sequence)
    assert controller.handle(report, now) == []


def test_what_would_wait_beyond_the_limit_is_refused_with_the_numbers() -> None:
    controller = make_controller(R0, max_num_waiting=1)
    for i in range(3):
        assert submit(controller, named(i)) == "r0"
    refused = submit(controller, named(3))
    assert isinstance(refused, OverloadedError)
    assert refused.args == (1, 1, 24, None, None)
    assert controller.num_requests(R0) == 3


def test_all_samples_of_a_request_count() -> None:
    controller = make_controller(R0, max_num_waiting=1)
    assert submit(controller, named(0, n=2)) == "r0"
    assert isinstance(submit(controller, named(1, n=2)), OverloadedError)
    assert submit(controller, named(2)) == "r0"


def test_the_tokens_that_are_pending_are_bounded_and_an_idle_replica_takes_any_request() -> None:
    controller = make_controller(R0, max_pending_tokens=30)
    big = named(0, num_prompt=40)
    assert submit(controller, big) == "r0"
    refused = submit(controller, named(1))
    assert isinstance(refused, OverloadedError)
    assert refused.args == (0, None, 44, 30, None)
    finish(controller, 0, 1.0, big)
    for i in (1, 2, 3):
        assert submit(controller, named(i)) == "r0"
    assert isinstance(submit(controller, named(4)), OverloadedError)


def test_room_is_looked_for_on_every_replica_before_the_prefix_is() -> None:
    controller = make_controller(R0, R1, max_num_waiting=0)
    placed = [submit(controller, named(i)) for i in range(4)]
    assert sorted(map(str, placed)) == ["r0", "r0", "r1", "r1"]
    refused = submit(controller, named(4))
    assert isinstance(refused, OverloadedError)
    assert refused.num_waiting == 0


def test_an_end_makes_room_and_tells_how_soon_the_next_one_may_come() -> None:
    controller = make_controller(R0, max_num_waiting=0)
    requests = [named(i) for i in range(6)]
    for i in range(4):
        assert submit(controller, requests[i]) == "r0" if i < 2 else True
        if i >= 2:
            finish(controller, i - 2, 10.0 + 0.5 * i, requests[i - 2])
            assert submit(controller, requests[i]) == "r0"
    refused = submit(controller, requests[4])
    assert isinstance(refused, OverloadedError)
    assert refused.retry_after_s == 0.5


def test_a_submission_that_was_placed_is_answered_again_however_full_it_is() -> None:
    controller = make_controller(R0, max_num_waiting=0)
    requests = [named(0), named(1)]
    for request in requests:
        submit(controller, request)
    assert submit(controller, requests[0]) == "r0"


@pytest.mark.parametrize("num_refused", [1, 20])
def test_those_who_are_served_notice_nothing_of_those_who_are_refused(num_refused: int) -> None:
    controller = make_controller(R0, max_num_waiting=1)
    driver = ReplicaDriver(LIMITS, max_num_seqs=2)
    requests = [named(i) for i in range(3)]
    streams = []
    for request in requests:
        assert submit(controller, request) == "r0"
        streams.append(driver.submit(request))
    for i in range(3, 3 + num_refused):
        commands = controller.handle(SubmitRequest(named(i)), 0.0)
        assert not any(isinstance(command, SendToReplica) for command in commands)
        driver.step()
    driver.run()
    for request, stream in zip(requests, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, LIMITS)
