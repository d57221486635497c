"""Attention whose scores are bounded or biased by distance, in plain torch, step by step."""

import torch

from rayserve_kernels.cpu import QUERY_TILE
from rayserve_kernels.cpu_window import gather_seen, seen_mask
from rayserve_kernels.layout import KVPool


def attend_scores(
    pool: KVPool,
    layer: int,
    queries: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: int,
    *,
    window: int | None,
    num_sinks: int,
    scale: float,
    soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Grouped-query attention of the last tokens of one sequence, with a soft cap and ALiBi.

    Computed in fp32 where the queries' dtype is narrower.

    Args:
        pool: Read only; only slots that some query sees influence the result.
        layer: Layer of the pool.
        queries: [num_queries, num_kv_heads, group_size, head_dim], any strides.
        block_table: int32 [width], of the sequence; only blocks that some query sees are read.
        num_tokens: Length of the sequence.
        window: Positions that a query sees, its own the last; None for all.
        num_sinks: First positions that every query sees besides.
        scale: Factor on the scores.
        soft_cap: Bound on a score, before anything is added to it; None for none.
        alibi_slopes: fp32 [num_kv_heads * group_size]; None to add nothing.

    Returns:
        Pieces of the result, as `cpu.attend_sequence` returns them.
    """
    num_queries, num_kv_heads, group_size, head_dim = queries.shape
    start = num_tokens - num_queries
    # One of the whole length hides nothing.
    window = num_tokens if window is None else window
    dtype = torch.promote_types(queries.dtype, torch.float32)
    pieces = []
    for first in range(0, num_queries, QUERY_TILE):
        size = min(QUERY_TILE, num_queries - first)
        keys, values, positions = gather_seen(
            pool, layer, block_table, start + first, start + first + size, window, num_sinks
        )
        # A copy, for the reason that `cpu.attend_sequence` tells.
        tile = queries.narrow(0, first, size).permute(1, 2, 0, 3)
        rows = tile.clone(memory_format=torch.contiguous_format).to(dtype)
        rows = rows.view(num_kv_heads, group_size * size, head_dim)
        scores = rows @ keys.to(dtype).transpose(1, 2) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if alibi_slopes is not None:
            query_at = torch.arange(start + first, start + first + size, device=queries.device)
            slopes = alibi_slopes.to(dtype).view(num_kv_heads, group_size, 1, 1)
            scores += (slopes * (positions - query_at[:, None])).view(scores.shape)
        mask = seen_mask(positions, start + first, size, group_size, window, num_sinks)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        attended = (scores.softmax(dim=-1) @ values.to(dtype)).to(queries.dtype)
        attended = attended.view(num_kv_heads, group_size, size, head_dim)
        pieces.append(attended.permute(2, 0, 1, 3))
    return pieces
