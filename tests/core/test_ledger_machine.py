"""A batcher and its blocks under any order of operations, beside plain lists of tokens."""

from collections import Counter

import pytest
from hypothesis import settings
from ledger_machine import LedgerMachine
from ledger_walk import REPLAY, walk

OPERATIONS_OF_A_WALK = 1000
EVENTS = (
    "preempted",
    "resumed",
    "hit tokens",
    "evicted",
    "failed",
    "copied",
    "partly matched",
    "rolled out of a window",
)


def walk_all(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Walk once for each seed; return all operations and what they brought about."""
    operations: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for seed in seeds:
        try:
            machine = walk(seed, OPERATIONS_OF_A_WALK)
        except BaseException:
            print(REPLAY.format(seed=seed, num_operations=OPERATIONS_OF_A_WALK))
            raise
        operations += machine.operations
        events += machine.events
    return operations, events


def test_twenty_thousand_random_operations_break_nothing() -> None:
    operations, events = walk_all(range(20))
    assert operations.total() >= 20_000
    names = ("submit", "chunk", "append", "fork", "beam step", "cancel", "preempt", "pin", "unpin")
    for name in (*names, "evict", "reset"):
        assert operations[name] >= 10, f"hardly any {name} among {operations}"
    for name in EVENTS:
        assert events[name] >= 10, f"hardly any were {name}: {events}"


@pytest.mark.parametrize(("seed", "with_pins"), [(1057, False), (1235, True), (1638, True)])
def test_a_walk_that_once_broke_something_breaks_nothing_any_more(
    seed: int, with_pins: bool
) -> None:
    walk(seed, OPERATIONS_OF_A_WALK, with_pins=with_pins)


@pytest.mark.prove
@pytest.mark.timeout(0)
def test_a_million_random_operations_break_nothing() -> None:
    operations, events = walk_all(range(1000, 2000))
    print(f"\n{operations.total():,} operations: {dict(operations)}\nthat brought: {dict(events)}")
    assert operations.total() >= 1_000_000


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestLedgerMachine = LedgerMachine.TestCase
