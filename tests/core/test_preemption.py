"""Who gives way among running sequences, and that it never keeps all from going on."""

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.config import BatchConfig, QueuePolicy
from rayserve_paged.core.request import Request
from rayserve_paged.core.sequence import Phase
from rayserve_paged.sim.fingerprint_rank import oracle

POLICIES: tuple[QueuePolicy, ...] = get_args(QueuePolicy)


def submit_in_one_step(driver: ReplicaDriver, *requests: Request) -> None:
    """Keep a step in flight while they arrive, so that they are planned together."""
    gate = make_request([96], 2, request_id="gate")
    driver.submit(gate)
    for request in requests:
        driver.submit(request)
    driver.cancel(gate)
    driver.step()


@pytest.mark.parametrize(("early", "late", "victim"), [(11, 9, "early"), (9, 11, "late")])
def test_whoever_loses_least_for_a_block_gives_way_and_not_whoever_is_served_last(
    early: int, late: int, victim: str
) -> None:
    """Eleven blocks of 4. The prompts take nine, and the two of 11 tokens one more each. When the
    prompt of 9 has grown to 12 and needs a block, it would lose 4 tokens for 3 blocks; the other
    has 14 in 4 blocks by then, and loses the 2 in its tail.
    """
    driver = ReplicaDriver(make_limits(num_blocks=11))
    lengths = {"first": 11, "early": early, "late": late}
    requests = [
        make_request([i] * num_prompt, 8, request_id=name)
        for i, (name, num_prompt) in enumerate(lengths.items())
    ]
    submit_in_one_step(driver, *requests)
    sequences = [driver.sequence(request) for request in requests]
    while not driver.replica.batcher.num_preemptions:
        assert driver.step()
    (waiting,) = [s for s in sequences if s.phase is Phase.WAITING]
    assert waiting.request.request_id == victim
    driver.run()
    for request in requests:
        stream = driver.reader().stream(request, 0)
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)


def test_what_a_sequence_shares_and_what_is_sealed_of_it_count_for_what_they_cost() -> None:
    """Ten blocks of 4. The first needs one more when the early one, besides a head that is shared,
    has 4 sealed blocks and 2 tokens in another one, and the late one 1 sealed block and 1 token.
    """
    driver = ReplicaDriver(make_limits(num_blocks=10))
    head = [7] * 4
    driver.generate(make_request([*head, 8], 1, request_id="head"))
    first = make_request([1] * 5, 20, request_id="first")
    early = make_request([*head, *[2] * 15], 8, request_id="early")
    late = make_request([*head, *[3] * 2], 8, request_id="late")
    submit_in_one_step(driver, first, early, late)
    sequences = {
        name: driver.sequence(request)
        for name, request in zip("fel", (first, early, late), strict=True)
    }
    while not driver.replica.batcher.num_preemptions:
        assert driver.step()
    assert [s.num_known for s in sequences.values()] == [9, 23, 10]
    assert [s.phase for s in sequences.values()] == [Phase.RUNNING, Phase.WAITING, Phase.RUNNING]
    driver.run()
    for request in (first, early, late):
        stream = driver.reader().stream(request, 0)
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)


def test_nobody_gives_way_who_is_served_before_the_last_eight() -> None:
    """Of all but the first, who is served second would lose the least: 1 token for 6 blocks. Each
    of the others loses 1 for 3.
    """
    driver = ReplicaDriver(make_limits(num_blocks=33), 16, max_num_batched_tokens=256)
    lengths = [9, 18, *[6] * 8]
    requests = [
        make_request([i] * num_prompt, 9, request_id=f"q{i}")
        for i, num_prompt in enumerate(lengths)
    ]
    submit_in_one_step(driver, *requests)
    sequences = [driver.sequence(request) for request in requests]
    while not driver.replica.batcher.num_preemptions:
        assert driver.step()
    assert [s.num_known for s in sequences] == [length + 4 for length in lengths]
    assert [s.phase for s in sequences] == [*[Phase.RUNNING] * 9, Phase.WAITING]
    driver.run()
    for request in requests:
        stream = driver.reader().stream(request, 0)
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)


def test_nobody_makes_way_who_is_served_before_the_last_eight() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=64), 9, max_num_batched_tokens=256)
    lows = [
        make_request([i] * num_prompt, 9, request_id=f"low{i}", priority=1)
        for i, num_prompt in enumerate([17, *[6] * 8])
    ]
    submit_in_one_step(driver, *lows)
    sequences = [driver.sequence(request) for request in lows]
    urgent = make_request([50], 1, request_id="urgent")
    driver.submit(urgent)
    driver.step()
    # A row is short. The first of the lower ones would lose 2 tokens for 5 blocks.
    assert [s.phase for s in sequences] == [*[Phase.RUNNING] * 8, Phase.WAITING]
    driver.run()
    assert driver.replica.batcher.num_preemptions == 1


def test_the_blocks_that_siblings_share_are_no_reason_to_preempt_one() -> None:
    limits = make_limits(num_blocks=14)
    driver = ReplicaDriver(limits)
    first = make_request([1] * 8, 20, request_id="first")
    group = make_request([2] * 15, 14, request_id="group", n=2, temperature=1.0)
    submit_in_one_step(driver, first, group)
    driver.run()
    assert driver.replica.batcher.num_preemptions > 0
    for sibling in range(2):
        stream = driver.reader().stream(group, sibling)
        assert (stream.token_ids, stream.finish) == oracle(group, limits, sibling)


