"""What is computed in the next step, seen through the plans of one replica."""

import numpy as np
import pytest
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.ids import Row
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.step_messages import StepPlan
from rayserve_paged.sim.fingerprint_rank import ScheduledRow, oracle


def plan_of(driver: ReplicaDriver) -> StepPlan:
    assert driver.plan is not None
    return driver.plan


def scheduled(driver: ReplicaDriver) -> dict[str, tuple[int, int, int]]:
    """(num_computed, num_tokens, samples) of each request in the step in flight."""
    plan = plan_of(driver)
    rows = {s.row: s.request.request_id for s in driver.replica.batcher.running}
    num_samples = np.bincount(plan.sample_indices, minlength=len(plan.rows))
    fields = zip(plan.rows, plan.num_computed, plan.num_tokens, num_samples, strict=True)
    return {
        rows[Row(int(row))]: (int(computed), int(count), int(samples))
        for row, computed, count, samples in fields
    }


def requests_named(*names: str, num_prompt: int = 6, max_tokens: int = 4) -> list[Request]:
    return [
        make_request([i + 10] * num_prompt, max_tokens, request_id=name)
        for i, name in enumerate(names)
    ]


def submit_in_one_step(driver: ReplicaDriver, *requests: Request) -> None:
    """Have the requests arrive while a step is in flight, which is theirs to follow."""
    other = make_request([0], 1, request_id="other", priority=-9)
    driver.submit(other)
    for request in requests:
        driver.submit(request)
    driver.step()


def test_a_prompt_is_computed_and_then_one_token_a_step() -> None:
    driver = ReplicaDriver(make_limits())
    (request,) = requests_named("q", max_tokens=3)
    driver.generate(request)
    assert driver.rank.history == [
        [ScheduledRow(0, 0, 6, 1)],
        [ScheduledRow(0, 6, 1, 1)],
        [ScheduledRow(0, 7, 1, 1)],
    ]


def test_a_plan_carries_the_tokens_to_compute_and_nothing_that_was_told_before() -> None:
    driver = ReplicaDriver(make_limits())
    request = make_request([1, 2, 3, 4, 5], 3, temperature=0.5, seed=9)
    driver.submit(request)
    plan = plan_of(driver)
    assert plan.token_ids.tolist() == [1, 2, 3, 4, 5]
    (start,) = plan.starts
    assert (start.row, start.num_computed, start.block_ids.tolist()) == (0, 0, [0, 1])
    assert (start.params, start.num_prompt_tokens) == (request.params, 5)
    driver.step()
    plan = plan_of(driver)
    assert (plan.step_id, plan.starts) == (1, ())
    assert plan.append_rows.tolist() == plan.append_blocks.tolist() == []
    assert plan.token_ids.tolist() == [oracle(request, driver.limits).token_ids[0]]


def test_the_arrays_of_a_plan_have_the_types_that_messages_promise() -> None:
    driver = ReplicaDriver(make_limits(), max_num_batched_tokens=4)
    for request in requests_named("a", "b"):
        driver.submit(request)
    while driver.plan is not None:
        plan = plan_of(driver)
        arrays = [plan.append_rows, plan.append_blocks, plan.rows]
        arrays += [plan.num_computed, plan.num_tokens, plan.token_ids, plan.late]
        arrays += [plan.copies, plan.sample_indices, plan.sample_siblings]
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
        assert plan.copies.shape[1:] == (3,)
        assert all(start.block_ids.dtype == np.int32 for start in plan.starts)
        driver.step()


def test_a_block_is_appended_when_the_last_one_is_full() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    driver.submit(make_request([1, 2, 3], 7))
    appended = []
    while driver.plan is not None:
        appended.append(driver.plan.append_blocks.tolist())
        driver.step()
    assert appended == [[], [], [1], [], [], [], [2]]


