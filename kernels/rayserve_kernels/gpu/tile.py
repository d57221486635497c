"""What every attention kernel shares: rows of queries against a range of one sequence's tokens.

A row is a pair (query token, query head of one KV head's group); rows are packed without gaps. The
positions of a sequence are cut into tiles of BLOCK_N at multiples of BLOCK_N, whatever the query,
the block size and the batch. A tile of which a row sees nothing leaves that row's bits alone. So a
row's result depends neither on the rows beside it nor on where the loop over tiles begins and ends.

Nothing that the tile's rows do not see is loaded, be it a slot or an entry of the block table: what
lies there may be NaN, and NaN times a weight of zero is NaN.

Scores are in units of log2, so that exp2 takes them back; factors and slopes hold the log2(e).
"""

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

jit: Callable[..., Any] = triton.jit
"""Without Triton's own annotations: by these a kernel never returns and takes no launch options."""


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile once for all values of some arguments, those that change from step to step."""
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=list(names))
    return decorate


LOG2_E = tl.constexpr(1.4426950408889634)


class PoolArgs(NamedTuple):
    """One layer of a pool: pointers, and strides in elements.

    Caches are as `KVPool.key_view` and `value_view`; `key_part` is the stride between the parts
    of a key that the vectorised order splits, else 0. Scales are fp32, a factor for each slot and
    KV head, None where the pool holds plain floats.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    key_block: int
    key_head: int
    key_slot: int
    key_part: int
    value_block: int
    value_head: int
    value_slot: int
    scale_block: int
    scale_head: int
    scale_slot: int


class BatchArgs(NamedTuple):
    """A step's metadata, as in `AttentionMetadata`."""

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    windows: torch.Tensor | None
    num_sinks: torch.Tensor | None


class QueryArgs(NamedTuple):
    """Queries [num_tokens, num_q_heads, head_dim] and what becomes of their scores.

    Without a cap a score is `factor * q.k`; with one, `cap * tanh(factor * q.k)`. Slopes are fp32
    [num_q_heads] or None.
    """

    queries: torch.Tensor
    query_token: int
    query_head: int
    factor: float
    cap: float | None
    slopes: torch.Tensor | None


@jit
def locate(
    starts: typing.Any,
    count: typing.Any,
    tile: typing.Any,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """Find the run of queries that a tile belongs to, and the tile's place within the run.

    Run i owns the tiles from `starts[i] * ROWS // BLOCK_M + i` on, which are at least as many as it
    fills: the number of all tiles follows from the numbers of queries and runs alone, so that
    nobody waits for the device to size a grid.

    Args:
        starts: int32 [count + 1], ascending: first query of each run, then their number.
        count: Runs, at least 1.
        tile: Of all tiles.
        ROWS: Rows of a query.
        BLOCK_M: Rows of a tile.
    """
    low = tile * 0
    high = low + count
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) * ROWS // BLOCK_M + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low, tile - (tl.load(starts + low) * ROWS // BLOCK_M + low)


