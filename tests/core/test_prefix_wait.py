"""Requests wait for a prefix that another one is computing, and never for ever."""

import pytest
from replica_driver import ReplicaDriver, Stream, make_limits, make_request

from rayserve_paged.core import policy
from rayserve_paged.core.replica_messages import StepFailed
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.sequence import Phase
from rayserve_paged.sim.fingerprint_rank import oracle

BLOCK_SIZE = 16
FIRST, SECOND = "first", "second"


def num_computed_tokens(driver: ReplicaDriver) -> int:
    return sum(row.num_tokens for step in driver.rank.history for row in step)


def submit_together(driver: ReplicaDriver, requests: list[Request]) -> list[Stream]:
    """Submit requests while a step runs, so that one plan considers all of them."""
    driver.submit(make_request([96], 1, request_id="before"))
    streams = [driver.submit(request) for request in requests]
    driver.step()
    return streams


def chunked_pair(driver: ReplicaDriver) -> tuple[Request, Request]:
    """Submit two prompts of 10 blocks that share 9, of which the first has computed one block."""
    shared = list(range(9 * BLOCK_SIZE))
    first, second = (
        make_request([*shared, *[last] * BLOCK_SIZE], 1, request_id=name)
        for name, last in ((FIRST, 200), (SECOND, 201))
    )
    driver.submit(first)
    driver.step()
    driver.submit(second)
    driver.step()
    return first, second


def make_driver(
    budget: int = BLOCK_SIZE, *, pipeline_depth: int = 1, max_prefix_wait_steps: int = 64
) -> ReplicaDriver:
    return ReplicaDriver(
        make_limits(128, BLOCK_SIZE, vocab_size=500),
        max_num_batched_tokens=budget,
        pipeline_depth=pipeline_depth,
        max_prefix_wait_steps=max_prefix_wait_steps,
    )


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_requests", [2, 5, 8])
def test_one_prompt_that_many_requests_share_is_computed_once(
    num_requests: int, pipeline_depth: int
) -> None:
    limits = make_limits(128, BLOCK_SIZE, vocab_size=500)
    for max_wait_steps in (64, 0):
        driver = ReplicaDriver(
            limits,
            max_num_seqs=9,
            max_num_batched_tokens=2048,
            pipeline_depth=pipeline_depth,
            max_prefix_wait_steps=max_wait_steps,
        )
        prompt = range(10 * BLOCK_SIZE)
        requests = [make_request(prompt, 1, request_id=f"q{i}") for i in range(num_requests)]
        streams = submit_together(driver, requests)
        driver.run()
        for request, stream in zip(requests, streams, strict=True):
            assert (stream.token_ids, stream.finish) == oracle(request, limits)
        # Whoever has waited computes its last block alone, which gives it its logits.
        others = 16 if max_wait_steps else 160
        assert num_computed_tokens(driver) == 1 + 160 + (num_requests - 1) * others
        cached = [stream.num_cached_tokens for stream in streams]
        assert cached == [0, *[160 - others] * (num_requests - 1)]
        assert driver.replica.batcher.num_hit_tokens == sum(cached)


@pytest.mark.parametrize(("num_blocks", "pipeline_depth"), [(5, 1), (5, 2), (7, 1), (10, 2)])
def test_b60_a_prefix_that_is_being_computed_is_waited_for_and_no_step_is_over_budget(
    num_blocks: int, pipeline_depth: int
) -> None:
    limits = make_limits(num_blocks, block_size=16)
    driver = ReplicaDriver(limits, max_num_batched_tokens=64, pipeline_depth=pipeline_depth)
    shared = list(range(32))
    requests = [make_request(shared + [40 + i] * 16, 1, request_id=f"q{i}") for i in range(3)]
    # Takes 48 of the budget of one step, so that the first has 16 tokens done when the others
    # are looked at.
    fills = num_blocks > 5
    if fills:
        for i in range(pipeline_depth):
            driver.submit(make_request([90], 1, request_id=f"before{i}"))
        driver.submit(make_request([91] * 48, 1, request_id="other", priority=-1))
    streams = [driver.submit(request) for request in requests]
    driver.run()
    for request, stream in zip(requests, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, limits)
    assert [stream.num_cached_tokens for stream in streams] == [0, 32, 32]
    assert num_computed_tokens(driver) == 48 + 16 + 16 + (pipeline_depth + 48 if fills else 0)
    assert max(sum(row.num_tokens for row in step) for step in driver.rank.history) <= 64
    chunks = [[row.num_tokens for row in step] for step in driver.rank.history]
    if fills:
        assert [48, 16] in chunks, "16 of the first were done"
    assert driver.num_free == num_blocks


