"""Cancelling one of the parallel samples of a request, before and after it is born."""

import pytest
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.replica_messages import CancelRequest
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.sim.fingerprint_rank import oracle

PROMPT = range(8)


def make_group(n: int = 4) -> Request:
    return make_request(PROMPT, 20, n=n, temperature=1.0, seed=7)


def cancel(driver: ReplicaDriver, request: Request, sibling: int) -> None:
    driver.send(CancelRequest(request.request_id, request.attempt, sibling))


def check_ends(driver: ReplicaDriver, request: Request, cancelled: dict[int, int]) -> None:
    """Check all samples: the cancelled ones have so many tokens, the others are whole."""
    for sibling in range(request.params.n):
        stream = driver.reader().stream(request, sibling)
        expected = oracle(request, driver.limits, sibling)
        if sibling in cancelled:
            assert (stream.finish, stream.error) == (
                FinishReason.CANCELLED,
                "cancelled by its consumer",
            )
            assert stream.token_ids == expected.token_ids[: cancelled[sibling]]
        else:
            assert (stream.token_ids, stream.finish) == expected
    assert driver.replica.kv.pool.num_held == 0
    assert driver.replica.sequences == ()
    finished = [name for report in driver.reports for name in report.finished]
    assert finished == [(request.request_id, request.attempt)]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("sibling", range(4))
def test_a_sample_that_runs_ends_alone_and_gives_its_own_blocks_back(
    sibling: int, pipeline_depth: int
) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), pipeline_depth=pipeline_depth)
    request = make_group()
    driver.submit(request)
    while len(driver.replica.sequences) < 4 or driver.sequence_of(request, 3).num_outputs < 6:
        driver.step()
    num_outputs = {s.sibling: s.num_outputs for s in driver.replica.batcher.running}
    before = driver.replica.kv.pool.num_held
    own = driver.sequence_of(request, sibling).table.block_ids[2:]
    cancel(driver, request, sibling)
    cancel(driver, request, sibling)
    assert {s.sibling for s in driver.replica.sequences} == {0, 1, 2, 3} - {sibling}
    for _ in range(pipeline_depth):
        driver.step()
    assert driver.replica.kv.pool.num_held <= before - len(own) + 3
    driver.run()
    check_ends(driver, request, {sibling: num_outputs[sibling]})


@pytest.mark.parametrize("cancelled", [[0], [1], [3], [0, 1], [1, 2, 3], [0, 2, 3], [2, 0, 1]])
@pytest.mark.parametrize("when", ["waiting", "in the prefill", "in the step that forks"])
def test_samples_that_are_not_born_never_are_and_the_others_go_on(
    cancelled: list[int], when: str
) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), max_num_seqs=4, max_num_batched_tokens=5)
    request = make_group()
    if when == "waiting":
        driver.submit(make_request([1], 1, request_id="first"))
    driver.submit(request)
    if when == "in the step that forks":
        driver.step()
    for sibling in cancelled:
        cancel(driver, request, sibling)
        cancel(driver, request, sibling)
    assert len(driver.replica.sequences) == (2 if when == "waiting" else 1)
    if when == "in the prefill":
        driver.step()
    if when != "waiting":
        # The first computes the prompt, whoever wants it; of the others only those are drawn that
        # were still wanted when the step was planned.
        assert driver.plan is not None
        left = set(range(4)) - (set() if when == "in the step that forks" else set(cancelled))
        assert set(driver.plan.sample_siblings.tolist()) == {0} | left
    most = 0
    while driver.step():
        most = max(most, driver.replica.batcher.num_running)
    driver.poll()
    driver.read_answers()
    assert most == 4 - len(cancelled)
    driver.reports = [r for r in driver.reports if r.finished != (("first", 0),)]
    check_ends(driver, request, dict.fromkeys(cancelled, 0))


@pytest.mark.parametrize("num_steps", [0, 1])
def test_the_last_sample_cancelled_before_birth_ends_the_request(num_steps: int) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), max_num_batched_tokens=3)
    request = make_group(3)
    driver.submit(request)
    for _ in range(num_steps):
        driver.step()
    for sibling in (1, 0, 2):
        assert len(driver.replica.sequences) == 1
        cancel(driver, request, sibling)
    assert driver.replica.sequences == ()
    driver.run()
    check_ends(driver, request, {0: 0, 1: 0, 2: 0})


def test_a_sample_that_does_not_exist_or_another_attempt_cancels_nothing() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64))
    request = make_group(2)
    driver.submit(request)
    for sibling in (2, 9, -1):
        cancel(driver, request, sibling)
    driver.step()
    cancel(driver, request, 2)
    driver.run()
    check_ends(driver, request, {})


def test_the_rest_of_a_group_can_still_be_cancelled_together() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), max_num_batched_tokens=4)
    request = make_group(3)
    driver.submit(request)
    cancel(driver, request, 0)
    driver.cancel(request)
    driver.run()
    check_ends(driver, request, {0: 0, 1: 0, 2: 0})


def test_a_sample_withdrawn_before_a_failing_prompt_is_told_of_once() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), max_num_batched_tokens=4, poison={(7, 0)})
    request = make_group(3)
    driver.submit(request)
    cancel(driver, request, 0)
    cancel(driver, request, 2)
    driver.run()
    streams = [driver.reader().stream(request, sibling) for sibling in range(3)]
    assert [stream.finish for stream in streams] == [
        FinishReason.CANCELLED,
        FinishReason.ERROR,
        FinishReason.CANCELLED,
    ]
    assert driver.num_free == 64