@jit
def load_rows(
    inputs: QueryArgs,
    batch: BatchArgs,
    seq: typing.Any,
    token: typing.Any,
    head: typing.Any,
    query_at: typing.Any,
    is_row: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> Any:
    """Load the rows' queries, slopes, and the ends of what they see.

    Args:
        inputs: Queries.
        batch: Metadata.
        seq: Sequence of all rows, or int32 [BLOCK_M].
        token: int32 [BLOCK_M], row of `queries`.
        head: int32 [BLOCK_M], query head.
        query_at: int32 [BLOCK_M], position of the query in its sequence.
        is_row: bool [BLOCK_M], whether there is such a row at all.
        HEAD_DIM: Of queries and keys.
        PADDED_DIM: The next power of two.

    Returns:
        query [BLOCK_M, PADDED_DIM], slope, first_seen (position at which the window begins), and
        num_sinks, each [BLOCK_M].
    """
    dims = tl.arange(0, PADDED_DIM)
    at = token.to(tl.int64) * inputs.query_token + head.to(tl.int64) * inputs.query_head
    query = tl.load(
        inputs.queries + at[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    slope = query_at.to(tl.float32)
    if inputs.slopes is not None:
        slope = tl.load(inputs.slopes + head, mask=is_row, other=0.0) * LOG2_E
    first_seen = query_at * 0
    num_sinks = first_seen
    if batch.windows is not None:
        # A row that is none sees nothing, and widens nothing for the others.
        window = tl.load(batch.windows + seq + first_seen, mask=is_row, other=1)
        first_seen = tl.where(is_row, query_at - window + 1, 2147483647)
        num_sinks = tl.load(batch.num_sinks + seq + num_sinks, mask=is_row, other=0)
    return query, slope, first_seen, num_sinks


@jit
def attend_tile(
    output: typing.Any,
    highest: typing.Any,
    total: typing.Any,
    start: typing.Any,
    end: typing.Any,
    query: typing.Any,
    slope: typing.Any,
    query_at: typing.Any,
    first_seen: typing.Any,
    num_sinks: typing.Any,
    window_from: typing.Any,
    sinks_to: typing.Any,
    inputs: QueryArgs,
    pool: PoolArgs,
    table: typing.Any,
    kv_head: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> Any:
    """Take the BLOCK_N positions from `start` on into the online softmax; see `attend_range`."""
    dims = tl.arange(0, PADDED_DIM)
    at = start + tl.arange(0, BLOCK_N)
    is_read = at >= 0
    if IS_MASKED:
        is_read = at < end
        if HAS_WINDOW:
            is_read = is_read & ((at >= window_from) | (at < sinks_to))
    block = tl.load(table + at // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
    slot = (at % BLOCK_SIZE).to(tl.int64)
    is_element = is_read[:, None] & (dims < HEAD_DIM)[None, :]
    key_at = block * pool.key_block + slot * pool.key_slot + kv_head * pool.key_head
    if PART_DIM == HEAD_DIM:
        key_dims = dims
    else:
        # Of all strides, as the compiler cannot see: it loads so many elements at once.
        key_at = tl.multiple_of(key_at, PART_DIM)
        key_dims = (dims // PART_DIM).to(tl.int64) * pool.key_part + dims % PART_DIM
    key = tl.load(pool.key_cache + key_at[:, None] + key_dims[None, :], mask=is_element, other=0.0)
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
    scale_at = block * pool.scale_block + slot * pool.scale_slot + kv_head * pool.scale_head
    if pool.key_scales is not None:
        key_scale = tl.load(pool.key_scales + scale_at, mask=is_read, other=0.0)
        scores = scores * key_scale[None, :]
    scores = scores * inputs.factor
    if inputs.cap is not None:
        # tanh without overflow: the power lies between 0 and 1.
        power = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        bounded = inputs.cap * (1.0 - power) / (1.0 + power)
        scores = tl.where(scores < 0, -bounded, bounded)
    if inputs.slopes is not None:
        scores = scores + slope[:, None] * (at[None, :] - query_at[:, None]).to(tl.float32)
    if IS_MASKED:
        is_seen = at[None, :] <= query_at[:, None]
        if HAS_WINDOW:
            is_near = at[None, :] >= first_seen[:, None]
            is_seen = is_seen & (is_near | (at[None, :] < num_sinks[:, None]))
        scores = tl.where(is_seen & is_read[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen nothing yet must not compute inf - inf.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - reference[:, None])
    fade = tl.exp2(highest - reference)
    total = total * fade + tl.sum(weights, 1)
    output = output * fade[:, None]
    value_at = block * pool.value_block + slot * pool.value_slot + kv_head * pool.value_head
    value = tl.load(
        pool.value_cache + value_at[:, None] + dims[None, :], mask=is_element, other=0.0
    )
    if pool.value_scales is not None:
        value_scale = tl.load(pool.value_scales + scale_at, mask=is_read, other=0.0)
        if query.dtype == tl.float16:
            # Small weights times small scales would vanish in it.
            value = value.to(tl.float32) * value_scale[:, None]
        else:
            weights = weights * value_scale[None, :]
    output = tl.dot(
        weights.to(query.dtype), value.to(query.dtype), output, input_precision=PRECISION
    )
    return output, new_highest, total


@jit
def attend_range(
    begin: typing.Any,
    free_end: typing.Any,
    end: typing.Any,
    query: typing.Any,
    slope: typing.Any,
    query_at: typing.Any,
    first_seen: typing.Any,
    num_sinks: typing.Any,
    inputs: QueryArgs,
    pool: PoolArgs,
    table: typing.Any,
    kv_head: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_FREE: tl.constexpr,
    HAS_MASKED: tl.constexpr,
) -> Any:
    """Attend from rows to the positions from `begin` to `end` that they see.

    Args:
        begin: Multiple of BLOCK_N.
        free_end: Every row sees all positions from `begin` to here, a multiple of BLOCK_N. Looked
            at where HAS_FREE.
        end: At most one past the last row's position.
        query: [BLOCK_M, PADDED_DIM], and the next four, as `load_rows` gives them.
        slope: fp32 [BLOCK_M].
        query_at: int32 [BLOCK_M], -1 for a row of none.
        first_seen: int32 [BLOCK_M].
        num_sinks: int32 [BLOCK_M].
        inputs: What becomes of scores.
        pool: One layer.
        table: The sequence's row of the block table.
        kv_head: int64.
        HEAD_DIM: Of keys and values.
        PADDED_DIM: The next power of two.
        PART_DIM: Adjacent elements of a key: HEAD_DIM unless the order splits keys.
        BLOCK_SIZE: Slots of a block.
        BLOCK_M: Rows.
        BLOCK_N: Positions of a tile.
        PRECISION: Of products of fp32, as `tl.dot` names it.
        HAS_WINDOW: Whether rows have windows; then all tiles are masked.
        HAS_FREE: Whether to pass over tiles without masks as far as `free_end`.
        HAS_MASKED: Whether tiles remain then.

    Returns:
        fp32 [BLOCK_M, PADDED_DIM], the weighted mean of values, and fp32 [BLOCK_M], log2 of the sum
        of the exponentiated scores: -inf, and a mean of zeros, where a row sees none.
    """
    output = tl.full([BLOCK_M, PADDED_DIM], 0.0, tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    window_from = begin * 0
    sinks_to = window_from
    if HAS_FREE:
        for start in range(begin, free_end, BLOCK_N):
            output, highest, total = attend_tile(
                output,
                highest,
                total,
                start,
                end,
                query,
                slope,
                query_at,
                first_seen,
                num_sinks,
                window_from,
                sinks_to,
                inputs,
                pool,
                table,
                kv_head,
                HEAD_DIM,
                PADDED_DIM,
                PART_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                PRECISION,
                False,
                False,
            )
        begin = free_end
    if HAS_MASKED:
        # Two runs of tiles in one loop: those with sinks, then those from the first window on.
        sink_tiles = begin * 0
        window_begin = begin
        if HAS_WINDOW:
            window_from = tl.min(first_seen, 0)
            sinks_to = tl.max(num_sinks, 0)
            window_begin = tl.maximum(begin, window_from // BLOCK_N * BLOCK_N)
            sink_end = tl.minimum(tl.minimum(sinks_to, end), window_begin)
            sink_tiles = tl.maximum(sink_end - begin + BLOCK_N - 1, 0) // BLOCK_N
        window_tiles = tl.maximum(end - window_begin + BLOCK_N - 1, 0) // BLOCK_N
        for index in range(0, sink_tiles + window_tiles):
            start = begin + index * BLOCK_N
            if HAS_WINDOW:
                in_window = window_begin + (index - sink_tiles) * BLOCK_N
                start = tl.where(index < sink_tiles, start, in_window)
            output, highest, total = attend_tile(
                output,
                highest,
                total,
                start,
                end,
                query,
                slope,
                query_at,
                first_seen,
                num_sinks,
                window_from,
                sinks_to,
                inputs,
                pool,
                table,
                kv_head,
                HEAD_DIM,
                PADDED_DIM,
                PART_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                PRECISION,
                HAS_WINDOW,
                True,
            )
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    log_sum = tl.where(is_empty, float("-inf"), highest + tl.log2(total))
    return output / total[:, None], log_sum