def test_a_wait_ends_with_the_last_common_block_and_not_before() -> None:
    driver = make_driver()
    _first, second = chunked_pair(driver)
    waiter = driver.sequence(second)
    sealed = []
    while waiter.phase is Phase.WAITING:
        sealed.append(driver.replica.batcher.running[0].num_sealed)
        driver.step()
    assert sealed == [2, 3, 4, 5, 6, 7, 8]
    driver.run()
    assert waiter.num_cached_tokens == 9 * BLOCK_SIZE


def test_nobody_waits_for_a_block_that_it_could_not_take() -> None:
    driver = make_driver()
    first = make_request(range(10 * BLOCK_SIZE), 1, request_id=FIRST)
    driver.submit(first)
    driver.step()
    # All of its four blocks are shared, and the last token of the fourth is to be computed.
    second = make_request(range(4 * BLOCK_SIZE), 1, request_id=SECOND)
    driver.submit(second)
    while driver.sequence(second).phase is Phase.WAITING:
        driver.step()
    assert driver.sequence(first).num_sealed == 3
    assert driver.sequence(second).num_cached_tokens == 3 * BLOCK_SIZE
    driver.run()


def test_others_overtake_a_request_that_waits_for_a_prefix() -> None:
    driver = make_driver(budget=2 * BLOCK_SIZE)
    first, second = chunked_pair(driver)
    other = make_request([250] * 8, 1, request_id="other")
    stream = driver.submit(other)
    driver.step()
    driver.step()
    driver.poll()
    assert stream.token_ids == oracle(other, driver.limits).token_ids
    assert driver.sequence(second).phase is Phase.WAITING
    assert driver.replica.batcher.waiting == (driver.sequence(second),)
    assert driver.sequence(first).phase is Phase.RUNNING
    driver.run()


def test_nobody_who_starts_passes_one_that_waits_for_a_prefix() -> None:
    driver = ReplicaDriver(
        make_limits(128, BLOCK_SIZE, vocab_size=500),
        max_num_seqs=3,
        max_num_batched_tokens=2 * BLOCK_SIZE,
        max_prefix_wait_steps=3,
        oldest_every=2,
    )
    chunked_pair(driver)
    low, high, urgent = (
        make_request([250 + i], 9, request_id=f"q{i}", priority=priority)
        for i, priority in enumerate((0, -1, -1))
    )
    driver.submit(urgent)
    driver.step()
    for request in (low, high):
        driver.submit(request)
    driver.step()
    # Had the first of the urgent ones passed anybody, it would be the turn of the oldest.
    phases = [driver.sequence(request).phase for request in (urgent, high, low)]
    assert phases == [Phase.RUNNING, Phase.RUNNING, Phase.WAITING]
    driver.run()


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_request_starts_at_once_when_the_one_that_it_waits_for_is_cancelled(
    pipeline_depth: int,
) -> None:
    driver = make_driver(pipeline_depth=pipeline_depth)
    first, second = chunked_pair(driver)
    waiter = driver.sequence(second)
    assert waiter.phase is Phase.WAITING
    driver.cancel(first)
    driver.step()
    assert waiter.phase is Phase.RUNNING
    assert waiter.num_cached_tokens is not None
    assert waiter.num_cached_tokens >= 2 * BLOCK_SIZE, "what was computed is not lost"
    driver.run()
    stream = driver.reader().streams[second.request_id]
    assert (stream.token_ids, stream.finish) == oracle(second, driver.limits)


def test_a_request_starts_at_once_when_the_one_that_it_waits_for_is_preempted() -> None:
    limits = make_limits(14)
    driver = ReplicaDriver(limits, max_num_batched_tokens=6)
    # Each takes a further block every four steps, and has one kept for it when the first starts.
    urgent = [make_request([90 + i], 16, request_id=f"u{i}", priority=-1) for i in range(2)]
    first, second = (make_request([*range(36), i], 1, request_id=f"q{i}") for i in range(2))
    requests = [*urgent, first, second]
    streams = [driver.submit(request) for request in requests]
    owner, waiter = driver.sequence(first), driver.sequence(second)
    num_steps_waited = 0
    while not owner.num_preemptions:
        driver.step()
        num_steps_waited += owner.phase is Phase.RUNNING and waiter.phase is Phase.WAITING
    assert num_steps_waited >= 3
    assert owner.num_sealed == 8
    assert not list(driver.replica.batcher.prefix_waits.waits()), "nobody waits for it any more"
    assert driver.replica.batcher.waiting == (owner, waiter)
    driver.run()
    for request, stream in zip(requests, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, limits)


