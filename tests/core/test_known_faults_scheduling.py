"""Known faults of other runtimes: admission, preemption, resuming. Ids are those of the docs.

The numbers are the cases' own. "Free" is FREE + CACHED.
"""

import pytest
from fingerprint_rank import FingerprintRank, ScheduledRow, oracle
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


def test_b35_preempted_requests_make_progress() -> None:
    limits = make_limits(num_blocks=20, block_size=16)
    driver = ReplicaDriver(limits, max_num_batched_tokens=64)
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
        self.kv = KVManager(BlockPool(limits.num_blocks), limits.block_size)
        self.batcher = Batcher(self.kv, 4, budget)
        self.rank = FingerprintRank(limits)
        self.evict = evict
        scope = make_scope(limits.block_size)
        root = scope.root()
        keys = prompt_keys(request, scope)
        self.sequence = SequenceState(request, keys, root, 0, (), limits.block_size)
        self.batcher.add(self.sequence)

    def step(self) -> ScheduledRow:
        plan = self.batcher.plan_step()
        assert plan is not None
        self.batcher.commit(self.rank.run(plan))
        (row,) = self.rank.history[-1]
        return row

    def preempt(self) -> None:
        self.batcher.preempt(self.sequence)
        if self.evict:
            table = self.kv.open([])
            self.kv.grow(table, self.kv.pool.num_blocks * self.kv.block_size)
            self.kv.close(table)

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
        assert [row.samples for row in prefill] == [False] * (len(prefill) - 1) + [True]
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
    assert [row.samples for row in chunks] == [False, False, False, False, True]
    assert run.sequence.num_outputs == 1025
    assert tuple(run.sequence.tokens[3:]) == oracle(request, limits).token_ids[:1025]


def test_b60_no_step_is_over_budget_whatever_reuse_promised() -> None:
    limits = make_limits(num_blocks=9, block_size=16)
    driver = ReplicaDriver(limits, max_num_batched_tokens=64)
    shared = list(range(32))
    requests = [make_request(shared + [40 + i] * 16, 1, request_id=f"q{i}") for i in range(3)]
    for request, stream in zip(requests, driver.generate(*requests), strict=True):
        assert stream.token_ids == oracle(request, limits).token_ids
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


def test_b82_a_cancel_during_the_last_step_is_a_cancel() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=50), max_num_seqs=50, max_num_batched_tokens=512)
    requests = [make_request([i, 1, 2], 1, request_id=f"q{i}") for i in range(50)]
    streams = [driver.submit(request) for request in requests]
    driver.step()
    for request in requests[1:]:
        driver.cancel(request)
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
