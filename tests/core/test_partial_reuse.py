"""Leading slots of cached blocks are copied where a prompt diverges, and every token is counted."""

from collections.abc import Sequence

import pytest
from replica_driver import ReplicaDriver, Stream, make_limits, make_request

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import (
    FULL_ATTENTION,
    ONE_FULL_GROUP,
    AttentionWindow,
)
from rayserve_paged.core.block_pool import BlockState
from rayserve_paged.core.ids import BlockId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.sequence import Phase
from rayserve_paged.sim.fingerprint_rank import oracle

SEVERAL_GROUPS = (
    (FULL_ATTENTION, AttentionWindow(3)),
    (AttentionWindow(4, 1), FULL_ATTENTION, AttentionWindow(30)),
)


def make_driver(
    num_blocks: int = 64,
    block_size: int = 16,
    *,
    layer_groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP,
    partial_reuse: bool = True,
    pipeline_depth: int = 1,
    max_decode_steps: int = 1,
    budget: int = 256,
    poison: Sequence[tuple[int, ...]] = (),
) -> ReplicaDriver:
    return ReplicaDriver(
        make_limits(num_blocks, block_size, vocab_size=500, layer_groups=layer_groups),
        max_num_batched_tokens=budget,
        pipeline_depth=pipeline_depth,
        max_decode_steps=max_decode_steps,
        partial_reuse=partial_reuse,
        poison=poison,
    )


def run(driver: ReplicaDriver, request: Request) -> tuple[int, int]:
    """Run one request alone and compare it; return its cached and its computed prompt tokens."""
    num_steps = len(driver.rank.history)
    (stream,) = driver.generate(request)
    assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
    num_prompt = len(request.prompt_token_ids)
    rows = [row for step in driver.rank.history[num_steps:] for row in step]
    computed = sum(row.num_tokens for row in rows if row.num_computed < num_prompt)
    assert stream.num_cached_tokens + computed == num_prompt
    return stream.num_cached_tokens, computed


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_b53_a_match_is_never_longer_than_what_was_indexed_or_the_query(
    partial_reuse: bool,
) -> None:
    story = list(range(100, 160))
    driver = make_driver(partial_reuse=partial_reuse)
    hits = []
    for num_tokens in (40, 39, 33, 48):
        fresh = make_driver(partial_reuse=partial_reuse)
        run(fresh, make_request(story[:40], 1))
        hits.append(run(fresh, make_request(story[:num_tokens], 1))[0])
    assert hits == ([39, 38, 32, 40] if partial_reuse else [32, 32, 32, 32])
    run(driver, make_request(story[:40], 1))
    run(driver, make_request(story[:48], 1))
    published = sum(len(report.published) for report in driver.reports)
    assert published == 3, "whole blocks alone are told"
    after = [run(driver, make_request(story[:n], 1))[0] for n in (40, 48)]
    assert after == ([39, 47] if partial_reuse else [32, 32])


def test_b56_a_frozen_partial_block_goes_before_any_full_one() -> None:
    driver = make_driver(num_blocks=4, block_size=4)
    pool = driver.replica.kv.pool
    a = make_request(range(9), 1)
    run(driver, a)
    assert (pool.num_free, pool.num_cached) == (1, 3)
    partial = pool.cached_ids[0]
    assert pool.is_frozen(partial)
    b = make_request(range(60, 67), 1)
    unused = pool.free_ids[0]
    driver.submit(b)
    assert set(driver.sequence(b).table.block_ids) == {unused, partial}
    driver.run()
    assert run(driver, a)[0] == 8


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("common", [1, 15, 16, 17, 31, 40, 47])
def test_a_prompt_that_diverges_inside_a_block_takes_all_common_tokens(
    common: int, pipeline_depth: int
) -> None:
    driver = make_driver(pipeline_depth=pipeline_depth)
    first = make_request(range(48), 3)
    run(driver, first)
    second = make_request([*range(common), *[499] * 20], 5)
    assert run(driver, second) == (common, 20)
    assert driver.replica.batcher.num_hit_tokens == common
    assert driver.replica.batcher.num_queried_tokens == 48 + common + 20
    # Nothing of the first was touched: all but its last prompt token is still there.
    assert run(driver, first) == (47, 1)


