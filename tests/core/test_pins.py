"""Prefixes that are kept by name: what they hold, what they may, and that requests still fit."""

import dataclasses

import pytest
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.block_pool import BlockState
from rayserve_paged.core.errors import CapacityError, PinLimitError
from rayserve_paged.core.ids import BlockId, PinId
from rayserve_paged.core.replica_messages import (
    FenceReplica,
    PinAnswered,
    PinPrefix,
    ResetCache,
    UnpinPrefix,
)
from rayserve_paged.core.request import admit
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.sim.fingerprint_rank import oracle

SYSTEM, OTHER = PinId("system"), PinId("other")


def make_driver(
    num_blocks: int = 8,
    max_pinned_blocks: int = 3,
    layer_groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP,
) -> ReplicaDriver:
    limits = make_limits(num_blocks, layer_groups=layer_groups)
    return ReplicaDriver(dataclasses.replace(limits, max_pinned_blocks=max_pinned_blocks))


def pin(driver: ReplicaDriver, pin_id: PinId, token_ids: range) -> PinAnswered:
    (answer,) = [
        command
        for command in driver.send(PinPrefix(pin_id, TokenIds.of(token_ids)))
        if isinstance(command, PinAnswered)
    ]
    assert answer.pin_id == pin_id
    return answer


def test_pinned_blocks_are_held_while_everything_else_is_evicted() -> None:
    driver = make_driver()
    request = make_request(range(9), 1)
    driver.generate(request)
    assert pin(driver, SYSTEM, range(9)).num_tokens == 8
    for number in range(5):
        driver.generate(make_request([60 + number] * 16, 1, request_id=f"q{number}"))
    figures = driver.replica.accounting()
    assert (figures.num_pinned_blocks, figures.num_held_blocks) == (2, 2)
    (stream,) = driver.generate(request)
    assert stream.num_cached_tokens == 8
    driver.send(UnpinPrefix(SYSTEM))
    assert driver.replica.accounting().num_pinned_blocks == 0
    assert driver.replica.kv.pool.num_held == 0


def test_a_prefix_of_less_than_a_block_is_no_pin() -> None:
    driver = make_driver()
    driver.generate(make_request(range(3), 1))
    assert pin(driver, SYSTEM, range(3)).num_tokens == 0
    assert SYSTEM not in driver.replica.pins.tables


def test_what_is_not_cached_is_not_pinned_and_only_full_blocks_are() -> None:
    driver = make_driver()
    driver.generate(make_request(range(7), 1))
    assert pin(driver, SYSTEM, range(7)).num_tokens == 4
    assert pin(driver, OTHER, range(50, 60)).num_tokens == 0
    # Nothing is no pin: the name is free for when there is something.
    driver.generate(make_request(range(50, 60), 1, request_id="q1"))
    assert pin(driver, OTHER, range(50, 60)).num_tokens == 8


def test_a_pin_holds_the_blocks_of_its_own_tenant_alone() -> None:
    driver = make_driver()
    for tenant, name in (("a", "q0"), ("b", "q1")):
        driver.generate(make_request(range(9), 1, tenant_salt=tenant, request_id=name))
    assert pin(driver, SYSTEM, range(9)).num_tokens == 0
    answer = driver.send(PinPrefix(OTHER, TokenIds.of(range(9)), RequestScope("b")))[0]
    assert isinstance(answer, PinAnswered)
    assert (answer.num_tokens, answer.refused) == (8, None)
    keys = driver.keys(make_request(range(9), tenant_salt="b"))
    held = driver.replica.pins.tables[OTHER].block_ids
    assert held == [driver.replica.kv.index.block_of(key) for key in keys]


def test_a_pin_is_held_once_however_often_it_is_asked_for_and_let_go_once() -> None:
    driver = make_driver()
    driver.generate(make_request(range(9), 1))
    answers = [pin(driver, SYSTEM, range(9)) for _ in range(3)]
    assert [answer.num_tokens for answer in answers] == [8, 8, 8]
    assert driver.replica.kv.pool.count(BlockId(0)) == 1
    for _ in range(2):
        driver.send(UnpinPrefix(SYSTEM))
    assert driver.replica.kv.pool.state(BlockId(0)) is BlockState.CACHED


def test_blocks_that_two_pins_share_count_once_and_stay_until_both_are_gone() -> None:
    driver = make_driver(max_pinned_blocks=3)
    driver.generate(make_request(range(9), 1))
    driver.generate(make_request([*range(8), 90, 91, 92, 93, 94], 1))
    assert pin(driver, SYSTEM, range(9)).num_tokens == 8
    answer = driver.send(PinPrefix(OTHER, TokenIds.of([*range(8), 90, 91, 92, 93])))[0]
    assert isinstance(answer, PinAnswered)
    assert (answer.num_tokens, answer.refused) == (12, None)
    assert driver.replica.accounting().num_pinned_blocks == 3
    driver.send(UnpinPrefix(SYSTEM))
    assert driver.replica.accounting().num_pinned_blocks == 3
    driver.send(UnpinPrefix(OTHER))
    assert driver.replica.kv.pool.num_held == 0


def test_a_pin_over_the_limit_is_refused_with_the_numbers_and_holds_nothing() -> None:
    driver = make_driver(max_pinned_blocks=3)
    driver.generate(make_request(range(9), 1))
    driver.generate(make_request(range(50, 59), 1))
    pin(driver, SYSTEM, range(9))
    answer = pin(driver, OTHER, range(50, 59))
    assert answer.num_tokens == 0
    error = answer.refused
    assert isinstance(error, PinLimitError)
    assert (error.num_blocks, error.num_pinned_blocks, error.max_pinned_blocks) == (2, 2, 3)
    assert "needs 2 blocks, and of the 3 that pins may hold 2 are pinned" in str(error)
    assert driver.replica.kv.pool.num_held == 2