def test_a_long_prompt_is_computed_in_chunks_under_the_budget() -> None:
    driver = ReplicaDriver(make_limits(), max_num_batched_tokens=4)
    (request,) = requests_named("q", num_prompt=10, max_tokens=1)
    driver.submit(request)
    chunks = []
    while driver.plan is not None:
        chunks.append(scheduled(driver)["q"])
        driver.step()
    assert chunks == [(0, 4, 0), (4, 4, 0), (8, 2, 1)]


def test_a_prefill_takes_what_decoding_leaves_of_the_budget() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), max_num_batched_tokens=6)
    a, b = requests_named("a", "b", num_prompt=5, max_tokens=9)
    long = make_request([30] * 20, 2, request_id="long", priority=-1)
    submit_in_one_step(driver, a, b)
    driver.submit(long)
    driver.step()
    driver.step()
    assert scheduled(driver) == {
        "long": (1, 4, False),
        "a": (6, 1, True),
        "b": (5, 1, True),
    }


def test_requests_start_in_order_of_priority_then_arrival() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), max_num_batched_tokens=64, max_num_seqs=1)
    order = [("a", 1), ("b", 0), ("c", 1), ("d", -5)]
    driver.submit(make_request([0], 1, request_id="first"))
    for name, priority in order:
        driver.submit(make_request([1], 1, request_id=name, priority=priority))
    served = []
    while driver.plan is not None:
        served += scheduled(driver)
        driver.step()
    assert served == ["first", "d", "b", "a", "c"]


def test_nobody_overtakes_a_request_that_does_not_fit_yet() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=8))
    big, small = make_request([2] * 28, 2, request_id="big"), make_request([3], 2, request_id="s")
    submit_in_one_step(driver, make_request([1] * 9, 6, request_id="q"))
    driver.submit(big)
    driver.submit(small)
    while "big" not in scheduled(driver):
        assert "s" not in scheduled(driver)
        driver.step()
    driver.run()


def test_no_more_run_than_there_are_rows_and_rows_are_used_again() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), max_num_seqs=2)
    for request in requests_named("a", "b", "c", "d"):
        driver.submit(request)
    rows = set()
    while driver.plan is not None:
        assert driver.replica.batcher.num_running <= 2
        rows |= set(driver.plan.rows.tolist())
        driver.step()
    assert rows == {0, 1}


def test_the_last_served_gives_way_and_resumes_when_its_history_fits() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=6))
    first, last = requests_named("first", "last", num_prompt=6, max_tokens=14)
    submit_in_one_step(driver, first, last)
    sequences = [driver.sequence(request) for request in (first, last)]
    driver.run()
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1]
    assert driver.replica.batcher.num_preemptions == 1
    for request in (first, last):
        stream = driver.reader().streams[request.request_id]
        assert stream.token_ids == oracle(request, driver.limits).token_ids


def test_a_resumed_request_says_how_much_was_cached_at_its_first_admission() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=6))
    first, last = requests_named("first", "last", num_prompt=6, max_tokens=14)
    submit_in_one_step(driver, first, last)
    while driver.step():
        driver.poll()  # What is owed does not gather over the preemption.
        driver.read_answers()
    resumed = [
        row.num_computed
        for step in driver.rank.history
        for row in step
        if row.num_tokens > 1 and row.num_computed
    ]
    assert resumed
    assert driver.reader().streams[last.request_id].num_cached_tokens == 0


def test_a_step_that_preempts_admits_nobody() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=6))
    first, last = requests_named("first", "last", num_prompt=6, max_tokens=14)
    submit_in_one_step(driver, first, last)
    driver.submit(make_request([5], 1, request_id="small"))
    before = 0
    while driver.plan is not None:
        preempted = driver.replica.batcher.num_preemptions > before
        before = driver.replica.batcher.num_preemptions
        assert not (preempted and driver.plan.starts)
        driver.step()
    assert before > 0


