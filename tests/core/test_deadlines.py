"""Requests that are given up when their time is over."""

import dataclasses

import pytest
from replica_driver import ReplicaDriver, Stream, make_limits, make_request

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.replica_messages import CancelRequest, FenceReplica, StepFinished
from rayserve_paged.core.request import FinishReason, Request, admit
from rayserve_paged.sim.fingerprint_rank import oracle


def timed(request: Request, deadline_s: float) -> Request:
    return dataclasses.replace(request, deadline_s=deadline_s)


def end_of(stream: Stream) -> tuple[FinishReason | None, str | None]:
    return stream.finish, stream.error


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_running_request_ends_at_its_deadline_with_what_it_has(pipeline_depth: int) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), pipeline_depth=pipeline_depth)
    late = timed(make_request(range(5), 100, request_id="late"), 5.0)
    other = make_request(range(20, 25), 30, request_id="other")
    stream, other_stream = driver.submit(late), driver.submit(other)
    for _ in range(6):
        driver.step()
    driver.tick(4.9)
    assert len(driver.replica.sequences) == 2
    driver.tick(0.1)
    assert [s.request.request_id for s in driver.replica.sequences] == ["other"]
    for _ in range(2):
        driver.step()
    num_held = driver.replica.kv.pool.num_held
    assert num_held == len(driver.sequence(other).table.block_ids)
    driver.run()
    assert end_of(stream) == (FinishReason.DEADLINE, None)
    num_tokens = len(stream.token_ids)
    assert num_tokens >= 5
    assert stream.token_ids == oracle(late, driver.limits).token_ids[:num_tokens]
    assert other_stream.token_ids == oracle(other, driver.limits).token_ids
    assert driver.reports[-1].finished == (("other", 0),)


def test_any_event_after_the_deadline_ends_it_and_what_the_step_brought_counts() -> None:
    driver = ReplicaDriver(make_limits())
    request = timed(make_request(range(5), 40), 5.0)
    stream = driver.submit(request)
    driver.step()
    driver.now = 6.0
    driver.send(StepFinished(driver.execute()))
    assert driver.plan is None
    assert driver.num_free == 16
    driver.poll()
    assert end_of(stream) == (FinishReason.DEADLINE, None)
    assert len(stream.token_ids) == 2


def test_a_request_that_waits_ends_at_its_deadline_and_the_next_one_starts() -> None:
    driver = ReplicaDriver(make_limits(), max_num_seqs=1)
    driver.submit(make_request(range(5), 30, request_id="long"))
    waits = timed(make_request(range(6), 4, request_id="waits"), 1.0)
    behind = make_request(range(7), 4, request_id="behind")
    stream, behind_stream = driver.submit(waits), driver.submit(behind)
    driver.tick(1.0)
    assert [s.request.request_id for s in driver.replica.sequences] == ["long", "behind"]
    assert driver.replica.batcher.num_waiting == 1
    driver.run()
    assert end_of(stream) == (FinishReason.DEADLINE, None)
    assert stream.token_ids == ()
    assert behind_stream.token_ids == oracle(behind, driver.limits).token_ids


def test_all_samples_of_a_request_end_at_its_deadline_born_or_not() -> None:
    for num_steps in (0, 3):
        driver = ReplicaDriver(make_limits(num_blocks=64))
        request = timed(make_request(range(5), 40, n=3), 2.0)
        driver.submit(request)
        for _ in range(num_steps):
            driver.step()
        driver.tick(2.0)
        driver.run()
        for sibling in range(3):
            stream = driver.reader().stream(request, sibling)
            assert end_of(stream) == (FinishReason.DEADLINE, None)
            assert len(stream.token_ids) == num_steps
        assert driver.num_free == 64


def test_a_request_that_ends_before_its_deadline_leaves_nothing_to_wait_for() -> None:
    driver = ReplicaDriver(make_limits(), max_decode_steps=8)
    request = timed(make_request(range(5), 4), 3.0)
    stream = driver.submit(request)
    assert driver.replica.next_tick == 3.0
    driver.run()
    assert end_of(stream) == (FinishReason.LENGTH, None)
    assert driver.replica.next_tick != 3.0
    # The same name again, without a deadline, is not ended by the old one.
    again = dataclasses.replace(request, deadline_s=None)
    stream = driver.submit(again)
    driver.tick(9.0)
    driver.run()
    assert end_of(stream) == (FinishReason.LENGTH, None)


def test_several_steps_are_planned_at_once_only_where_no_deadline_can_come_between() -> None:
    driver = ReplicaDriver(make_limits(), max_decode_steps=8)
    timed_one = timed(make_request(range(5), 20), 3.0)
    driver.submit(timed_one)
    for _ in range(4):
        assert driver.plan is not None
        assert driver.plan.num_steps == 1
        driver.step()
    driver.send(CancelRequest(timed_one.request_id, timed_one.attempt))
    driver.run()
    driver.submit(make_request(range(5), 20, request_id="q1"))
    driver.step()
    assert driver.plan is not None
    assert driver.plan.num_steps > 1


def test_a_replica_that_is_lost_forgets_its_deadlines() -> None:
    driver = ReplicaDriver(make_limits())
    requests = [timed(make_request(range(5), 20, request_id=f"q{i}"), 3.0) for i in range(2)]
    streams = [driver.submit(requests[0])]
    driver.send(FenceReplica("a rank died"))
    driver.tick(3.0)
    streams.append(driver.submit(requests[1]))
    driver.tick(3.0)
    driver.poll()
    assert [end_of(stream) for stream in streams] == [(None, None)] * 2
    assert all(driver.goes_on(request) for request in requests)


@pytest.mark.parametrize("deadline_s", [0, 0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_deadline_that_is_no_time_ahead_is_refused(deadline_s: float) -> None:
    with pytest.raises(InvalidInputError, match=r"deadline_s=.* a number of seconds above 0"):
        admit(timed(make_request([1]), deadline_s), make_limits())
