import dataclasses

import pytest
from replica_driver import (
    R0,
    TIMEOUTS,
    ReplicaDriver,
    make_limits,
    make_request,
    prompt_keys,
)

from rayserve_paged.core.delivered import DeliveredSample
from rayserve_paged.core.ids import Attempt, ConsumerId, StepId
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    FenceReplica,
    PollTokens,
    ReplicaReport,
    RunStep,
    StepFailed,
    StepFinished,
    Tick,
)
from rayserve_paged.core.replica_reports import REPORT_INTERVAL_S, ReportLog
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.step_messages import StepResult
from rayserve_paged.sim.fingerprint_rank import oracle


@pytest.fixture
def driver() -> ReplicaDriver:
    return ReplicaDriver(make_limits())


def finish_at(driver: ReplicaDriver, result: StepResult, now: float) -> None:
    driver.now = now
    driver.finish(result)


def test_an_idle_replica_starts_at_once_and_then_runs_one_step_at_a_time(
    driver: ReplicaDriver,
) -> None:
    assert driver.send(Tick()) == []
    driver.submit(make_request([1, 2], request_id="a"))
    assert driver.plan is not None
    driver.submit(make_request([3], request_id="b"))
    commands = driver.send(Tick())
    assert not any(isinstance(command, RunStep) for command in commands)
    commands = driver.send(StepFinished(driver.execute()))
    assert sum(isinstance(command, RunStep) for command in commands) == 1


def test_a_pending_poll_gets_each_token_with_the_step_that_made_it(driver: ReplicaDriver) -> None:
    request = make_request([1, 2], 3)
    stream = driver.submit(request)
    lengths = []
    while driver.plan is not None:
        driver.poll()
        driver.step()
        driver.read_answers()
        lengths.append(len(stream.token_ids))
    assert lengths == [1, 2, 3]
    assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)


def test_a_poll_with_nothing_to_say_is_answered_by_the_tick_that_ends_its_wait(
    driver: ReplicaDriver,
) -> None:
    assert driver.send(PollTokens(ConsumerId("c0"), 4, 0)) == []
    driver.tick(TIMEOUTS.poll_timeout_s - 0.1)
    assert driver.answers == []
    driver.tick(0.1)
    (answer,) = driver.answers
    assert (answer.consumer_id, answer.poll_id, answer.delivery.items) == ("c0", 4, ())


def test_a_live_request_that_is_assigned_again_runs_once(driver: ReplicaDriver) -> None:
    request = make_request([1, 2], 4)
    stream = driver.submit(request)
    for _ in range(2):
        driver.send(AssignRequest(request, prompt_keys(request, driver.scope)))
        driver.step()
    assert len(driver.replica.sequences) == 1
    driver.run()
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert sum(report.finished.count(("q0", 0)) for report in driver.reports) == 1


def test_a_cancel_ends_the_stream_at_once_and_the_blocks_with_the_step(
    driver: ReplicaDriver,
) -> None:
    request = make_request([1, 2], 9)
    stream = driver.submit(request)
    driver.step()
    driver.poll()
    driver.poll()
    driver.cancel(request)
    driver.read_answers()
    assert (stream.finish, stream.error) == (FinishReason.CANCELLED, "cancelled by its consumer")
    assert len(stream.token_ids) == 1
    assert driver.replica.kv.pool.num_held == 1
    driver.step()
    assert driver.replica.kv.pool.num_held == 0
    assert driver.plan is None


def test_a_cancel_of_a_waiting_request_leaves_no_trace(driver: ReplicaDriver) -> None:
    driver = ReplicaDriver(make_limits(), max_num_seqs=1)
    first, second = (make_request([i], 3, request_id=f"q{i}") for i in range(2))
    driver.submit(first)
    stream = driver.submit(second)
    driver.cancel(second)
    assert driver.replica.batcher.num_waiting == 0
    driver.run()
    assert (stream.finish, stream.token_ids) == (FinishReason.CANCELLED, ())
    assert all(len(step) == 1 for step in driver.rank.history)


def test_cancels_that_name_nothing_are_ignored(driver: ReplicaDriver) -> None:
    request = make_request([1], 3)
    stream = driver.submit(request)
    driver.send(CancelRequest(request.request_id, Attempt(1)))
    driver.send(CancelRequest(make_request([1], request_id="unknown").request_id, Attempt(0)))
    driver.run()
    driver.cancel(request)
    assert stream.finish is FinishReason.LENGTH