def test_a_request_whose_wait_is_cancelled_never_starts() -> None:
    driver = make_driver()
    first, second = chunked_pair(driver)
    driver.cancel(second)
    assert driver.replica.batcher.waiting == ()
    assert driver.replica.batcher.num_waiting == 0
    driver.run()
    assert driver.reader().streams[second.request_id].finish is FinishReason.CANCELLED
    assert num_computed_tokens(driver) == 160
    assert driver.reader().streams[first.request_id].finish is FinishReason.LENGTH


def test_a_failed_step_lets_who_waits_go_on_elsewhere_as_well() -> None:
    driver = make_driver()
    first, second = chunked_pair(driver)
    assert driver.plan is not None
    driver.send(StepFailed(driver.plan.step_id, "a rank died"))
    driver.poll()
    assert driver.goes_on(first)
    assert driver.goes_on(second)
    assert driver.replica.batcher.num_waiting == 0


@pytest.mark.parametrize("max_wait_steps", [1, 3, 5])
def test_a_wait_ends_after_so_many_steps(max_wait_steps: int) -> None:
    driver = make_driver(budget=2 * BLOCK_SIZE, max_prefix_wait_steps=max_wait_steps)
    shared = list(range(30 * BLOCK_SIZE))
    first = make_request([*shared, 490], 1, request_id=FIRST)
    driver.submit(first)
    driver.step()
    second = make_request([*shared, 491], 1, request_id=SECOND)
    driver.submit(second)
    waiter = driver.sequence(second)
    num_plans = 0
    while waiter.phase is Phase.WAITING:
        driver.step()
        num_plans += 1
    # The plan that ends the wait is not among those that it waited for.
    assert num_plans == max_wait_steps + 1
    assert waiter.waits_since is None, "it may wait again when it resumes"
    driver.run()
    # What the first had computed meanwhile is in the cache.
    assert waiter.num_cached_tokens == 2 * BLOCK_SIZE * (max_wait_steps + 2)
    for request in (first, second):
        stream = driver.reader().streams[request.request_id]
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)


def test_each_wait_has_a_bound_of_its_own() -> None:
    driver = make_driver(budget=2 * BLOCK_SIZE, max_prefix_wait_steps=6)
    shared = list(range(30 * BLOCK_SIZE))
    first, second, third = (
        make_request([*shared, 490 + i], 1, request_id=f"q{i}") for i in range(3)
    )
    driver.submit(first)
    driver.step()
    driver.submit(second)
    for _ in range(4):
        driver.step()
    driver.submit(third)
    started_after = {}
    for num_steps in range(12):
        for request in (second, third):
            if driver.sequence(request).phase is Phase.RUNNING:
                started_after.setdefault(request.request_id, num_steps)
        driver.step()
    # Seven plans after each was submitted, of which the second has had four.
    assert started_after == {second.request_id: 3, third.request_id: 7}
    driver.run()
    for request in (first, second, third):
        stream = driver.reader().streams[request.request_id]
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)


def test_a_prompt_that_would_gain_less_than_a_block_does_not_wait() -> None:
    # One block of 16 whose last token must be computed: nothing of it can be taken.
    driver = make_driver(budget=64)
    twins = [make_request(range(BLOCK_SIZE), 1, request_id=name) for name in "ab"]
    submit_together(driver, twins)
    assert driver.replica.batcher.num_running == 2
    driver.run()


def test_samples_of_one_prompt_wait_as_one() -> None:
    driver = make_driver(budget=256)
    requests = [
        make_request(range(64), 3, request_id=f"q{i}", temperature=1.0, seed=i, n=3)
        for i in range(2)
    ]
    submit_together(driver, requests)
    driver.run()
    for request in requests:
        for sibling in range(3):
            stream = driver.reader().stream(request, sibling)
            assert (stream.token_ids, stream.finish) == oracle(request, driver.limits, sibling)
    # Two prompts in which 48 tokens are shared, and two further tokens of each of six samples.
    assert num_computed_tokens(driver) == 1 + 64 + 16 + 6 * 2


@pytest.mark.parametrize(
    ("num_blocks_gained", "num_steps_waited", "others_run", "waits"),
    [
        (1, 0, True, True),
        (9, 63, True, True),
        (9, 64, True, False),
        (0, 0, True, False),
        (9, 0, False, False),
    ],
)
def test_waiting_pays_from_one_block_on_for_so_many_steps_while_others_run(
    num_blocks_gained: int, num_steps_waited: int, others_run: bool, waits: bool
) -> None:
    snapshot = policy.PrefixWait(num_blocks_gained, num_steps_waited, 64, others_run)
    assert policy.should_wait_for_prefix(snapshot) is waits