@pytest.mark.parametrize("layer_groups", SEVERAL_GROUPS)
def test_leading_slots_are_copied_in_every_layer_group(
    layer_groups: tuple[AttentionWindow, ...],
) -> None:
    driver = make_driver(layer_groups=layer_groups)
    first = make_request(range(40), 12)
    assert run(driver, first) == (0, 40)
    # Inside a block that is full, inside the tail, and behind it.
    assert run(driver, make_request([*range(25), 400, 401], 1)) == (25, 2)
    outputs = oracle(first, driver.limits).token_ids
    assert run(driver, make_request([*range(40), *outputs[:5], 402], 1)) == (45, 1)
    assert run(driver, make_request([*range(40), *outputs, 403], 1)) == (51, 2)
    again = make_request([*range(38), 404, 405], 3, request_id="again")
    stream = driver.submit(again)
    assert driver.plan is not None
    assert driver.plan.copies[:, 2].tolist() == [6] * len(layer_groups)
    driver.run()
    assert stream.token_ids == oracle(again, driver.limits).token_ids
    assert driver.replica.kv.pool.num_held == 0


@pytest.mark.parametrize("lost", [0, 1])
def test_slots_that_one_layer_group_has_lost_are_not_copied_in_the_others(lost: int) -> None:
    driver = make_driver(block_size=4, layer_groups=SEVERAL_GROUPS[0])
    kv = driver.replica.kv
    run(driver, make_request(range(6), 1))
    frozen = [block_id for block_id in kv.pool.cached_ids if kv.pool.is_frozen(block_id)]
    assert len(frozen) == 2
    # Tails go before full blocks, those of the last group first.
    table = kv.open([])
    assert kv.grow(table, 4 * (kv.pool.num_free + lost)) is not None
    assert sum(map(kv.pool.is_frozen, frozen)) == 2 - lost
    kv.close(table)
    assert run(driver, make_request([*range(6), 90], 1))[0] == (6 if lost == 0 else 4)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    driver = make_driver(block_size=4)
    for num_tokens in (1, 2, 4, 5, 8, 9):
        fresh = make_driver(block_size=4)
        run(fresh, make_request(range(12), 1))
        assert run(fresh, make_request(range(num_tokens), 1)) == (num_tokens - 1, 1)
    assert run(driver, make_request([7], 1)) == (0, 1)
    assert run(driver, make_request([7], 1)) == (0, 1)


def test_slots_of_a_block_that_a_running_sequence_holds_are_copied() -> None:
    driver = make_driver(block_size=4)
    first = make_request(range(9), 20, request_id="first")
    driver.submit(first)
    driver.step()
    second = make_request([0, 1, 2, 3, 4, 5, 99, 98], 4, request_id="second")
    stream = driver.submit(second)
    driver.step()
    assert driver.sequence(second).num_cached_tokens == 6
    tables = [driver.sequence(request).table.block_ids for request in (first, second)]
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]
    driver.run()
    assert (stream.token_ids, stream.finish) == oracle(second, driver.limits)
    assert driver.reader().streams[first.request_id].token_ids == oracle(first, driver.limits)[0]


def test_the_source_of_a_copy_is_held_until_its_step_has_finished_and_not_longer() -> None:
    driver = make_driver(num_blocks=8, block_size=4)
    run(driver, make_request(range(6), 1))
    pool = driver.replica.kv.pool
    (source,) = [block_id for block_id in pool.cached_ids if pool.is_frozen(block_id)]
    driver.submit(make_request([*range(5), 77, 78], 9))
    assert driver.plan is not None
    ((copied_from, _target, num_slots),) = driver.plan.copies.tolist()
    assert (copied_from, num_slots) == (source, 1)
    assert pool.state(source) is BlockState.HELD
    driver.step()
    assert pool.state(source) is BlockState.CACHED
    driver.run()


