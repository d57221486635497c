"""Attention within a sliding window, and to sinks, in plain torch: gathers only what is seen."""

import torch
import torch.nn.functional as F

from rayserve_kernels.cpu import QUERY_TILE, gather_sequence
from rayserve_kernels.layout import KVPool


def attend_window(
    pool: KVPool,
    layer: int,
    queries: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: int,
    *,
    window: int,
    num_sinks: int,
    scale: float,
) -> list[torch.Tensor]:
    """Grouped-query attention of the last tokens of one sequence to a window and to sinks.

    A query at position q sees positions q - window + 1 to q, and those below `num_sinks`.

    Args:
        pool: Read only; only slots that some query sees influence the result.
        layer: Layer of the pool.
        queries: [num_queries, num_kv_heads, group_size, head_dim], any strides, of the dtype to
            compute in.
        block_table: int32 [width], of the sequence; only blocks that some query sees are read.
        num_tokens: Length of the sequence.
        window: At least 1.
        num_sinks: At least 0.
        scale: Factor on the scores before the softmax.

    Returns:
        Pieces of the result, as `cpu.attend_sequence` returns them.
    """
    num_queries, num_kv_heads, group_size, head_dim = queries.shape
    start = num_tokens - num_queries
    pieces = []
    for first in range(0, num_queries, QUERY_TILE):
        size = min(QUERY_TILE, num_queries - first)
        keys, values, positions = gather_seen(
            pool, layer, block_table, start + first, start + first + size, window, num_sinks
        )
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        # A copy, for the reason that `cpu.attend_sequence` tells.
        tile = queries.narrow(0, first, size).permute(1, 2, 0, 3)
        rows = tile.clone(memory_format=torch.contiguous_format)
        attended = F.scaled_dot_product_attention(
            rows.view(1, num_kv_heads, group_size * size, head_dim),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=seen_mask(positions, start + first, size, group_size, window, num_sinks),
            scale=scale,
        )
        attended = attended.view(num_kv_heads, group_size, size, head_dim)
        pieces.append(attended.permute(2, 0, 1, 3))
    return pieces


def gather_seen(
    pool: KVPool,
    layer: int,
    block_table: torch.Tensor,
    first_query: int,
    end: int,
    window: int,
    num_sinks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy what some query at `first_query` to `end` - 1 sees.

    Args:
        pool: Read only.
        layer: Layer of the pool.
        block_table: int32 [width], of the sequence.
        first_query: Position of the first query.
        end: Position after the last query.
        window: At least 1.
        num_sinks: At least 0.

    Returns:
        Keys and values, each [num_kv_heads, n, head_dim], contiguous, and positions, int64 [n].
    """
    begin = max(0, first_query - window + 1)
    ranges = [(0, end)] if begin <= num_sinks else [(0, num_sinks), (begin, end)]
    block_size = pool.layout.block_size
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    for low, high in ranges:
        if low == high:
            continue
        place = low // block_size
        block_ids = block_table.narrow(0, place, -(-high // block_size) - place)
        skipped = place * block_size
        for gathered, parts in zip(
            gather_sequence(pool, layer, block_ids, high - skipped), (keys, values), strict=True
        ):
            parts.append(gathered.narrow(1, low - skipped, high - low))
        positions.append(torch.arange(low, high, device=pool.device))
    # A copy, whose alignment does not depend on where in a block the window begins.
    return torch.cat(keys, 1), torch.cat(values, 1), torch.cat(positions)


def seen_mask(
    positions: torch.Tensor,
    first_query: int,
    num_queries: int,
    group_size: int,
    window: int,
    num_sinks: int,
) -> torch.Tensor | None:
    """What each row of a tile may see.

    Args:
        positions: int64 [n], of the keys.
        first_query: Position of the tile's first query.
        num_queries: Of the tile, at consecutive positions.
        group_size: Query heads of a KV head; row g * num_queries + i is query i of head g.
        window: At least 1.
        num_sinks: At least 0.

    Returns:
        bool [group_size * num_queries, n]; None where every row sees all.
    """
    if num_queries == 1:
        return None
    queries = torch.arange(first_query, first_query + num_queries, device=positions.device)[:, None]
    seen = (positions > queries - window) | (positions < num_sinks)
    seen &= positions <= queries
    return seen.expand(group_size, -1, -1).reshape(-1, len(positions))
