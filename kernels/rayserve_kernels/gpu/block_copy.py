"""Copy blocks inside a pool, and between a pool and a contiguous buffer, in Triton."""

import math
import typing
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rayserve_kernels.block_copy import check_blocks, check_copies
from rayserve_kernels.gpu.tile import jit
from rayserve_kernels.layout import KVPool

_UNIT_BYTES = 16
_TILE_WORDS = 2048
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class BlockArgs(NamedTuple):
    """Blocks as runs of bytes, moved in units of 16, or fewer where a run is no multiple of that.

    words: The bytes as integers, the largest that make up a unit. ids: int64, which blocks; None
    for all, in their order. Strides in units.
    """

    words: torch.Tensor
    ids: torch.Tensor | None
    block: int
    run: int


def copy_blocks(pool: KVPool, sources: Sequence[int], targets: Sequence[int]) -> None:
    """As `rayserve_kernels.block_copy.copy_blocks`.

    Where a block is both source and target, what is read passes through a buffer of as many blocks.

    Args:
        pool: As there.
        sources: As there.
        targets: As there.

    Raises:
        ValueError: As there.
    """
    check_copies(pool, sources, targets)
    if set(sources) & set(targets):
        staging = pool.payload.new_empty(len(sources), pool.layout.block_bytes)
        gather_blocks(pool, sources, staging)
        scatter_blocks(pool, targets, staging)
        return
    unit = _unit_bytes(pool, pool.payload)
    # Both lists in one transfer.
    source_ids, target_ids = _ids(pool, [sources, targets])
    _move(
        pool,
        len(sources),
        unit,
        target=_pool_args(pool, target_ids, unit),
        source=_pool_args(pool, source_ids, unit),
    )


def gather_blocks(pool: KVPool, block_ids: Sequence[int], staging: torch.Tensor) -> None:
    """Copy blocks into a buffer, where each is one run of bytes.

    Args:
        pool: Read only.
        block_ids: Blocks to read; repeats are allowed.
        staging: uint8 [len(block_ids), layout.block_bytes], contiguous, on the pool's device. A row
            is `pool.blocks[block_id]`, flattened.

    Raises:
        ValueError: A block does not exist, or a buffer that does not fit.
    """
    unit = _check_staging(pool, block_ids, staging)
    _move(
        pool,
        len(block_ids),
        unit,
        target=_staging_args(pool, staging, unit),
        source=_pool_args(pool, _ids(pool, block_ids), unit),
    )


def scatter_blocks(pool: KVPool, block_ids: Sequence[int], staging: torch.Tensor) -> None:
    """Copy blocks out of a buffer that `gather_blocks` filled, from a pool of an equal layout.

    Args:
        pool: Written in place.
        block_ids: Blocks to overwrite, each once.
        staging: As `gather_blocks`; read only.

    Raises:
        ValueError: A block does not exist or repeats, or a buffer that does not fit.
    """
    unit = _check_staging(pool, block_ids, staging)
    if len(set(block_ids)) != len(block_ids):
        raise ValueError(f"block_ids={list(block_ids)}: a block is written twice")
    _move(
        pool,
        len(block_ids),
        unit,
        target=_pool_args(pool, _ids(pool, block_ids), unit),
        source=_staging_args(pool, staging, unit),
    )


def _check_staging(pool: KVPool, block_ids: Sequence[int], staging: torch.Tensor) -> int:
    """Check a buffer, and return the bytes of a unit in which it can be moved."""
    check_blocks(pool, block_ids)
    expected = (len(block_ids), pool.layout.block_bytes)
    if staging.dtype != torch.uint8 or staging.shape != expected:
        raise ValueError(
            f"staging is {staging.dtype} {tuple(staging.shape)}: expected torch.uint8 {expected}"
        )
    if staging.device != pool.device or not staging.is_contiguous():
        raise ValueError(
            f"staging on {staging.device} with strides {staging.stride()}: expected a contiguous "
            f"tensor on {pool.device}"
        )
    return _unit_bytes(pool, staging)


def _unit_bytes(pool: KVPool, other: torch.Tensor) -> int:
    """Bytes that start at multiples of themselves everywhere: 16, or the power of two below."""
    starts = (pool.payload.data_ptr(), other.data_ptr(), pool.layout.run_bytes)
    return math.gcd(_UNIT_BYTES, *starts)


def _ids(pool: KVPool, block_ids: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64, device=pool.device)


def _as_words(payload: torch.Tensor, unit: int) -> torch.Tensor:
    return payload.view(-1).view(_WORDS[min(unit, 4)])


def _pool_args(pool: KVPool, ids: torch.Tensor, unit: int) -> BlockArgs:
    layout, run = pool.layout, pool.layout.run_bytes // unit
    if layout.order == "block_major":
        return BlockArgs(_as_words(pool.payload, unit), ids, layout.block_bytes // unit, run)
    return BlockArgs(_as_words(pool.payload, unit), ids, run, pool.num_blocks * run)


def _staging_args(pool: KVPool, staging: torch.Tensor, unit: int) -> BlockArgs:
    layout = pool.layout
    return BlockArgs(
        _as_words(staging, unit), None, layout.block_bytes // unit, layout.run_bytes // unit
    )


def _move(pool: KVPool, count: int, unit: int, *, target: BlockArgs, source: BlockArgs) -> None:
    layout = pool.layout
    num_runs, run_bytes = layout.num_layers * 2, layout.run_bytes
    if layout.order == "block_major":
        num_runs, run_bytes = 1, layout.block_bytes
    if not count:
        return
    unit_words = max(1, unit // 4)
    run_units = run_bytes // unit
    move_runs[(count, triton.cdiv(run_units * unit_words, _TILE_WORDS), num_runs)](
        target,
        source,
        run_units,
        UNIT_WORDS=unit_words,
        TILE_WORDS=_TILE_WORDS,
        num_warps=4,
    )


@jit
def locate_run(blocks: BlockArgs) -> typing.Any:
    """First unit of this program's run."""
    block = tl.program_id(0).to(tl.int64)
    if blocks.ids is not None:
        block = tl.load(blocks.ids + block)
    return block * blocks.block + tl.program_id(2).to(tl.int64) * blocks.run


@jit
def move_runs(
    target: BlockArgs,
    source: BlockArgs,
    run_units: typing.Any,
    UNIT_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
) -> None:
    """Copy one tile of one run of one block.

    Grid: (blocks, words of a run / TILE_WORDS rounded up, runs of a block).

    Args:
        target: Written.
        source: Read.
        run_units: Of a run.
        UNIT_WORDS: Words of a unit. Strides times this tell the compiler how far it may load at
            once.
        TILE_WORDS: Of a tile.
    """
    word = tl.program_id(1).to(tl.int64) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    is_word = word < run_units * UNIT_WORDS
    from_word = locate_run(source) * UNIT_WORDS
    to_word = locate_run(target) * UNIT_WORDS
    words = tl.load(source.words + from_word + word, mask=is_word)
    tl.store(target.words + to_word + word, words, mask=is_word)
