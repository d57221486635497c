"""The part of a cascade that several sequences share: one pass over it for all their queries."""

import typing

import triton.language as tl

from rayserve_kernels.gpu.paged_attention import store_partial
from rayserve_kernels.gpu.tile import (
    BatchArgs,
    PoolArgs,
    QueryArgs,
    attend_range,
    jit_for_any,
    load_rows,
    locate,
)


@jit_for_any("table_width", "num_groups", "most_queries", "num_splits")
def attend_shared(
    partials: typing.Any,
    log_sums: typing.Any,
    group_start: typing.Any,
    group_splits: typing.Any,
    query_seq: typing.Any,
    query_index: typing.Any,
    inputs: QueryArgs,
    batch: BatchArgs,
    pool: PoolArgs,
    table_width: typing.Any,
    num_groups: typing.Any,
    most_queries: typing.Any,
    num_q_heads: typing.Any,
    num_splits: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
) -> None:
    """Attend from the queries of each group to the splits that its sequences share.

    Stores partial outputs where `decode` would have stored them, sequence by sequence.
    Grid: (num_listed * GROUP_SIZE // BLOCK_M + num_groups, num_kv_heads, max_splits).

    Args:
        partials: As `decode` stores them.
        log_sums: As `decode` stores them.
        group_start: As `SharedPrefixes`.
        group_splits: As `SharedPrefixes`.
        query_seq: As `SharedPrefixes`.
        query_index: As `SharedPrefixes`.
        inputs: Queries.
        batch: Metadata.
        pool: One layer.
        table_width: Entries of a sequence's row of the block table.
        num_groups: At least 1.
        most_queries: Of `partials`.
        num_q_heads: Query heads.
        num_splits: Of `partials`.
        HEAD_DIM: Of queries, keys and values.
        PADDED_DIM: The next power of two.
        PART_DIM: Adjacent elements of a key.
        BLOCK_SIZE: Slots of a block.
        GROUP_SIZE: Query heads of a KV head.
        PRECISION: Of products of fp32, as `tl.dot` names it.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Positions of a tile.
        SPLIT_TOKENS: Positions of a split, a multiple of BLOCK_N.
    """
    group, tile = locate(group_start, num_groups, tl.program_id(0), GROUP_SIZE, BLOCK_M)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first_listed = tl.load(group_start + group)
    num_rows = (tl.load(group_start + group + 1) - first_listed) * GROUP_SIZE
    if (tile * BLOCK_M >= num_rows) | (split >= tl.load(group_splits + group)):
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    listed = first_listed + row // GROUP_SIZE
    seq = tl.load(query_seq + listed, mask=is_row, other=0)
    index = tl.load(query_index + listed, mask=is_row, other=0)
    head = (kv_head * GROUP_SIZE + row % GROUP_SIZE).to(tl.int32)
    first_token = tl.load(batch.query_start + seq)
    num_queries = tl.load(batch.query_start + seq + 1) - first_token
    query_at = tl.where(is_row, tl.load(batch.seq_lens + seq) - num_queries + index, -1)
    query, slope, first_seen, num_sinks = load_rows(
        inputs, batch, seq, first_token + index, head, query_at, is_row, HEAD_DIM, PADDED_DIM
    )
    # The members' tables agree as far as they share, so any one of them will do.
    table = batch.block_tables + tl.load(query_seq + first_listed).to(tl.int64) * table_width
    begin = split * SPLIT_TOKENS
    output, log_sum = attend_range(
        begin,
        begin + SPLIT_TOKENS,
        begin + SPLIT_TOKENS,
        query,
        slope,
        query_at,
        first_seen,
        num_sinks,
        inputs,
        pool,
        table,
        kv_head,
        HEAD_DIM,
        PADDED_DIM,
        PART_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        PRECISION,
        HAS_WINDOW=batch.windows is not None,
        HAS_FREE=batch.windows is None,
        HAS_MASKED=batch.windows is not None,
    )
    entry = ((seq * most_queries + index).to(tl.int64) * num_q_heads + head) * num_splits + split
    store_partial(partials, log_sums, output, log_sum, entry, is_row, HEAD_DIM, PADDED_DIM)