def test_when_nobody_has_a_window_any_more_nobody_waits_for_blocks_from_a_step_in_flight() -> None:
    """Where somebody has a window, the steps in flight may let go of the blocks that are short."""
    limits = make_limits(num_blocks=14)
    driver = ReplicaDriver(limits, max_num_batched_tokens=5, pipeline_depth=2)
    driver.generate(make_request([1, 2], 2, request_id="windowed", window=4))
    # The five siblings take the whole budget, so that the long prompt is in no step any more.
    prefill = make_request([40] * 30, 20, request_id="prefill", priority=1)
    group = make_request([41], 20, request_id="group", n=5, temperature=1.0)
    driver.submit(prefill)
    driver.step()
    driver.submit(group)
    while driver.sequence_of(group, 0).num_known < 4:
        assert (driver.replica.batcher.num_preemptions, len(driver.plans)) == (0, 2)
        driver.step()
    # Each sibling needs its second block, and there are three.
    assert driver.sequence(prefill).phase is Phase.WAITING
    assert (driver.replica.batcher.num_preemptions, len(driver.plans)) == (1, 2)
    driver.run()
    stream = driver.reader().stream(prefill, 0)
    assert (stream.token_ids, stream.finish) == oracle(prefill, limits)


def test_the_first_served_gives_way_to_nobody_who_is_not_more_urgent() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=12), max_num_seqs=4)
    requests = [make_request([i] * 6, 30, request_id=f"q{i}") for i in range(4)]
    submit_in_one_step(driver, *requests)
    first = driver.sequence(requests[0])
    driver.run()
    assert first.num_preemptions == 0
    assert driver.replica.batcher.num_preemptions > 0


def test_an_urgent_request_preempts_no_more_than_it_needs_and_none_where_it_cannot_start() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=32), max_num_seqs=4)
    lows = [make_request([i] * 8, 40, request_id=f"low{i}", priority=3) for i in range(3)]
    keeps = make_request([9] * 8, 40, request_id="keeps")
    submit_in_one_step(driver, keeps, *lows)
    pair = make_request([7] * 5, 4, request_id="pair", priority=1, n=2, temperature=1.0)
    driver.submit(pair)
    driver.step()
    assert driver.replica.batcher.num_preemptions == 2
    assert driver.sequence(keeps).phase is Phase.RUNNING
    four = make_request([5] * 5, 4, request_id="four", priority=1, n=4, temperature=1.0)
    driver.submit(four)
    driver.step()
    # Even if every lower one gave way, the four would not fit beside those that stay.
    assert driver.replica.batcher.num_preemptions == 2
    driver.run()
    for low in lows:
        stream = driver.reader().stream(low, 0)
        assert (stream.token_ids, stream.finish) == oracle(low, driver.limits)


def test_equals_never_preempt_each_other_at_the_limit_under_any_policy() -> None:
    for policy in POLICIES:
        driver = ReplicaDriver(make_limits(num_blocks=64), max_num_seqs=2, policy=policy)
        requests = [
            make_request([i] * 5, 20 - i, request_id=f"q{i}", priority=-i) for i in range(5)
        ]
        if policy == "priority":
            requests = [make_request([i] * 5, 9, request_id=f"q{i}") for i in range(5)]
        for request in requests:
            driver.submit(request)
        driver.run()
        assert driver.replica.batcher.num_preemptions == 0


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(3, 12),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([1, 3, 64]),
    max_num_seqs=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
    oldest_every=st.sampled_from([None, 1, 3]),
    pipeline_depth=st.sampled_from([1, 2]),
)
def test_no_schedule_goes_round_in_circles(
    seed: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    policy: QueuePolicy,
    oldest_every: int | None,
    pipeline_depth: int,
) -> None:
    """Whatever preempts whom, each step takes the first served on, and the first only changes
    for one that is served before it: so all end, in a number of steps that is bounded.
    """
    limits = make_limits(num_blocks, block_size, max_num_seqs=max_num_seqs)
    driver = ReplicaDriver(
        limits,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        pipeline_depth=pipeline_depth,
        policy=policy,
        oldest_every=oldest_every,
    )
    draw = random.Random(seed)
    most = num_blocks * block_size
    requests = []
    for i in range(7):
        num_prompt = draw.randint(1, most)
        max_tokens = draw.randint(1, most - num_prompt + 1)
        prompt = [draw.randrange(2) for _ in range(num_prompt)]
        priority = draw.randint(-1, 1)
        requests.append(make_request(prompt, max_tokens, request_id=f"q{i}", priority=priority))
    streams = [driver.submit(request) for request in requests]
    batcher = driver.replica.batcher
    num_steps = 0
    while driver.plan is not None:
        num_steps += 1
        assert num_steps < 5000
        running = batcher.running
        first = running[0]
        num_before = batcher.num_computed(first) + first.num_outputs
        driver.step()
        if first.phase is Phase.RUNNING and first is batcher.running[0] and not batcher.retiring:
            in_flight = any(first.row in plan.rows for plan in batcher.in_flight)
            num_after = batcher.num_computed(first) + first.num_outputs
            assert in_flight or num_after > num_before
        elif first.phase is Phase.WAITING:
            assert batcher.running[0].order_key() < first.order_key()
    for request, stream in zip(requests, streams, strict=True):
        driver.poll()
        assert (stream.token_ids, stream.finish) == oracle(request, limits)


def test_an_unknown_policy_and_a_weight_that_is_none_are_refused() -> None:
    for fields in (
        {"policy": "lottery"},
        {"oldest_every": 0},
        {"tenant_weights": {"a": 0.0}},
        {"tenant_weights": {"a": float("inf")}},
        {"tenant_weights": "not json"},
        {"max_num_waiting": -1},
        {"max_pending_tokens": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(fields))):
            BatchConfig.model_validate(fields)
