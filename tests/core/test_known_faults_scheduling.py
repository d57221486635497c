"""Known faults of other runtimes: admission, preemption, resuming. Ids are those of the docs.

The numbers are the cases' own. "Free" is FREE + CACHED.
"""

import itertools

import pytest
from batcher_driver import BatcherDriver
from replica_driver import (
    ReplicaDriver,
    make_limits,
    make_request,
    make_scope,
    prompt_keys,
)

from rayserve_paged.core.batcher import Batcher
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.request import FinishReason, ModelLimits, Request, admit
from rayserve_paged.core.sequence import Phase, SequenceState
from rayserve_paged.sim.fingerprint_rank import FingerprintRank, ScheduledRow, oracle


def test_b25_blocks_that_a_step_writes_are_not_granted_before_it_ends() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=4))
    a, c = (
        make_request(range(13), 3, request_id="a"),
        make_request(range(60, 69), 4, request_id="c"),
    )
    driver.submit(a)
    driver.step()
    driver.cancel(a)
    assert [s.request.request_id for s in driver.replica.sequences] == []
    stream = driver.submit(c)
    assert driver.num_free == 0
    assert driver.sequence(c).table.block_ids == []
    driver.step()
    assert len(driver.sequence(c).table.block_ids) == 3
    driver.run()
    assert stream.token_ids == oracle(c, driver.limits).token_ids


def test_b34a_a_prompt_over_the_pool_is_refused_and_the_next_one_runs() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=100, block_size=16, max_model_len=4096))
    with pytest.raises(CapacityError) as refused:
        driver.submit(make_request([1] * 2000, 16))
    assert "100 (1600 slots)" in str(refused.value)
    assert "2000 tokens" in str(refused.value)
    stream = driver.submit(make_request([1] * 10, 1))
    assert driver.plan is not None
    driver.run()
    assert stream.finish is FinishReason.LENGTH


def test_b34b_a_request_that_would_outgrow_the_pool_is_refused() -> None:
    limits = make_limits(num_blocks=100, block_size=16, max_model_len=4096)
    with pytest.raises(CapacityError) as refused:
        admit(make_request([1] * 1500, 200), limits)
    assert refused.value.num_blocks_needed == 107


def test_b34c_a_request_that_fills_the_pool_to_the_last_slot_completes() -> None:
    limits = make_limits(num_blocks=100, block_size=16, max_model_len=4096)
    driver = ReplicaDriver(limits, max_num_batched_tokens=512)
    request = make_request([1] * 1584, 17)
    stream = driver.submit(request)
    driver.run()
    assert (stream.token_ids, stream.finish) == oracle(request, limits)
    assert len(stream.token_ids) == 17
    assert driver.replica.batcher.num_preemptions == 0


@pytest.mark.parametrize(("pipeline_depth", "max_decode_steps"), [(1, 1), (2, 1), (1, 8)])
def test_b35_preempted_requests_make_progress(pipeline_depth: int, max_decode_steps: int) -> None:
    limits = make_limits(num_blocks=20, block_size=16)
    driver = ReplicaDriver(
        limits,
        max_num_batched_tokens=64,
        pipeline_depth=pipeline_depth,
        max_decode_steps=max_decode_steps,
    )
    requests = [make_request([i] * 96, 96, request_id=f"r{i}") for i in (1, 2, 3)]
    streams = [driver.submit(request) for request in requests]
    sequences = [driver.sequence(request) for request in requests]
    num_steps = driver.run()
    for request, stream in zip(requests, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, limits)
    preemptions = [sequence.num_preemptions for sequence in sequences]
    assert preemptions[0] == 0
    assert max(preemptions) <= 3
    assert num_steps < 600


def test_b35_a_preempted_request_resumes_only_where_its_whole_history_fits() -> None:
    limits = make_limits(num_blocks=20, block_size=16)
    driver = ReplicaDriver(limits, max_num_batched_tokens=64)
    requests = [make_request([i] * 96, 96, request_id=f"r{i}") for i in (1, 2, 3)]
    for request in requests:
        driver.submit(request)
    sequences = driver.replica.sequences
    num_resumed = 0
    while driver.plan is not None:
        waiting = [s for s in sequences if s.num_preemptions and s.phase is Phase.WAITING]
        driver.step()
        for sequence in waiting:
            if sequence.phase is Phase.RUNNING:
                num_missing = sequence.table.num_missing(sequence.num_known)
                assert num_missing <= driver.num_free
                num_resumed += 1
    assert num_resumed > 0