def test_two_prompts_that_do_not_fit_together_run_one_after_the_other() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=6), max_num_batched_tokens=4)
    requests = requests_named("a", "b", num_prompt=20, max_tokens=2)
    for request, stream in zip(requests, driver.generate(*requests), strict=True):
        assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert driver.replica.batcher.num_preemptions == 0


def test_equal_prompts_that_do_not_wait_are_computed_apart_and_kept_once() -> None:
    driver = ReplicaDriver(make_limits(), max_prefix_wait_steps=0)
    twins = [make_request(range(9), 2, request_id=name) for name in "ab"]
    submit_in_one_step(driver, *twins)
    assert {fields[:2] for fields in scheduled(driver).values()} == {(0, 9)}
    driver.run()
    assert driver.replica.kv.pool.num_cached == 2
    assert {stream.num_cached_tokens for stream in driver.reader().streams.values()} == {0}


def test_a_request_shares_blocks_that_another_still_uses() -> None:
    driver = ReplicaDriver(make_limits())
    first = make_request(range(8), 9, request_id="first")
    driver.submit(first)
    driver.step()
    second = make_request([*range(8), 50], 2, request_id="second")
    driver.submit(second)
    driver.step()
    tables = [driver.sequence(request).table.block_ids for request in (first, second)]
    assert tables[0][:2] == tables[1][:2]
    driver.run()
    stream = driver.reader().streams[second.request_id]
    assert (stream.token_ids, stream.num_cached_tokens) == (
        oracle(second, driver.limits).token_ids,
        8,
    )


def test_outputs_are_cached_like_prompts() -> None:
    driver = ReplicaDriver(make_limits())
    request = make_request(range(6), 11)
    (stream,) = driver.generate(request)
    turn = make_request([*range(6), *stream.token_ids, 90], 2, request_id="turn")
    (follow_up,) = driver.generate(turn)
    assert follow_up.num_cached_tokens == 16
    assert follow_up.token_ids == oracle(turn, driver.limits).token_ids


@pytest.mark.parametrize("min_tokens", [0, 3, 8])
def test_a_stop_id_ends_a_request_after_its_fewest_tokens(min_tokens: int) -> None:
    limits = make_limits(vocab_size=5, eos_token_ids=(0,))
    driver = ReplicaDriver(limits)
    request = make_request([1, 2], 30, min_tokens=min_tokens, stop_token_ids=(3,))
    (stream,) = driver.generate(request)
    assert (stream.token_ids, stream.finish) == oracle(request, limits)
    assert stream.finish is FinishReason.STOP
    assert stream.token_ids[-1] in (0, 3)
    assert len(stream.token_ids) >= min_tokens


def test_end_ids_can_be_ignored() -> None:
    limits = make_limits(vocab_size=5, eos_token_ids=(0,))
    (stream,) = ReplicaDriver(limits).generate(make_request([1, 2], 30, ignore_eos=True))
    assert len(stream.token_ids) == 30
    assert 0 in stream.token_ids[:-1]


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("budget", [1, 2, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize(("pipeline_depth", "max_decode_steps"), [(1, 1), (2, 1), (1, 4)])
def test_the_smallest_pools_budgets_and_batches_serve_what_fits(
    num_blocks: int,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    pipeline_depth: int,
    max_decode_steps: int,
) -> None:
    limits = make_limits(num_blocks, block_size)
    driver = ReplicaDriver(
        limits,
        max_num_seqs,
        budget,
        pipeline_depth=pipeline_depth,
        max_decode_steps=max_decode_steps,
    )
    requests = []
    for num_prompt in range(1, limits.num_slots + 1):
        for priority in (1, 0):
            name = f"q{num_prompt}/{priority}"
            request = make_request(range(num_prompt), None, request_id=name, priority=priority)
            requests.append(request)
    for request, stream in zip(requests, driver.generate(*requests), strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, limits)
        assert len(stream.token_ids) == limits.num_slots + 1 - len(request.prompt_token_ids)
    assert driver.num_free == num_blocks
