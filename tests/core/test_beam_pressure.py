"""Searches that do not fit together: beams give way as one, and resume on what is cached."""

import dataclasses
from typing import Any

import pytest
from batcher_driver import BatcherDriver
from beam_checks import ENDINGS, check_streams
from beam_oracle import toy_beams
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_driver import ReplicaDriver, make_limits, make_request, make_scope, prompt_keys

from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.sequence import Phase, begin


@pytest.mark.parametrize("budget", [64, 5, 3, 1])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("beside", ["searches", "forks"])
def test_searches_that_do_not_fit_together_give_way_and_all_end_right(
    budget: int, pipeline_depth: int, beside: str
) -> None:
    # One search alone needs at most 1 + 3 * 7 blocks.
    driver = ReplicaDriver(
        make_limits(num_blocks=22, block_size=2, vocab_size=31),
        max_num_seqs=18,
        max_num_batched_tokens=budget,
        pipeline_depth=pipeline_depth,
    )
    requests = []
    for index in range(6):
        params: dict[str, Any] = {"n": 2, "beam_width": 3}
        if beside == "forks" and index % 2 == 0:
            params = {"n": 2, "temperature": 1.0}
        prompt = [index, 1, 2][: 3 - index % 2]
        request = make_request(prompt, 14, request_id=f"q{index}", **params)
        requests.append(request)
        driver.submit(request)
        driver.step()
    driver.run()
    check_streams(driver, *requests)
    if budget == 64:
        assert driver.replica.batcher.num_preemptions > 0


def test_no_beam_of_the_search_that_is_served_first_gives_way_while_another_request_runs() -> None:
    """Six blocks of 4. When the other one needs its second, it would lose the four tokens in its
    first; a beam has one in a block that nobody shares.
    """
    driver = ReplicaDriver(make_limits(num_blocks=6, vocab_size=31))
    gate = make_request([30], 2, request_id="gate")
    search = make_request([1, 1, 2, 3, 4, 5], 5, request_id="search", beam_width=2)
    other = make_request([29], 12, request_id="other")
    for request in (gate, search, other):
        driver.submit(request)
    driver.cancel(gate)
    while not driver.replica.batcher.num_preemptions:
        assert driver.step()
    assert driver.sequence(other).phase is Phase.WAITING
    assert [s.num_known for s in driver.replica.batcher.running] == [10, 10]
    driver.run()
    check_streams(driver, search, other)
    assert driver.replica.batcher.num_preemptions == 1


def test_beams_that_enter_the_row_of_a_cancelled_group_are_not_forked_in_its_place() -> None:
    driver = ReplicaDriver(make_limits(num_blocks=40, vocab_size=31), max_num_seqs=10)
    ending = make_request([30], 2, request_id="ending", beam_width=2)
    group = make_request(range(9, 14), 8, request_id="group", n=3, temperature=1.0)
    search = make_request(range(5), 8, request_id="search", n=2, beam_width=4)
    other = make_request([20], 6, request_id="other")
    for request in (ending, group, search, other):
        driver.submit(request)
    driver.step()
    assert driver.plan is not None
    assert len(driver.plan.rows) == 5, "one search ends, and three prompts are computed"
    # As the first search ends the row of the group is freed, and the other search forks into it.
    driver.cancel(group)
    driver.run()
    assert driver.reader().stream(group, 0).finish is FinishReason.CANCELLED
    check_streams(driver, ending, search, other)