def test_b38_four_long_prompts_run_together_within_20_steps() -> None:
    limits = make_limits(num_blocks=1700, block_size=16, max_model_len=8192)
    driver = ReplicaDriver(limits, max_num_seqs=4, max_num_batched_tokens=2048)
    for i in range(4):
        driver.submit(make_request([i] * 6000, 500, request_id=f"q{i}"))
    for _ in range(20):
        driver.step()
    assert driver.replica.batcher.num_running == 4
    assert all(sequence.num_outputs > 0 for sequence in driver.replica.sequences)


SHORT_PROMPT_BOUND_STEPS = 5
"""Within so many steps a prompt that fits into a quarter of the budget has its first token,
whatever prefill was there before: in the first it may have to give way to those before it."""


def test_b38_a_short_request_is_served_within_5_steps_while_a_long_prefill_goes_on() -> None:
    limits = make_limits(num_blocks=4200, block_size=16, max_model_len=70_000)
    scope = make_scope(16)
    batcher = Batcher(KVManager(BlockPool(limits.num_blocks), 16), 4, 64)
    rank = FingerprintRank(limits)
    names = iter(range(3))

    def add(prompt: list[int]) -> SequenceState:
        arrival = next(names)
        request = make_request(prompt, 100, request_id=f"q{arrival}")
        keys = prompt_keys(request, scope)
        sequence = SequenceState(request, keys, scope.root(), arrival, (), 16)
        batcher.add(sequence)
        return sequence

    def step() -> None:
        plan = batcher.plan_step()
        assert plan is not None
        assert len(plan.token_ids) <= 64
        batcher.commit(rank.run(plan))
        assert long in batcher.running
        progress.append(batcher.num_computed(long))

    progress = [0]
    long, parked = add([1] * 64_000), add([2] * 40)
    while parked.num_outputs < 8:
        step()
    batcher.preempt(parked)  # From now on it waits, and is ready.
    short = add([3] * 10)
    for _ in range(SHORT_PROMPT_BOUND_STEPS):
        step()
    assert parked.phase is short.phase is Phase.RUNNING
    assert parked.num_outputs > 8
    assert short.num_outputs > 0
    assert min(after - before for before, after in itertools.pairwise(progress)) >= 45
    assert long.num_outputs == 0


def test_b42_a_victim_is_not_part_of_the_step_that_it_gave_way_to() -> None:
    limits = make_limits(num_blocks=6)
    driver = ReplicaDriver(limits)
    dummy = make_request([96], 2, request_id="dummy")
    driver.submit(dummy)  # Its step is in flight while the other two arrive: low is first.
    low = make_request(range(5), 9, request_id="low", priority=5)
    high = make_request(range(40, 48), 10, request_id="high", priority=0)
    low_stream, high_stream = driver.submit(low), driver.submit(high)
    driver.cancel(dummy)
    while driver.sequence(high).num_known < 12:
        driver.step()
    assert [len(s.table.block_ids) for s in driver.replica.batcher.running] == [3, 3]
    assert driver.num_free == 0
    driver.step()
    assert driver.plan is not None
    assert driver.sequence(high).num_known == 13
    assert driver.plan.rows.tolist() == [driver.sequence(high).row]
    assert driver.plan.num_tokens.tolist() == [1]
    victim = driver.sequence(low)
    assert (victim.phase, victim.table.block_ids, victim.row) == (Phase.WAITING, [], None)
    driver.run()
    assert low_stream.token_ids == oracle(low, limits).token_ids
    assert high_stream.token_ids == oracle(high, limits).token_ids