def test_a_copy_that_does_not_fit_is_done_without() -> None:
    # Three blocks are needed, and the frozen one is the third.
    driver = make_driver(num_blocks=3, block_size=4)
    run(driver, make_request(range(6), 1))
    assert run(driver, make_request([*range(5), *[77] * 5], 1)) == (4, 6)


def test_most_common_tokens_are_found_among_many_blocks_behind_one_parent() -> None:
    driver = make_driver(num_blocks=256, block_size=16)
    for i in range(40):
        run(driver, make_request([*range(16), 20, 21 + i % 5, *[100 + i] * 14], 1))
    request = make_request([*range(16), 20, 22, *[131] * 5, 3, 3, 3], 1)
    assert run(driver, request) == (16 + 7, 3)


@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_prompt", [1, 5, 16, 21])
@pytest.mark.parametrize("num_outputs", [1, 2, 11, 12, 28])
def test_a_second_turn_computes_only_what_is_new(
    num_prompt: int, num_outputs: int, pipeline_depth: int, max_decode_steps: int
) -> None:
    driver = make_driver(pipeline_depth=pipeline_depth, max_decode_steps=max_decode_steps)
    first = make_request(range(num_prompt), num_outputs)
    run(driver, first)
    outputs = oracle(first, driver.limits).token_ids
    second = make_request([*range(num_prompt), *outputs, 400, 401, 402], 9)
    # The last output of the first turn had no KV yet.
    assert run(driver, second) == (num_prompt + num_outputs - 1, 4)
    answer = oracle(second, driver.limits).token_ids
    third = make_request([*second.prompt_token_ids, *answer, 403], 2)
    assert run(driver, third) == (num_prompt + num_outputs + 3 + 9 - 1, 2)
    batcher = driver.replica.batcher
    hits = (num_prompt + num_outputs - 1) + (num_prompt + num_outputs + 11)
    assert batcher.num_hit_tokens == hits
    assert batcher.num_resumed_tokens == 0


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_of_equal_prompts_that_wait_for_the_first_one_token_each_is_computed(
    pipeline_depth: int,
) -> None:
    driver = make_driver(128, pipeline_depth=pipeline_depth, budget=512)
    driver.submit(make_request([450], 1, request_id="before"))
    requests = [make_request(range(160), 3, request_id=f"q{i}") for i in range(6)]
    streams = [driver.submit(request) for request in requests]
    driver.run()
    for request, stream in zip(requests, streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
    assert [stream.num_cached_tokens for stream in streams] == [0, 159, 159, 159, 159, 159]
    assert driver.replica.batcher.num_hit_tokens == 5 * 159
    computed = sum(row.num_tokens for step in driver.rank.history for row in step)
    assert computed == 1 + 160 + 5 * 1 + 6 * 2


def test_without_partial_reuse_a_second_turn_takes_whole_blocks_alone() -> None:
    driver = make_driver(partial_reuse=False)
    first = make_request(range(21), 12)
    run(driver, first)
    outputs = oracle(first, driver.limits).token_ids
    assert run(driver, make_request([*range(21), *outputs, 400], 1)) == (32, 2)
    assert driver.replica.kv.partials is None


def test_the_last_sample_of_a_prompt_leaves_its_own_tail() -> None:
    driver = make_driver(block_size=4)
    request = make_request(range(6), 4, n=2, temperature=1.0, seed=3)
    driver.generate(request)
    for sibling in (0, 1):
        outputs = oracle(request, driver.limits, sibling).token_ids
        follow_up = make_request([*range(6), *outputs, 450], 1)
        assert run(driver, follow_up) == (9, 2)


def test_a_sequence_that_fails_leaves_nothing() -> None:
    driver = make_driver(block_size=4, poison=[(0, 3)])
    (stream,) = driver.generate(make_request(range(6), 9))
    assert stream.error == "draw 3 is poisoned"
    driver.rank.poison.clear()
    assert driver.replica.kv.pool.num_cached == 0
    assert run(driver, make_request(range(6), 1)) == (0, 6)


@pytest.mark.parametrize(
    ("budget", "pipeline_depth", "num_left"), [(5, 1, 10), (5, 2, 15), (10, 1, 15)]
)
def test_a_cancelled_sequence_leaves_what_it_has_computed(
    budget: int, pipeline_depth: int, num_left: int
) -> None:
    driver = make_driver(block_size=16, budget=budget, pipeline_depth=pipeline_depth)
    request = make_request(range(40), 9, request_id="cancelled")
    driver.submit(request)
    driver.step()
    driver.cancel(request)
    driver.run()
    assert driver.reader().streams[request.request_id].finish is FinishReason.CANCELLED
    # One step has finished; those in flight at the cancel go on to their ends. A block that they
    # fill is not published, and keeps all but its last slot.
    assert run(driver, make_request(range(40), 1))[0] == num_left


def test_what_a_preempted_sequence_finds_again_is_counted_apart() -> None:
    driver = make_driver(num_blocks=4, block_size=4, budget=64)
    first = make_request(range(7), 8, request_id="first")
    second = make_request([50, 51, 52, 53, 54], 3, request_id="second")
    streams = [driver.submit(request) for request in (first, second)]
    victim = driver.sequence(second)
    while victim.phase is not Phase.ENDED:
        driver.step()
    driver.run()
    for request, stream in zip((first, second), streams, strict=True):
        assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
    assert driver.replica.batcher.num_hit_tokens == 0
    assert driver.replica.batcher.num_queried_tokens == 12


def with_image(prompt: Sequence[int], digest: bytes, offset: int, num_tokens: int) -> Request:
    attachment = Attachment(digest * 16, offset, num_tokens)
    return make_request(prompt, 1, attachments=(attachment,))


def test_placeholders_of_an_image_are_not_taken_from_another_one() -> None:
    driver = make_driver()
    prompt = [*range(20), *[300] * 8, *range(30, 40)]
    cached = []
    for digest in (b"a", b"b", b"a"):
        (stream,) = driver.generate(with_image(prompt, digest, 20, 8))
        cached.append(stream.num_cached_tokens)
    # Up to the image, whosever it is; for the same one all but the last token.
    assert cached == [0, 20, 37]


def test_a_frozen_block_that_a_longer_one_covers_is_free_again() -> None:
    driver = make_driver(block_size=16)
    pool = driver.replica.kv.pool
    for num_tokens in (3, 5, 9, 15):
        run(driver, make_request(range(num_tokens), 1))
        assert (pool.num_cached, pool.num_free) == (1, 63)
    run(driver, make_request(range(17), 1))
    # The full block covers the fifteen, and a tail of one token is behind it.
    kinds = sorted((pool.is_frozen(b), pool.is_sealed(b)) for b in pool.cached_ids)
    assert kinds == [(False, True), (True, False)]
    assert pool.state(BlockId(pool.cached_ids[0])) is BlockState.CACHED


def streams_of(driver: ReplicaDriver, requests: Sequence[Request]) -> list[Stream]:
    return [driver.reader().streams[request.request_id] for request in requests]


@pytest.mark.parametrize("layer_groups", [ONE_FULL_GROUP, *SEVERAL_GROUPS])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_conversations_in_a_small_pool_are_exact_turn_after_turn(
    pipeline_depth: int, layer_groups: tuple[AttentionWindow, ...]
) -> None:
    driver = make_driver(
        num_blocks=24 * len(layer_groups),
        block_size=4,
        layer_groups=layer_groups,
        budget=16,
        pipeline_depth=pipeline_depth,
    )
    prompts = [[100 + i % 2, *range(i), 200 + i] for i in range(5)]
    for turn in range(4):
        requests = [
            make_request(prompt, 5, request_id=f"q{turn}-{i}") for i, prompt in enumerate(prompts)
        ]
        driver.generate(*requests)
        for i, (request, stream) in enumerate(
            zip(requests, streams_of(driver, requests), strict=True)
        ):
            assert (stream.token_ids, stream.finish) == oracle(request, driver.limits)
            prompts[i] = [*request.prompt_token_ids, *stream.token_ids, 300 + turn]
    assert driver.replica.kv.pool.num_held == 0
    assert driver.replica.batcher.num_hit_tokens > 0