@pytest.mark.parametrize("budget", [64, 3, 2, 1])
@pytest.mark.parametrize("num_steps", range(1, 15))
@pytest.mark.parametrize("again_after", [None, 1, 5])
def test_a_search_that_gave_way_computes_its_common_part_once(
    again_after: int | None, num_steps: int, budget: int
) -> None:
    # Of these beams some have more in common with another one than with the best.
    limits = make_limits(num_blocks=64, block_size=2, vocab_size=31)
    request = make_request(range(2, 9), 20, n=4, beam_width=4)
    run = BatcherDriver(request, limits, budget)
    search = run.first.beam
    assert search is not None
    for _ in range(num_steps):
        run.step()
    for _ in range(again_after or 0):
        preempt_and_lose(run, search)
        run.step()
    known = [list(sequence.tokens) for sequence in search.sequences]
    preempt_and_lose(run, search)
    before = len(run.rank.history)
    while [list(sequence.tokens) for sequence in search.sequences] == known:
        run.step()
    steps = run.rank.history[before:]
    length = len(known[0])
    # Of each what it has in common with one of those before it.
    common = sum(
        min(max(_num_common(other, own) for other in known[:rank]), length - 1) // 2 * 2
        for rank, own in enumerate(known)
        if rank
    )
    computed = sum(row.num_tokens for step in steps for row in step)
    assert computed == length * len(known) - common
    while run.batcher.num_running:
        run.step()
    found, _num_steps = toy_beams(request, limits)
    got = [(one.token_ids, one.cumulative) for one in search.hypotheses]
    assert got == [(one.token_ids, one.cumulative) for one in found]
    assert run.pool.num_held == 0


def preempt_and_lose(run: BatcherDriver, search: BeamGroup) -> None:
    """Make a search give way, and evict all that the cache holds of it."""
    run.batcher.preempt(search.first)
    assert {sequence.phase for sequence in search.sequences} == {Phase.WAITING}
    assert (run.pool.num_held, run.batcher.num_running, run.batcher.num_waiting) == (0, 0, 1)
    lost = run.kv.grow(run.kv.open(()), run.limits.num_slots)
    assert lost is not None
    run.pool.release(lost)


