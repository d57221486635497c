"""Decode and prefill over the paged pool, and the reduction that joins the splits of a decode."""

import typing

import triton.language as tl

from rayserve_kernels.gpu.tile import (
    BatchArgs,
    PoolArgs,
    QueryArgs,
    attend_range,
    jit,
    jit_for_any,
    load_rows,
    locate,
)


@jit
def store_partial(
    partials: typing.Any,
    log_sums: typing.Any,
    output: typing.Any,
    log_sum: typing.Any,
    entry: typing.Any,
    is_row: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """Store what rows have of one split; of a row that saw nothing, only that.

    Args:
        partials: fp32 [num_entries, HEAD_DIM].
        log_sums: fp32 [num_entries].
        output: fp32 [BLOCK_M, PADDED_DIM].
        log_sum: fp32 [BLOCK_M].
        entry: int64 [BLOCK_M].
        is_row: bool [BLOCK_M].
        HEAD_DIM: Of the output.
        PADDED_DIM: The next power of two.
    """
    dims = tl.arange(0, PADDED_DIM)
    tl.store(log_sums + entry, log_sum, mask=is_row)
    has_seen = tl.where(log_sum > float("-inf"), is_row, False)
    tl.store(
        partials + entry[:, None] * HEAD_DIM + dims[None, :],
        output,
        mask=has_seen[:, None] & (dims < HEAD_DIM)[None, :],
    )


@jit_for_any("table_width", "num_tiles", "most_queries")
def decode(
    outputs: typing.Any,
    log_sums: typing.Any,
    first_split: typing.Any,
    inputs: QueryArgs,
    batch: BatchArgs,
    pool: PoolArgs,
    table_width: typing.Any,
    num_tiles: typing.Any,
    most_queries: typing.Any,
    num_q_heads: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> None:
    """Attend from the sequences of few queries, each split of a sequence by itself.

    Grid: (num_seqs * num_tiles, num_kv_heads, splits of the longest sequence).

    Args:
        outputs: Where IS_WHOLE, [num_tokens, num_q_heads, HEAD_DIM]; otherwise the partial ones,
            fp32 [num_seqs, most_queries, num_q_heads, num_splits, HEAD_DIM]. Contiguous.
        log_sums: fp32 [num_seqs, most_queries, num_q_heads, num_splits]; not used where IS_WHOLE.
        first_split: int32 [num_seqs], the first split that is not done elsewhere; None for 0.
        inputs: Queries.
        batch: Metadata.
        pool: One layer.
        table_width: Entries of a sequence's row of the block table.
        num_tiles: Tiles of a sequence that has `most_queries` queries.
        most_queries: Sequences of more queries are left alone.
        num_q_heads: Query heads.
        HEAD_DIM: Of queries, keys and values.
        PADDED_DIM: The next power of two.
        PART_DIM: Adjacent elements of a key.
        BLOCK_SIZE: Slots of a block.
        GROUP_SIZE: Query heads of a KV head.
        PRECISION: Of products of fp32, as `tl.dot` names it.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Positions of a tile.
        SPLIT_TOKENS: Positions of a split, a multiple of BLOCK_N.
        IS_WHOLE: Whether one split holds every sequence, so that its partial output is the output.
    """
    seq = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * BLOCK_M
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first_token = tl.load(batch.query_start + seq)
    num_queries = tl.load(batch.query_start + seq + 1) - first_token
    num_rows = num_queries * GROUP_SIZE
    if (first_row >= num_rows) | (num_queries > most_queries):
        return
    if first_split is not None:
        begins_later = split < tl.load(first_split + seq)
        if begins_later:
            return
    start = tl.load(batch.seq_lens + seq) - num_queries
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    end = tl.minimum(split * SPLIT_TOKENS + SPLIT_TOKENS, start + last_row // GROUP_SIZE + 1)
    if split * SPLIT_TOKENS >= end:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    index = row // GROUP_SIZE
    head = (kv_head * GROUP_SIZE + row % GROUP_SIZE).to(tl.int32)
    query_at = tl.where(is_row, start + index, -1)
    query, slope, first_seen, num_sinks = load_rows(
        inputs, batch, seq, first_token + index, head, query_at, is_row, HEAD_DIM, PADDED_DIM
    )
    output, log_sum = attend_range(
        split * SPLIT_TOKENS,
        0,
        end,
        query,
        slope,
        query_at,
        first_seen,
        num_sinks,
        inputs,
        pool,
        batch.block_tables + seq.to(tl.int64) * table_width,
        kv_head,
        HEAD_DIM,
        PADDED_DIM,
        PART_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        PRECISION,
        HAS_WINDOW=batch.windows is not None,
        HAS_FREE=False,
        HAS_MASKED=True,
    )
    if IS_WHOLE:
        dims = tl.arange(0, PADDED_DIM)
        entry = (first_token + index).to(tl.int64) * num_q_heads + head
        tl.store(
            outputs + entry[:, None] * HEAD_DIM + dims[None, :],
            output.to(outputs.dtype.element_ty),
            mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        )
    else:
        entry = (seq * most_queries + index).to(tl.int64) * num_q_heads + head
        entry = entry * tl.num_programs(2) + split
        store_partial(outputs, log_sums, output, log_sum, entry, is_row, HEAD_DIM, PADDED_DIM)


@jit_for_any("most_queries", "num_splits")
def join_splits(
    outputs: typing.Any,
    partials: typing.Any,
    log_sums: typing.Any,
    query_start: typing.Any,
    seq_lens: typing.Any,
    most_queries: typing.Any,
    num_splits: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
) -> None:
    """Join the partial outputs of each query, in ascending order of the splits.

    Only the splits up to the query's own position are looked at, so that the result depends on
    nothing else. Grid: (num_seqs * most_queries, num_q_heads).

    Args:
        outputs: [num_tokens, num_q_heads, HEAD_DIM], contiguous.
        partials: As `decode` stores them.
        log_sums: As `decode` stores them.
        query_start: As `AttentionMetadata`.
        seq_lens: As `AttentionMetadata`.
        most_queries: Sequences of more queries are left alone.
        num_splits: Of `partials`.
        HEAD_DIM: Of outputs.
        PADDED_DIM: The next power of two.
        SPLIT_TOKENS: Positions of a split.
    """
    seq = tl.program_id(0) // most_queries
    index = tl.program_id(0) % most_queries
    head = tl.program_id(1)
    num_q_heads = tl.num_programs(1)
    first_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - first_token
    if (index >= num_queries) | (num_queries > most_queries):
        return
    query_at = tl.load(seq_lens + seq) - num_queries + index
    first_entry = tl.program_id(0).to(tl.int64) * num_q_heads + head
    first_entry = first_entry * num_splits
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    # The sequence of a query has its own token, so there is a split that has seen something.
    highest = float("-inf")
    for split in range(0, query_at // SPLIT_TOKENS + 1):
        highest = tl.maximum(highest, tl.load(log_sums + first_entry + split))
    output = tl.full([PADDED_DIM], 0.0, tl.float32)
    total = 0.0
    for split in range(0, query_at // SPLIT_TOKENS + 1):
        entry = first_entry + split
        weight = tl.exp2(tl.load(log_sums + entry) - highest)
        # What a split that has seen nothing would have stored was never written.
        is_written = tl.where(weight > 0.0, is_dim, False)
        part = tl.load(partials + entry * HEAD_DIM + dims, mask=is_written, other=0.0)
        output += weight * part
        total += weight
    entry = (first_token + index).to(tl.int64) * num_q_heads + head
    output = output / total
    tl.store(outputs + entry * HEAD_DIM + dims, output.to(outputs.dtype.element_ty), mask=is_dim)


@jit_for_any("table_width", "num_seqs")
def prefill(
    outputs: typing.Any,
    inputs: QueryArgs,
    batch: BatchArgs,
    pool: PoolArgs,
    table_width: typing.Any,
    num_seqs: typing.Any,
    most_decode_queries: typing.Any,
    num_q_heads: typing.Any,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Attend from the sequences of many queries, each tile of rows over all that it sees.

    Grid: (num_tokens * GROUP_SIZE // BLOCK_M + num_seqs, num_kv_heads).

    Args:
        outputs: [num_tokens, num_q_heads, HEAD_DIM], contiguous.
        inputs: Queries.
        batch: Metadata.
        pool: One layer.
        table_width: Entries of a sequence's row of the block table.
        num_seqs: Sequences.
        most_decode_queries: Sequences of no more queries are left alone.
        num_q_heads: Query heads.
        HEAD_DIM: Of queries, keys and values.
        PADDED_DIM: The next power of two.
        PART_DIM: Adjacent elements of a key.
        BLOCK_SIZE: Slots of a block.
        GROUP_SIZE: Query heads of a KV head.
        PRECISION: Of products of fp32, as `tl.dot` names it.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Positions of a tile.
    """
    seq, tile = locate(batch.query_start, num_seqs, tl.program_id(0), GROUP_SIZE, BLOCK_M)
    kv_head = tl.program_id(1).to(tl.int64)
    first_token = tl.load(batch.query_start + seq)
    num_queries = tl.load(batch.query_start + seq + 1) - first_token
    num_rows = num_queries * GROUP_SIZE
    first_row = tile * BLOCK_M
    if (first_row >= num_rows) | (num_queries <= most_decode_queries):
        return
    start = tl.load(batch.seq_lens + seq) - num_queries
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    index = row // GROUP_SIZE
    head = (kv_head * GROUP_SIZE + row % GROUP_SIZE).to(tl.int32)
    query_at = tl.where(is_row, start + index, -1)
    query, slope, first_seen, num_sinks = load_rows(
        inputs, batch, seq, first_token + index, head, query_at, is_row, HEAD_DIM, PADDED_DIM
    )
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    # The first row sees the fewest positions. Rows of none see some too here: nobody reads them.
    free_end = (start + first_row // GROUP_SIZE + 1) // BLOCK_N * BLOCK_N
    output, _ = attend_range(
        0,
        free_end,
        start + last_row // GROUP_SIZE + 1,
        query,
        slope,
        query_at,
        first_seen,
        num_sinks,
        inputs,
        pool,
        batch.block_tables + seq.to(tl.int64) * table_width,
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
        HAS_MASKED=True,
    )
    dims = tl.arange(0, PADDED_DIM)
    entry = (first_token + index).to(tl.int64) * num_q_heads + head
    tl.store(
        outputs + entry[:, None] * HEAD_DIM + dims[None, :],
        output.to(outputs.dtype.element_ty),
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
    )
