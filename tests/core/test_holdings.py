"""Who holds which block: what is listed is what the pool counts, in maps of any size."""

import dataclasses
from collections import Counter

import pytest
from replica_driver import ReplicaDriver, make_limits, make_request

from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.core.holdings import (
    LETTERS,
    MAX_CELL_HOLDERS,
    MAX_CELLS,
    Holder,
    HolderKind,
    Holdings,
    block_view,
)
from rayserve_paged.core.ids import BlockId, PinId
from rayserve_paged.core.replica_messages import PinPrefix
from rayserve_paged.core.token_ids import TokenIds


def check_holdings(driver: ReplicaDriver) -> Holdings:
    """Check a snapshot against the pool and the ledger; every held block has all its holders."""
    holdings, pool = driver.replica.holdings(), driver.replica.kv.pool
    listed = Counter(
        each for holder in holdings.holders for group in holder.layer_groups for each in group
    )
    counts = {BlockId(each): pool.count(BlockId(each)) for each in range(pool.num_blocks)}
    assert listed == Counter({each: count for each, count in counts.items() if count})
    view = block_view(holdings)
    assert view.cells == driver.replica.accounting().block_map
    numbers = view.counts
    assert numbers.free == pool.num_free
    assert numbers.cached == pool.num_cached
    assert numbers.held + numbers.shared + numbers.pinned == pool.num_held
    for block_id, count in counts.items():
        cell = block_view(holdings, block_id).cell
        assert cell is not None
        assert (cell.first_block, cell.num_blocks) == (block_id, 1)
        assert sum(holder.num_blocks for holder in cell.holders) == count
    return holdings


@pytest.mark.parametrize(
    ("depth", "partial_reuse", "windows"),
    [
        (1, False, (FULL_ATTENTION,)),
        (2, True, (FULL_ATTENTION,)),
        (2, False, (FULL_ATTENTION, AttentionWindow(6))),
    ],
)
def test_every_held_block_is_named_by_all_who_hold_it(
    depth: int, partial_reuse: bool, windows: tuple[AttentionWindow, ...]
) -> None:
    limits = make_limits(num_blocks=40, layer_groups=windows)
    limits = dataclasses.replace(limits, max_pinned_blocks=8)
    driver = ReplicaDriver(limits, pipeline_depth=depth, partial_reuse=partial_reuse)
    driver.submit(make_request(range(13), 2, request_id="first"))
    driver.run()
    driver.send(PinPrefix(PinId("system"), TokenIds.of(range(8))))
    driver.submit(make_request([*range(11), 60, 61], 6, request_id="a", n=2, temperature=1.0))
    driver.submit(make_request([*range(10), 70], 9, request_id="b"))
    kinds: Counter[HolderKind] = Counter()
    names = set()
    while driver.replica.sequences:
        holdings = check_holdings(driver)
        kinds.update(holder.kind for holder in holdings.holders)
        names |= {(holder.name, holder.sibling) for holder in holdings.holders}
        driver.step()
    assert {("a", 0), ("a", 1), ("b", 0), ("system", None)} <= names
    assert kinds[HolderKind.PIN]
    assert kinds[HolderKind.STEP]
    after = check_holdings(driver)
    assert [holder.name for holder in after.holders] == ["system"]
    assert after.num_running == after.num_waiting == 0


@pytest.mark.parametrize("num_blocks", [1, MAX_CELLS, MAX_CELLS + 1, 500_000])
def test_a_map_has_a_bounded_number_of_cells_that_add_up(num_blocks: int) -> None:
    counts = [index % 3 for index in range(num_blocks)]
    kept = bytes(index % 2 for index in range(num_blocks))
    holdings = Holdings(counts, kept, (), 3, 4)
    view = block_view(holdings, len(range(0, num_blocks, -(-num_blocks // MAX_CELLS))) - 1)
    assert len(view.cells) <= MAX_CELLS
    assert (len(view.cells) - 1) * view.blocks_per_cell < num_blocks
    assert len(view.cells) * view.blocks_per_cell >= num_blocks
    assert set(view.cells) <= set(LETTERS)
    one_of_each = counts.count(1), counts.count(2)
    assert (view.counts.held, view.counts.shared) == one_of_each
    assert view.counts.free + view.counts.cached == counts.count(0)
    assert view.cell is not None
    assert view.cell.first_block + view.cell.num_blocks == num_blocks
    assert block_view(holdings, len(view.cells)).cell is None


def test_a_cell_shows_the_state_of_most_of_its_blocks_and_names_a_bounded_number_of_holders() -> (
    None
):
    num_blocks = 4 * MAX_CELLS
    counts = [0] * num_blocks
    counts[4:8] = [1, 1, 40, 0]
    counts[8:12] = [1, 1, 1, 1]
    holders = [Holder(HolderKind.SEQUENCE, f"q{index}", 0, ((BlockId(6),),)) for index in range(39)]
    holders.append(
        Holder(HolderKind.SEQUENCE, "most", 0, ((BlockId(4), BlockId(6)), (BlockId(5),)))
    )
    pin = Holder(HolderKind.PIN, "system", None, (tuple(map(BlockId, (8, 9, 10))),))
    view = block_view(Holdings(counts, bytes(num_blocks), (*holders, pin), 40, 0), 1)
    assert view.cells.startswith(".#p.")
    cell = view.cell
    assert cell is not None
    assert (cell.counts.held, cell.counts.shared, cell.counts.free) == (2, 1, 1)
    first = cell.holders[0]
    assert (first.name, first.num_blocks, first.layer_groups) == ("most", 3, (0, 1))
    assert len(cell.holders) == MAX_CELL_HOLDERS
    assert cell.num_more_holders == 40 - MAX_CELL_HOLDERS