def _num_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@pytest.mark.parametrize(
    ("num_steps", "num_common", "num_blocks"),
    [
        # 8 tokens of which all but the last are shared: one of two blocks each is their own.
        (1, [7, 7, 7], 3 * (2 - 1)),
        (2, [8, 7, 7], (3 - 2) + 2 * (3 - 1)),
        (4, [10, 10, 10], 3 * (3 - 2)),
        (5, [11, 11, 11], 3 * (3 - 2)),
        (6, [11, 12, 11], (4 - 2) + (4 - 3) + (4 - 2)),
        (7, [13, 11, 13], (4 - 3) + (4 - 2) + (4 - 3)),
    ],
)
def test_the_blocks_that_beams_need_to_enter_are_those_that_they_then_take(
    num_steps: int, num_common: list[int], num_blocks: int
) -> None:
    limits = make_limits(num_blocks=64, vocab_size=31)
    run = BatcherDriver(make_request(range(2, 9), 20, n=4, beam_width=4), limits)
    search = run.first.beam
    assert search is not None
    for _ in range(num_steps):
        run.step()
    preempt_and_lose(run, search)
    assert [entry.num_common for entry in search.entries] == num_common
    assert search.num_blocks_to_enter == num_blocks
    num_known, num_held = search.first.num_known, 0
    while search.first.num_known == num_known:
        plan = run.batcher.plan_step()
        assert plan is not None
        run.plans.append(plan)
        num_held = run.pool.num_held
        run.finish_oldest()
    assert num_held == -(-num_known // 4) + num_blocks
    assert search.num_blocks_to_enter == 0


def run_that_lost_a_search(num_blocks: int) -> tuple[BatcherDriver, BeamGroup]:
    """A search of three beams has given way; of its 13 tokens the first one needs 4 blocks."""
    limits = make_limits(num_blocks, vocab_size=31)
    run = BatcherDriver(make_request(range(2, 9), 20, n=3, beam_width=3), limits)
    search = run.first.beam
    assert search is not None
    for _ in range(6):
        run.step()
    preempt_and_lose(run, search)
    assert (search.first.num_known, search.num_blocks_to_enter) == (13, 3)
    return run, search


@pytest.mark.parametrize("num_available", [6, 7])
def test_a_search_that_gave_way_starts_where_there_are_blocks_for_all_of_its_beams(
    num_available: int,
) -> None:
    run, search = run_that_lost_a_search(num_blocks=16)
    assert run.kv.grow(run.kv.open(()), 4 * (16 - num_available)) is not None
    assert (run.batcher.plan_step() is not None) == (num_available == 7)
    assert search.first.phase is (Phase.RUNNING if num_available == 7 else Phase.WAITING)


@pytest.mark.parametrize("num_spare", [0, 1])
def test_nobody_starts_on_the_blocks_of_beams_that_are_yet_to_enter(num_spare: int) -> None:
    # Of 13 tokens the first beam needs 4 blocks, and the two others 2 and 1 of their own.
    num_blocks = 4 + 3
    # Another one needs 2, and leaves one for each of the three.
    num_blocks += 2 + 3 - 1 + num_spare
    run, search = run_that_lost_a_search(num_blocks)
    limits = make_limits(num_blocks, vocab_size=31)
    request = make_request([30] * 5, 4, request_id="other")
    scope = make_scope()
    (other,) = begin(request, prompt_keys(request, scope), scope.root(), 1, limits)
    run.batcher.add(other)
    assert run.batcher.plan_step() is not None
    assert search.first.phase is Phase.RUNNING
    assert other.phase is (Phase.RUNNING if num_spare else Phase.WAITING)


def test_all_beams_of_a_search_whose_turn_came_by_age_are_as_urgent_as_whom_it_was_put_before() -> (
    None
):
    driver = ReplicaDriver(
        make_limits(num_blocks=13, vocab_size=31), max_num_seqs=4, oldest_every=1
    )
    search = make_request(range(6), 9, n=2, beam_width=4, priority=1)
    urgent = make_request([9, 8], 6, request_id="urgent", temperature=1.0, n=2)
    driver.submit(search)
    for _ in range(4):
        driver.step()
    assert [sequence.priority for sequence in driver.replica.batcher.running] == [1] * 4
    driver.submit(urgent)
    driver.step()
    assert driver.sequence(urgent).phase is Phase.WAITING
    driver.step()
    assert [sequence.priority for sequence in driver.replica.batcher.running] == [0] * 4
    driver.run()
    check_streams(driver, search, urgent)
    assert driver.replica.batcher.num_preemptions == 1


def test_what_the_cache_still_holds_of_each_beam_is_not_computed_again() -> None:
    limits = make_limits(num_blocks=40, block_size=2, vocab_size=31)
    run = BatcherDriver(make_request(range(1, 8), 20, n=3, beam_width=3), limits)
    search = run.first.beam
    assert search is not None
    for _ in range(14):
        run.step()
    known = [list(sequence.tokens) for sequence in search.sequences]
    run.batcher.preempt(search.first)
    before = len(run.rank.history)
    while [list(sequence.tokens) for sequence in search.sequences] == known:
        run.step()
    computed = sum(row.num_tokens for step in run.rank.history[before:] for row in step)
    assert computed == 3 * ((len(known[0]) - 1) % 2 + 1)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_searches_of_any_kind_under_any_pressure_find_what_they_find_alone(
    data: st.DataObject,
) -> None:
    draw = data.draw
    limits = make_limits(
        draw(st.integers(4, 30)),
        draw(st.integers(1, 4)),
        vocab_size=draw(st.sampled_from([31, 5])),
        eos_token_ids=(0,),
    )
    driver = ReplicaDriver(
        limits,
        max_num_seqs=draw(st.integers(2, 9)),
        max_num_batched_tokens=draw(st.sampled_from([64, 7, 3, 1])),
        pipeline_depth=draw(st.sampled_from([1, 2])),
        max_decode_steps=draw(st.sampled_from([1, 5])),
    )
    requests = []
    for index in range(draw(st.integers(1, 6))):
        width = draw(st.integers(1, 6))
        length_penalty, early_stopping = draw(st.sampled_from(ENDINGS))
        request = make_request(
            draw(st.lists(st.integers(1, 2), min_size=1, max_size=9)),
            draw(st.sampled_from([9, 5, 14, 2, 1])),
            request_id=f"q{index}",
            priority=draw(st.integers(0, 1)),
            n=min(width, draw(st.integers(1, 4))),
            beam_width=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        if draw(st.booleans()):
            params = dataclasses.replace(
                request.params, beam_width=None, length_penalty=1.0, early_stopping=False
            )
            request = dataclasses.replace(request, params=params)
        try:
            driver.submit(request)
        except InvalidInputError:
            driver.reader().consumer.abandon(request.request_id)
            continue
        requests.append(request)
        for _ in range(draw(st.integers(0, 6))):
            driver.step()
    driver.run()
    check_streams(driver, *requests)