class Preempted:
    """Runs one request on a batcher, with its preemption forced after chosen output tokens."""

    def __init__(self, request: Request, limits: ModelLimits, budget: int, evict: bool) -> None:
        self.driver = BatcherDriver(request, limits, budget)
        self.sequence = self.driver.first
        self.evict = evict

    def step(self) -> ScheduledRow:
        self.driver.step()
        (row,) = self.driver.rank.history[-1]
        return row

    def preempt(self) -> None:
        self.driver.batcher.preempt(self.sequence)
        if self.evict:
            kv = self.driver.kv
            table = kv.open([])
            kv.grow(table, kv.pool.num_blocks * kv.block_size)
            kv.close(table)

    def run(self, preempt_after: list[int]) -> list[list[ScheduledRow]]:
        """Run to the end; return the resumed prefills, each up to the step that samples."""
        resumed = []
        due = list(preempt_after)
        self.step()
        while self.sequence.finish is None:
            if due and self.sequence.num_outputs == due[0]:
                due.pop(0)
                self.preempt()
                prefill = [self.step()]
                while not prefill[-1].samples:
                    prefill.append(self.step())
                resumed.append(prefill)
            else:
                self.step()
        assert not due
        return resumed


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("preempt_after", [*([k] for k in range(30)), [7, 8], [7, 20]])
def test_b46_a_resumed_request_recomputes_prompt_and_outputs(
    preempt_after: list[int], evict: bool
) -> None:
    limits = make_limits(num_blocks=10)
    request = make_request(range(10), 30)
    run = Preempted(request, limits, budget=8, evict=evict)
    resumed = run.run(preempt_after)
    outputs = tuple(run.sequence.tokens[10:])
    assert outputs == oracle(request, limits).token_ids
    assert run.sequence.num_preemptions == len(preempt_after)
    for k, prefill in zip(preempt_after, resumed, strict=True):
        first, last = prefill[0], prefill[-1]
        assert last.num_computed + last.num_tokens == 10 + k
        assert [row.samples for row in prefill] == [0] * (len(prefill) - 1) + [1]
        if evict:
            assert first.num_computed == 0
            assert sum(row.num_tokens for row in prefill) == 10 + k
        else:
            # All full blocks that were computed before: all tokens but the last output.
            num_computed = 10 + k - 1 if k else 8
            assert first.num_computed == num_computed // 4 * 4


def test_b47_a_resumed_history_longer_than_the_prompt_is_prefilled_in_chunks() -> None:
    limits = make_limits(num_blocks=70, block_size=16)
    request = make_request([5, 6, 7], 1030)
    run = Preempted(request, limits, budget=256, evict=True)
    while run.sequence.num_outputs < 1024:
        run.step()
    run.preempt()
    chunks = [run.step() for _ in range(5)]
    assert [row.num_tokens for row in chunks] == [256, 256, 256, 256, 3]
    assert [row.samples for row in chunks] == [0, 0, 0, 0, 1]
    assert run.sequence.num_outputs == 1025
    assert tuple(run.sequence.tokens[3:]) == oracle(request, limits).token_ids[:1025]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [5, 7, 9])
def test_b60_no_step_is_over_budget_whatever_reuse_promised(
    num_blocks: int, pipeline_depth: int
) -> None:
    limits = make_limits(num_blocks, block_size=16)
    driver = ReplicaDriver(limits, max_num_batched_tokens=64, pipeline_depth=pipeline_depth)
    shared = list(range(32))
    requests = [make_request(shared + [40 + i] * 16, 1, request_id=f"q{i}") for i in range(3)]
    # Takes 48 of the first step's budget, so that 16 tokens of the first prompt are computed.
    driver.submit(make_request([90], 1, request_id="before"))
    driver.submit(make_request([91] * 48, 1, request_id="other", priority=-1))
    streams = [driver.submit(requests[0])]
    driver.step()
    if num_blocks > 5 and pipeline_depth == 1:
        driver.step()
        assert driver.replica.batcher.num_computed(driver.sequence(requests[0])) == 16
    streams += [driver.submit(request) for request in requests[1:]]
    driver.run()
    for request, stream in zip(requests, streams, strict=True):
        assert stream.token_ids == oracle(request, limits).token_ids
    assert driver.num_free == num_blocks
    assert max(sum(row.num_tokens for row in step) for step in driver.rank.history) <= 64