def test_a_name_is_free_again_while_the_cancelled_attempt_is_still_in_flight(
    driver: ReplicaDriver,
) -> None:
    old = make_request(range(9), 9)
    driver.submit(old)
    driver.step()
    driver.cancel(old)
    new = make_request(range(9), 5, attempt=1)
    stream = driver.submit(new)
    driver.run()
    assert (stream.token_ids, stream.finish) == oracle(new, driver.limits)
    finished = [name for report in driver.reports for name in report.finished]
    assert finished == [("q0", 0), ("q0", 1)]


def test_the_items_of_two_attempts_are_kept_apart(driver: ReplicaDriver) -> None:
    old = make_request(range(3), 9)
    driver.submit(old)
    driver.step()
    driver.step()
    driver.cancel(old)  # Two tokens and the end are owed, and nobody has polled.
    new = make_request(range(3), 2, attempt=1)
    driver.submit(new)
    driver.run()
    driver.answers.clear()
    commands = driver.send(PollTokens(ConsumerId("other"), 1, 0))
    assert commands == []
    stream = driver.reader().streams[new.request_id]
    assert (stream.token_ids, stream.finish) == oracle(new, driver.limits)


def test_a_consumer_that_does_not_poll_loses_its_requests_and_no_other_does(
    driver: ReplicaDriver,
) -> None:
    request = make_request([1], 30, request_id="gone", consumer_id="gone")
    gone = driver.submit(request)
    here = driver.submit(make_request([2], 30, request_id="here", consumer_id="here"))
    driver.step()
    driver.poll("here")
    driver.tick(9.0)
    driver.poll("here")
    driver.tick(1.0)
    assert [s.request.request_id for s in driver.replica.sequences] == ["here"]
    driver.run()
    assert here.finish is FinishReason.LENGTH
    # It was only held up: it learns of it, and goes on.
    assert (gone.finish, len(gone.token_ids)) == (None, 1)
    assert driver.goes_on(request)
    assert driver.replica.kv.pool.num_held == 0


def test_a_request_that_comes_at_the_end_of_a_lease_gets_a_whole_one(
    driver: ReplicaDriver,
) -> None:
    driver.generate(make_request([1], 2))
    driver.now = 9.9
    stream = driver.submit(make_request([2], 2, request_id="q1"))
    driver.tick(0.2)
    driver.run()
    assert stream.finish is FinishReason.LENGTH


# --- failures ---------------------------------------------------------------------------------


def test_a_failed_row_fails_its_request_alone_and_leaves_nothing_in_the_cache() -> None:
    driver = ReplicaDriver(make_limits(), poison=[(666, 3)])
    good = make_request(range(8), 6, request_id="good")
    bad = make_request(range(50, 60), 9, request_id="bad", seed=666)
    streams = driver.generate(good, bad)
    assert streams[0].token_ids == oracle(good, driver.limits).token_ids
    assert streams[1].token_ids == oracle(bad, driver.limits).token_ids[:3]
    assert (streams[1].finish, streams[1].error) == (FinishReason.ERROR, "draw 3 is poisoned")
    assert driver.replica.kv.match(prompt_keys(bad, driver.scope), 20) == []
    assert len(driver.replica.kv.match(prompt_keys(good, driver.scope), 20)) == 2


def test_a_row_that_fails_after_its_request_was_cancelled_leaves_nothing_either() -> None:
    driver = ReplicaDriver(make_limits(), poison=[(666, 3)])
    bad = make_request(range(50, 60), 9, seed=666)
    stream = driver.submit(bad)
    for _ in range(3):
        driver.step()
    driver.cancel(bad)
    driver.run()
    assert stream.finish is FinishReason.CANCELLED
    assert driver.replica.kv.match(prompt_keys(bad, driver.scope), 20) == []
    assert driver.replica.kv.pool.num_cached == 0


def test_a_failed_step_fences_the_replica_and_its_requests_go_on_elsewhere(
    driver: ReplicaDriver,
) -> None:
    requests = [make_request([i], 9, request_id=f"q{i}") for i in range(3)]
    streams = [driver.submit(request) for request in requests]
    driver.step()
    assert driver.plan is not None
    commands = driver.send(StepFailed(driver.plan.step_id, "rank 1 is gone"))
    assert [type(command) for command in commands] == [ReplicaReport]
    driver.poll()
    (delivery,) = {answer.delivery.fenced for answer in driver.last_answers}
    assert delivery == "step 1 failed: rank 1 is gone"
    # What there was of their streams is still told, and no end.
    got = [(len(stream.token_ids), stream.finish) for stream in streams]
    assert got == [(1, None), (0, None), (0, None)]
    assert all(driver.goes_on(request) for request in requests)
    assert driver.replica.kv.pool.num_held == 0
    assert driver.reports[-1].fenced == "step 1 failed: rank 1 is gone"


