"""Who holds which block of a replica: a snapshot taken between steps, and a bounded map of it.

    Replica.holdings()  ->  Holdings            copies alone, a fraction of a step
    block_view          ->  BlockView           any number of blocks in at most MAX_CELLS cells
                                                with the holders of one of them

The snapshot belongs to whoever took it, so what is made of it costs the replica nothing.
"""

import dataclasses
import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.ids import BlockId

MAX_CELLS: Final = 4096
"""Cells of a map; larger pools have several blocks in each."""

MAX_CELL_HOLDERS: Final = 32
"""Holders of a cell that are named."""

LETTERS: Final = ".#=op"
"""Of a block that is free, held once, shared, cached, pinned."""

_FREE, _HELD, _SHARED, _CACHED, _PINNED = range(len(LETTERS))
_PIECE: Final = 4096


class HolderKind(enum.Enum):
    """What holds a block."""

    SEQUENCE = "sequence"
    PIN = "pin"
    STEP = "step"
    """A step in flight, which copies from it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """One holder and its blocks.

    Args:
        kind: What it is.
        name: Request id, pin id, or number of the step in flight.
        sibling: Which of the request's samples; None where it is no sequence.
        layer_groups: Its blocks, head first, for each layer group; a step's are in one.
    """

    kind: HolderKind
    name: str
    sibling: int | None
    layer_groups: tuple[tuple[BlockId, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """A replica's blocks and who holds them, at one moment.

    Args:
        counts: For each block how many hold it.
        kept: For each block whether it is cached once nobody does: 0 for no.
        holders: All who hold blocks.
        num_running: Sequences that have blocks and go on.
        num_waiting: Sequences that wait for blocks.
    """

    counts: list[int]
    kept: bytes
    holders: tuple[Holder, ...]
    num_running: int
    num_waiting: int


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; each is in one alone, and pinned goes before shared.

    Args:
        free: Nobody holds them.
        held: One sequence holds them.
        shared: Several hold them, none of them a pin.
        cached: Nobody holds them, and their content can be matched.
        pinned: A pin holds them.
    """

    free: int
    held: int
    shared: int
    cached: int
    pinned: int


@dataclasses.dataclass(frozen=True, slots=True)
class CellHolder:
    """One who holds blocks of a cell.

    Args:
        kind: What it is.
        name: As in `Holder`.
        sibling: As in `Holder`.
        layer_groups: Those in which it does.
        num_blocks: Blocks of the cell that it holds.
    """

    kind: HolderKind
    name: str
    sibling: int | None
    layer_groups: tuple[int, ...]
    num_blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class CellView:
    """One cell of a map.

    Args:
        index: Its place in the map.
        first_block: Id of its first block.
        num_blocks: Blocks in it.
        counts: Of these.
        holders: At most MAX_CELL_HOLDERS, those of most blocks first.
        num_more_holders: Holders that are left out.
    """

    index: int
    first_block: BlockId
    num_blocks: int
    counts: BlockCounts
    holders: tuple[CellHolder, ...]
    num_more_holders: int


@dataclasses.dataclass(frozen=True, slots=True)
class BlockView:
    """The map of one replica.

    Args:
        num_blocks: Blocks of the pool.
        blocks_per_cell: Of each cell but the last, which may have fewer.
        cells: For each cell the letter of most of its blocks: "." free, "#" held, "=" shared,
            "o" cached, "p" pinned.
        counts: Of all blocks.
        num_running: Sequences that have blocks and go on.
        num_waiting: Sequences that wait for blocks.
        cell: The cell that was asked for; None where none was, or there is no such cell.
    """

    num_blocks: int
    blocks_per_cell: int
    cells: str
    counts: BlockCounts
    num_running: int
    num_waiting: int
    cell: CellView | None = None


def block_view(holdings: Holdings, cell: int | None = None) -> BlockView:
    """Make the map of a snapshot.

    Args:
        holdings: The snapshot.
        cell: A cell whose holders are wanted as well.
    """
    num_blocks = len(holdings.counts)
    per_cell = max(1, -(-num_blocks // MAX_CELLS))
    states = _states(holdings)
    starts = np.arange(0, num_blocks, per_cell)
    # [states, cells], where the last of equals in LETTERS wins.
    by_cell = np.stack(
        [np.add.reduceat(states == state, starts, dtype=np.int64) for state in range(len(LETTERS))]
    )
    most = len(LETTERS) - 1 - by_cell[::-1].argmax(axis=0)
    wanted = None
    if cell is not None and 0 <= cell < len(starts):
        counts = BlockCounts(*by_cell[:, cell].tolist())
        wanted = _cell_view(holdings, cell, int(starts[cell]), counts)
    return BlockView(
        num_blocks,
        per_cell,
        "".join(LETTERS[state] for state in most.tolist()),
        BlockCounts(*by_cell.sum(axis=1).tolist()),
        holdings.num_running,
        holdings.num_waiting,
        wanted,
    )


def _states(holdings: Holdings) -> npt.NDArray[np.uint8]:
    """Return for each block the index of its letter, uint8 [blocks]."""
    kept = np.frombuffer(holdings.kept, np.uint8)
    states = np.where(kept != 0, _CACHED, _FREE).astype(np.uint8)
    # In pieces: turning a list into an array lets no other thread run.
    for first in range(0, len(states), _PIECE):
        counts = np.array(holdings.counts[first : first + _PIECE])
        piece = states[first : first + _PIECE]
        piece[counts == 1] = _HELD
        piece[counts > 1] = _SHARED
    for holder in holdings.holders:
        if holder.kind is HolderKind.PIN:
            for group in holder.layer_groups:
                states[list(group)] = _PINNED
    return states


def _cell_view(holdings: Holdings, index: int, first: int, counts: BlockCounts) -> CellView:
    num_blocks = sum(dataclasses.astuple(counts))
    end = first + num_blocks
    found = []
    for holder in holdings.holders:
        in_groups = [sum(first <= each < end for each in group) for group in holder.layer_groups]
        if any(in_groups):
            groups = tuple(group for group, number in enumerate(in_groups) if number)
            named = holder.kind, holder.name, holder.sibling
            found.append(CellHolder(*named, groups, sum(in_groups)))
    found.sort(key=lambda holder: -holder.num_blocks)
    return CellView(
        index,
        BlockId(first),
        num_blocks,
        counts,
        tuple(found[:MAX_CELL_HOLDERS]),
        max(0, len(found) - MAX_CELL_HOLDERS),
    )
