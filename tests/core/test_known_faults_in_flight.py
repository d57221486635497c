"""Known faults of other runtimes: steps in flight while requests end. Ids are those of the docs.

The numbers are the cases' own. "Free" is FREE + CACHED.
"""

import itertools

import pytest
from batcher_driver import BatcherDriver
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.replica_messages import (
    CancelRequest,
    FenceReplica,
    ReplicaEvent,
    StepFailed,
)
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.sim.fingerprint_rank import oracle


def stopped_after(num_outputs: int, request: Request) -> Request:
    """Return the request with a stop id that ends it after so many tokens."""
    tokens = oracle(request, make_limits()).token_ids
    stop = tokens[num_outputs - 1]
    assert stop not in tokens[: num_outputs - 1]
    return make_request(
        request.prompt_token_ids,
        request.params.max_tokens,
        request_id=request.request_id,
        stop_token_ids=(stop,),
    )


def test_b18_a_plain_request_under_overlap_takes_no_slot_for_its_last_token() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64, block_size=1), pipeline_depth=2)
    request = make_request(range(5), 7)
    stream = driver.submit(request)
    most = 0
    while driver.plan is not None:
        most = max(most, driver.replica.kv.pool.num_held)
        driver.step()
    driver.run()
    assert most == 5 + 7 - 1
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert driver.num_free == 64


@pytest.mark.parametrize("num_outputs", range(1, 8))
@pytest.mark.parametrize("ends", ["stop", "abort"])
def test_b18_each_slot_is_freed_once_however_a_request_ends(num_outputs: int, ends: str) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64, block_size=1), pipeline_depth=2)
    request = make_request(range(5), 7)
    if ends == "stop":
        request = stopped_after(num_outputs, request)
    stream = driver.submit(request)
    pool = driver.replica.kv.pool
    most = 0
    while driver.plan is not None:
        most = max(most, pool.num_held)
        driver.step()
        live = driver.replica.sequences
        if ends == "abort" and live and live[0].num_outputs == num_outputs:
            driver.cancel(request)
            assert pool.num_held > 0, "a step in flight still writes them"
    driver.run()
    # A step that was planned before the end was known takes one slot more, and no step a second.
    assert most <= 12
    assert driver.num_free == 64
    if ends == "stop":
        assert most == min(5 + num_outputs, 11)
    if ends == "stop" or num_outputs == 7:
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
    else:
        assert (stream.finish, len(stream.token_ids)) == (FinishReason.CANCELLED, num_outputs)


@pytest.mark.parametrize("num_outputs", range(1, 6))
def test_b18_each_slot_is_freed_once_when_a_request_is_preempted(num_outputs: int) -> None:
    request = make_request(range(5), 7)
    run = BatcherDriver(request, make_limits(num_blocks=64, block_size=1), pipeline_depth=2)
    while run.first.num_outputs < num_outputs:
        run.step()
    assert len(run.plans) == 1, "the next step is in flight, and still writes"
    with pytest.raises(AssertionError, match="being written"):
        run.batcher.preempt(run.first)
    run.finish_oldest()
    run.batcher.preempt(run.first)
    assert (run.pool.num_held, run.pool.num_available) == (0, 64)
    while run.first.finish is None:
        run.step()
    assert tuple(run.first.tokens[5:]) == oracle(request, run.limits).token_ids
    assert (run.pool.num_held, run.pool.num_available) == (0, 64)


# What is pending of a request here, instead of a receive and a send, are its two steps in flight.


@pytest.mark.parametrize("num_cancels", [1, 2])
@pytest.mark.parametrize("num_finished", [0, 1, 2])
def test_b24_blocks_come_back_once_when_all_that_is_in_flight_has_ended(
    num_finished: int, num_cancels: int
) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8), pipeline_depth=2)
    request = make_request(range(6), 9)
    stream = driver.submit(request)
    for _ in range(num_finished):
        driver.step()
    assert len(driver.plans) == 2
    for _ in range(num_cancels):
        driver.cancel(request)
    held = [driver.replica.kv.pool.num_held]
    while driver.step():
        held.append(driver.replica.kv.pool.num_held)
    assert held[:2] == [held[0]] * 2
    assert held[0] > 0
    assert held[2:] == [0]
    driver.run()
    assert (stream.finish, len(stream.token_ids)) == (FinishReason.CANCELLED, num_finished)
    (other,) = driver.generate(make_request(range(6), 3, request_id="other"))
    assert other.finish is FinishReason.LENGTH
    assert driver.num_free == 8


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_b24_notices_of_a_lost_executor_may_come_in_any_order_and_twice(
    order: tuple[int, ...],
) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8), pipeline_depth=2)
    request = make_request(range(6), 9)
    stream = driver.submit(request)
    first, second = (plan.step_id for plan in driver.plans)
    notices: list[ReplicaEvent] = [
        StepFailed(first, "gone"),
        StepFailed(second, "gone"),
        FenceReplica("gone"),
        CancelRequest(request.request_id, request.attempt),
    ]
    for index in order:
        driver.send(notices[index])
        driver.send(notices[index])
    driver.run()
    # A cancel holds, whether the replica or its loss comes first.
    assert stream.finish is FinishReason.CANCELLED
    assert driver.num_free == 8
    assert driver.replica.sequences == ()


def test_b25_blocks_that_a_ghost_step_writes_are_not_granted_before_it_retires() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=4), pipeline_depth=2)
    a = stopped_after(3, make_request(range(5), 9, request_id="a"))
    c = make_request(range(60, 70), 5, request_id="c")
    stream_a = driver.submit(a)
    driver.step()
    driver.step()
    (b,) = driver.sequence(a).table.block_ids[1:]
    stream_c = driver.submit(c)
    driver.step()  # N: a finishes, and N + 1, which was planned before, writes its slot in b.
    assert [s.request.request_id for s in driver.replica.sequences] == ["c"]
    ghost = driver.plans[0]
    assert ghost.num_computed.tolist() == [7]
    while driver.plans and driver.plans[0] is ghost:
        assert driver.replica.kv.pool.count(b) == 1
        assert driver.sequence(c).table.block_ids == []
        driver.step()
    assert len(driver.sequence(c).table.block_ids) == 3
    assert b in driver.sequence(c).table.block_ids
    driver.run()
    assert (stream_a.token_ids, stream_a.finish) == oracle(a, driver.limits)
    assert (stream_c.token_ids, stream_c.finish) == oracle(c, driver.limits)
    assert driver.num_free == 4


def test_a_draw_that_fails_after_its_stream_has_ended_fails_nobody() -> None:
    """A plan of several steps goes on past the end of one of its streams."""
    limits = make_limits(block_size=16)
    request = stopped_after(3, make_request([1, 2, 3], 12, seed=5))
    other = make_request([4, 5], 12, request_id="other", seed=6)
    driver = ReplicaDriver(limits, max_decode_steps=8, poison=[(5, 5)])
    for one, stream in zip((request, other), driver.generate(request, other), strict=True):
        assert (stream.token_ids, stream.finish) == oracle(one, limits)
    assert max(len(step) for step in driver.rank.history) == 2
    assert driver.num_free == 16
