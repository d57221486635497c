"""Plans of several steps and two plans in flight give what single steps give, to the block."""

import dataclasses
import functools
import random

import pytest
from replica_driver import ReplicaDriver, Stream, make_limits, make_request

from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.stream_messages import StreamItem, TokenRun
from rayserve_paged.sim.fingerprint_rank import oracle


@dataclasses.dataclass
class Outcome:
    """All that is left of a run: streams, and the ledger to the block."""

    streams: list[Stream]
    accounting: Accounting
    free_ids: tuple[BlockId, ...]
    cached_ids: tuple[BlockId, ...]
    keys: dict[BlockKey, BlockId]
    num_plans: int
    num_steps: int


def workload(seed: int) -> list[Request]:
    """Requests that share prefixes, of which some fork, stop early, or end in one token."""
    draw = random.Random(seed)
    story = [draw.randrange(31) for _ in range(8)]
    requests = []
    for number in range(draw.randint(3, 8)):
        shared = draw.randint(0, 16)
        own = [draw.randrange(31) for _ in range(draw.randint(1, 8))]
        requests.append(
            make_request(
                story[:shared] + own,
                draw.randint(1, 40),
                request_id=f"q{number}",
                consumer_id=draw.choice(["c0", "c1"]),
                priority=draw.choice([0, 0, 1]),
                temperature=draw.choice([0.0, 1.0]),
                seed=number,
                n=draw.choice([1, 1, 2, 3]),
            )
        )
    return requests


@functools.cache
def run(
    seed: int,
    *,
    num_slots: int,
    max_decode_steps: int = 1,
    pipeline_depth: int = 1,
    interruptions: float = 0.0,
) -> Outcome:
    draw = random.Random(seed)
    block_size, max_num_seqs = draw.choice([2, 3, 4, 16]), draw.choice([4, 16])
    limits = make_limits(num_slots // block_size, block_size, 31, eos_token_ids=(0,))
    driver = ReplicaDriver(
        limits,
        max_num_seqs,
        draw.choice([8, 64]),
        max_decode_steps=max_decode_steps,
        pipeline_depth=pipeline_depth,
    )
    interrupt = random.Random(seed + 1)
    driver.rank.interrupt = lambda: interrupt.random() < interruptions
    requests = workload(seed)
    driver.submit(make_request([0], 1, request_id="before", ignore_eos=True))
    for request in requests:
        driver.submit(request)  # While a step is in flight: all of them start together.
    num_plans = driver.run()
    streams = []
    for request in requests:
        for sibling in range(request.params.n):
            stream = driver.reader(request.consumer_id).stream(request, sibling)
            assert (stream.token_ids, stream.finish) == oracle(request, driver.limits, sibling)
            streams.append(stream)
    pool, index = driver.replica.kv.pool, driver.replica.kv.index
    assert pool.num_held == 0
    return Outcome(
        streams,
        driver.replica.accounting(),
        tuple(pool.free_ids),
        tuple(pool.cached_ids),
        dict(index.items()),
        num_plans,
        len(driver.rank.history),
    )


@pytest.mark.parametrize("num_slots", [96, 1600])
@pytest.mark.parametrize("interruptions", [0.0, 0.4])
@pytest.mark.parametrize("max_decode_steps", [2, 3, 64])
def test_plans_of_several_steps_leave_exactly_what_single_steps_leave(
    max_decode_steps: int, interruptions: float, num_slots: int
) -> None:
    num_plans = num_single = 0
    for seed in range(8):
        single = run(seed, num_slots=num_slots)
        several = run(
            seed,
            num_slots=num_slots,
            max_decode_steps=max_decode_steps,
            interruptions=interruptions,
        )
        assert several.streams == single.streams
        assert several.accounting == single.accounting
        assert several.free_ids == single.free_ids
        assert several.cached_ids == single.cached_ids
        assert several.keys == single.keys
        assert several.num_plans <= single.num_plans
        assert single.num_steps == single.num_plans
        num_plans, num_single = num_plans + several.num_plans, num_single + single.num_plans
    assert num_plans < num_single, "several steps were run at once"


@pytest.mark.parametrize("num_slots", [96, 1600])
@pytest.mark.parametrize(("max_decode_steps", "interruptions"), [(1, 0.0), (8, 0.4)])
def test_two_plans_in_flight_give_what_one_gives(
    max_decode_steps: int, interruptions: float, num_slots: int
) -> None:
    for seed in range(8):
        one = run(seed, num_slots=num_slots)
        two = run(
            seed,
            num_slots=num_slots,
            pipeline_depth=2,
            max_decode_steps=max_decode_steps,
            interruptions=interruptions,
        )
        assert [s.finish for s in two.streams] == [s.finish for s in one.streams]
        assert [s.token_ids for s in two.streams] == [s.token_ids for s in one.streams]
        assert {s.error for s in two.streams} == {None}
        assert all(s.finish in (FinishReason.STOP, FinishReason.LENGTH) for s in two.streams)
        if num_slots == 1600:
            # Nothing is evicted: the same blocks fill, whichever they are.
            assert two.keys.keys() == one.keys.keys()
            assert two.accounting.num_free_blocks == one.accounting.num_free_blocks


def test_a_plan_of_several_steps_ends_where_a_block_or_a_stream_ends() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), max_decode_steps=64)
    driver.submit(make_request(range(3), 12, request_id="long"))
    driver.submit(make_request(range(40, 46), 5, request_id="short"))
    num_steps = []
    while driver.plan is not None:
        plan = driver.plan
        num_steps.append(plan.num_steps)
        if plan.num_steps > 1:
            assert set(plan.num_tokens.tolist()) == {1}
            assert len(plan.sample_indices) == len(plan.rows)
            for sequence in driver.replica.batcher.running:
                num_held = driver.replica.batcher.num_held_tokens(sequence)
                assert num_held <= sequence.table.num_slots
                assert sequence.num_known + plan.num_steps <= sequence.max_known
        driver.step()
    assert max(num_steps) == 4, "a block of one row alone"
    assert sum(num_steps) == len(driver.rank.history) == 12