def test_the_longest_request_that_is_admitted_runs_whatever_is_pinned() -> None:
    driver = make_driver(num_blocks=8, max_pinned_blocks=3)
    driver.generate(make_request(range(13), 1))
    assert pin(driver, SYSTEM, range(12)).num_tokens == 12
    longest = [make_request([60 + i] * 12, 9, request_id=f"q{i}") for i in range(3)]
    with pytest.raises(CapacityError) as refused:
        admit(make_request([60] * 12, 10), driver.limits)
    assert (refused.value.num_blocks_needed, refused.value.num_blocks) == (6, 5)
    streams = driver.generate(*longest)
    for request, stream in zip(longest, streams, strict=True):
        assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert driver.replica.kv.pool.num_held == 3


def test_a_pin_outlives_the_request_that_shares_its_blocks_and_a_failed_one() -> None:
    driver = make_driver()
    driver.generate(make_request(range(9), 1))
    pin(driver, SYSTEM, range(9))
    driver.rank.poison.add((7, 0))
    (failed,) = driver.generate(make_request(range(9), 4, seed=7, request_id="q1"))
    assert failed.error == "draw 0 is poisoned"
    (stream,) = driver.generate(make_request(range(9), 4, request_id="q2"))
    assert stream.num_cached_tokens == 8


@pytest.mark.parametrize("event", [ResetCache(), FenceReplica("lost")])
def test_the_end_of_a_cache_ends_its_pins(event: ResetCache | FenceReplica) -> None:
    driver = make_driver()
    driver.generate(make_request(range(9), 1))
    pin(driver, SYSTEM, range(9))
    driver.send(event)
    assert driver.replica.kv.pool.num_held == 0
    assert driver.replica.accounting().num_pinned_blocks == 0


def test_a_fenced_replica_keeps_nothing_for_a_pin() -> None:
    driver = make_driver()
    driver.generate(make_request(range(9), 1))
    driver.send(FenceReplica("a rank is gone"))
    answer = pin(driver, SYSTEM, range(9))
    assert (answer.num_tokens, answer.refused) == (0, None)
    assert driver.replica.kv.pool.num_held == 0


def test_a_pin_in_several_layer_groups_keeps_what_prompts_read_of_each() -> None:
    groups = (AttentionWindow(), AttentionWindow(3, num_sink_tokens=1))
    driver = make_driver(num_blocks=24, max_pinned_blocks=9, layer_groups=groups)
    prefix = range(20)
    driver.generate(make_request(prefix, 1))
    assert pin(driver, SYSTEM, prefix).num_tokens == 20
    # All five blocks of the full group. Of the other: the sinks'; that of positions 18 and 19, to
    # go on from 20; and that of 14 and 15, where the prefix alone goes on from 16.
    assert driver.replica.accounting().num_pinned_blocks == 5 + 3
    for number in range(6):
        driver.generate(make_request([60 + number] * 24, 1, request_id=f"q{number}"))
    for more, num_cached in (([90, 91], 20), ([], 16)):
        request = make_request([*prefix, *more], 3, request_id=f"more {more}")
        (stream,) = driver.generate(request)
        assert stream.num_cached_tokens == num_cached
        assert stream.token_ids == oracle(request, driver.limits).token_ids
    driver.send(UnpinPrefix(SYSTEM))
    assert driver.replica.kv.pool.num_held == 0


def test_windowed_requests_are_admitted_by_what_they_hold_of_the_rest() -> None:
    driver = make_driver(num_blocks=6, max_pinned_blocks=3, layer_groups=(AttentionWindow(5),))
    # One block for the token and one for the window behind it, however long the sequence is.
    request = make_request(range(20), 30)
    driver.generate(make_request(range(50, 59), 1, request_id="q1"))
    assert pin(driver, SYSTEM, range(50, 59)).num_tokens == 8
    (stream,) = driver.generate(request)
    assert stream.token_ids == oracle(request, driver.limits).token_ids
    assert request.num_blocks_needed(driver.limits) == 2
    fewer = dataclasses.replace(driver.limits, max_pinned_blocks=5)
    with pytest.raises(CapacityError) as refused:
        admit(request, fewer)
    assert (refused.value.num_blocks_needed, refused.value.num_blocks) == (2, 1)


def test_pinned_blocks_are_no_sequences_slots_and_have_a_letter_of_their_own() -> None:
    driver = make_driver(num_blocks=8, max_pinned_blocks=3)
    driver.generate(make_request(range(9), 1))
    pin(driver, SYSTEM, range(9))
    figures = driver.replica.accounting()
    assert (figures.num_held_blocks, figures.num_pinned_blocks) == (2, 2)
    assert (figures.allocated_slots, figures.unique_live_tokens) == (0, 0)
    assert figures.block_map.count("p") == 2
    request = make_request(range(10), 4, request_id="q1")
    driver.submit(request)
    figures = driver.replica.accounting()
    assert (figures.num_held_blocks, figures.num_pinned_blocks) == (3, 2)
    assert (figures.allocated_slots, figures.unique_live_tokens) == (12, 10)
    assert (figures.num_shared_blocks, figures.prefix_sharing_saved_slots) == (2, 0)
    assert figures.sequence_fragmentation_slots == {driver.sequence(request).name: 2}
    letters = (figures.block_map.count("p"), figures.block_map.count("#"))
    assert letters == (2, 1)