def test_a_fenced_replica_takes_nothing_in_and_reports_no_more(driver: ReplicaDriver) -> None:
    requests = [make_request([i], 9, request_id=f"q{i}") for i in range(2)]
    driver.submit(requests[0])
    driver.send(FenceReplica("lost"))
    num_reports = len(driver.reports)
    driver.submit(requests[1])
    assert driver.step()
    driver.send(StepFailed(StepId(0), "again"))
    driver.send(FenceReplica("again"))
    driver.tick(1.0)
    driver.poll()
    assert all(driver.goes_on(request) for request in requests)
    assert driver.replica.fenced == "lost"
    assert (driver.plan, len(driver.reports)) == (None, num_reports)


# --- reports ----------------------------------------------------------------------------------


def test_an_idle_replica_reports_what_changed_at_once(driver: ReplicaDriver) -> None:
    request = make_request(range(9), 1)
    driver.generate(request)
    (report,) = driver.reports
    assert (report.replica_id, report.incarnation, report.sequence) == (R0, 0, 0)
    assert report.published == prompt_keys(request, driver.scope)
    assert (report.evicted, report.finished) == ((), (("q0", 0),))
    assert (report.num_running, report.num_waiting) == (0, 0)
    assert (report.num_free_blocks, report.num_cached_blocks) == (14, 2)


def test_a_busy_replica_reports_at_intervals_and_only_changes(driver: ReplicaDriver) -> None:
    driver.submit(make_request(range(4), 40))
    finish_at(driver, driver.execute(), 1.0)
    assert len(driver.reports) == 1
    for _ in range(8):
        finish_at(driver, driver.execute(), 1.0 + REPORT_INTERVAL_S / 2)
    assert len(driver.reports) == 1
    finish_at(driver, driver.execute(), 1.0 + REPORT_INTERVAL_S)
    assert [len(report.published) for report in driver.reports] == [1, 2]
    driver.tick(10 * REPORT_INTERVAL_S)
    assert len(driver.reports) == 2


@pytest.mark.parametrize(
    "request_",
    [
        make_request(range(9), 4),
        make_request(range(9), 4, n=3),
        make_request(range(9), 4, n=2, beam_width=2),
        dataclasses.replace(make_request(range(9), 4), delivered=(DeliveredSample(0, (7, 8)),)),
    ],
)
def test_a_prompt_is_reported_as_computed_with_the_first_token_and_once(request_: Request) -> None:
    driver = ReplicaDriver(make_limits(block_size=64), max_num_batched_tokens=6)
    driver.submit(request_)
    finish_at(driver, driver.execute(), 1.0)
    assert driver.reports == []
    finish_at(driver, driver.execute(), 1.01)
    assert [report.prefilled for report in driver.reports] == [(("q0", 0),)]
    driver.run()
    assert driver.reports[-1].finished == (("q0", 0),)
    assert all(not report.prefilled for report in driver.reports[1:])


def test_a_request_without_a_token_is_not_reported_as_computed(driver: ReplicaDriver) -> None:
    request = make_request(range(9), 4)
    driver.submit(request)
    driver.send(CancelRequest(request.request_id, request.attempt))
    driver.run()
    assert [(report.prefilled, len(report.finished)) for report in driver.reports] == [((), 1)]


def test_nothing_is_kept_of_a_request_that_ends_without_a_token(driver: ReplicaDriver) -> None:
    log = ReportLog(R0, driver.incarnation, driver.replica.batcher)
    with_token, without = (make_request([1], request_id=name) for name in "ab")
    for request in (with_token, without):
        log.begin(request)
    assert log.num_prefilling == 2
    log.prefill(with_token)
    log.finish(without)
    assert log.num_prefilling == 0
    report = log.take_due(0.0, is_idle=True)
    assert report is not None
    assert (report.prefilled, report.finished) == ((("a", 0),), (("b", 0),))


def test_a_replica_says_when_its_next_report_is_due(driver: ReplicaDriver) -> None:
    driver.submit(make_request(range(4), 40))
    finish_at(driver, driver.execute(), 1.0)
    assert driver.replica.next_tick == 10.0, "the consumer's lease from its submission"
    for _ in range(4):
        finish_at(driver, driver.execute(), 1.01)
    assert driver.replica.next_tick == 1.0 + REPORT_INTERVAL_S
    driver.now = 1.0 + REPORT_INTERVAL_S
    driver.send(Tick())
    assert len(driver.reports) == 2
    assert driver.replica.next_tick == 10.0


def test_evicted_keys_are_reported() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=2))
    old, new = make_request(range(8), 1), make_request(range(50, 58), 1, request_id="q1")
    driver.generate(old)
    driver.generate(new)
    driver.tick(1.0)
    evicted = [key for report in driver.reports for key in report.evicted]
    assert sorted(evicted) == sorted(prompt_keys(old, driver.scope))