def test_a_request_that_waits_is_never_kept_waiting_by_a_plan_of_several_steps() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), max_num_seqs=1, max_decode_steps=8)
    driver.submit(make_request(range(3), 12, request_id="first"))
    driver.submit(make_request(range(3), 2, request_id="second"))
    while driver.replica.batcher.num_waiting:
        assert driver.plan is not None
        assert driver.plan.num_steps == 1
        driver.step()
    driver.run()


def test_the_steps_of_a_plan_are_told_as_one_run() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32, block_size=16), max_decode_steps=4)
    requests = [make_request([i, 5], 9, request_id=f"q{i}") for i in range(2)]
    driver.submit(make_request([0], 1, request_id="before"))
    for request in requests:
        driver.submit(request)
    driver.step()
    driver.step()
    driver.poll()  # Takes the first tokens.
    assert driver.plan is not None
    assert driver.plan.num_steps == 4
    driver.poll()
    driver.finish(driver.execute())
    (answer,) = driver.answers
    (run,) = answer.delivery.items
    assert isinstance(run, TokenRun)
    assert [name.request_id for name in run.names] == ["q0", "q1"]
    assert run.indices.tolist() == [1, 1]
    expected = [oracle(request, driver.limits).token_ids[1:5] for request in requests]
    assert run.token_ids.T.tolist() == [list(tokens) for tokens in expected]
    driver.read_answers()
    driver.run()


def test_of_a_plan_that_ends_a_stream_the_others_are_told_as_one_run() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32, block_size=16), max_decode_steps=8)
    requests = [make_request([i, 5], 4 + 5 * i, request_id=f"q{i}") for i in range(2)]
    driver.submit(make_request([0], 1, request_id="before"))
    for request in requests:
        driver.submit(request)
    driver.step()
    driver.step()
    driver.poll()  # Takes the first tokens.
    assert driver.plan is not None
    assert driver.plan.num_steps == 3, "the first stream may end there"
    driver.poll()
    driver.finish(driver.execute())
    (answer,) = driver.answers
    before_end, end, going_on = answer.delivery.items
    ended, longer = (oracle(request, driver.limits).token_ids for request in requests)
    assert isinstance(before_end, TokenRun)
    assert [name.request_id for name in before_end.names] == ["q0"]
    assert before_end.indices.tolist() == [1]
    assert before_end.token_ids.T.tolist() == [list(ended[1:3])]
    assert isinstance(end, StreamItem)
    assert (end.index, end.token_ids, end.finish) == (3, ended[3:], FinishReason.LENGTH)
    assert isinstance(going_on, TokenRun)
    assert [name.request_id for name in going_on.names] == ["q1"]
    assert going_on.indices.tolist() == [1]
    assert going_on.token_ids.T.tolist() == [list(longer[1:4])]
    driver.read_answers()
    driver.run()