def test_b64_a_model_limit_that_is_no_multiple_of_the_block_size_is_kept() -> None:
    for limit in (100, 1, 15, 17):
        limits = make_limits(num_blocks=16, block_size=16, max_model_len=limit)
        driver = ReplicaDriver(limits)
        a = make_request([3], None, request_id="a")
        b = make_request([4], min(8, limit), request_id="b")
        if limit == 1:
            with pytest.raises(InvalidInputError):
                admit(a, limits)
            continue
        for request, stream in zip((a, b), driver.generate(a, b), strict=True):
            assert (stream.token_ids, stream.finish) == oracle(request, limits)
        assert driver.reader().streams[a.request_id].finish is FinishReason.LENGTH
        assert len(driver.reader().streams[a.request_id].token_ids) == limit - 1


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_b82_a_cancel_during_the_last_step_is_a_cancel(pipeline_depth: int) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks=50),
        max_num_seqs=50,
        max_num_batched_tokens=512,
        pipeline_depth=pipeline_depth,
    )
    requests = [make_request([i, 1, 2], 1, request_id=f"q{i}") for i in range(50)]
    streams = [driver.submit(request) for request in requests]
    driver.step()
    for request in requests[1:]:
        driver.cancel(request)
    for _ in range(pipeline_depth):
        driver.step()
    assert driver.num_free == 50
    driver.run()
    assert [stream.finish for stream in streams[1:]] == [FinishReason.CANCELLED] * 49
    assert driver.replica.batcher.num_running == driver.replica.batcher.num_waiting == 0


def test_b114_output_tokens_are_counted_once_whatever_was_preempted() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=4))
    dummy = make_request([96], 1, request_id="dummy")
    driver.submit(dummy)
    requests = [
        make_request(range(7), 4, request_id="a"),
        make_request([50, 51, 52], 4, request_id="b"),
    ]
    streams = [driver.submit(request) for request in requests]
    victim = driver.sequence(requests[1])
    while not victim.num_preemptions:
        driver.step()
    assert victim.num_outputs == 2, "its prefill and one decode step"
    driver.run()
    assert sum(len(stream.token_ids) for stream in streams) == 8


@pytest.mark.parametrize("partial_reuse", [False, True])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_b115_a_prefix_is_looked_up_once_for_each_request_and_resuming_counts_apart(
    pipeline_depth: int, partial_reuse: bool
) -> None:
    driver = ReplicaDriver(
        make_limits(num_blocks=8, block_size=16),
        pipeline_depth=pipeline_depth,
        partial_reuse=partial_reuse,
    )
    batcher = driver.replica.batcher
    urgent = make_request(range(70), 11, request_id="urgent", consumer_id="urgent")
    driver.submit(urgent)
    request = make_request([90, *range(63)], 30)
    stream = driver.submit(request)
    num_waited = 0
    while driver.sequence(request).phase is Phase.WAITING:
        driver.step()
        num_waited += 1
    assert num_waited >= 10
    assert (batcher.num_queried_tokens, batcher.num_hit_tokens) == (70 + 64, 0)
    assert driver.sequence(request).num_preemptions == 0
    driver.step()
    # Takes blocks from it once, and leaves some of those that it has filled in the cache.
    driver.submit(make_request([91] * 30, 40, request_id="other", priority=-1))
    victim = driver.sequence(request)
    driver.run()
    assert victim.num_preemptions == 1
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert (batcher.num_queried_tokens, batcher.num_hit_tokens) == (70 + 64 + 30, 0)
    resumed = [row.num_computed for step in driver.rank.history for row in step]
    assert batcher.num_resumed_tokens in resumed
    assert partial_reuse or batcher.num_resumed_tokens % 16 == 0
    assert batcher.num_resumed_tokens > 0
    report = driver.reports[-1]
    assert (report.num_queried_tokens, report.num_hit_tokens) == (164, 0)
    assert report.num_resumed_tokens == batcher.num_resumed_tokens
    driver.generate(make_request([91] * 30, 1, request_id="again"))
    num_hit = 29 if partial_reuse else 16
    assert (batcher.num_queried_tokens, batcher.num_hit_tokens) == (164 + 30, num_hit)
    assert batcher.num_resumed_tokens == report.num_resumed_tokens
