"""Eager attention for one sequence, written to be read: the oracle of every other path."""

from collections.abc import Sequence

import torch

from rayserve_kernels.layout import KVPool
from rayserve_kernels.quantisation import dequantise


def seen_positions(
    first_query: int, num_tokens: int, window: int | None = None, num_sinks: int = 0
) -> list[int]:
    """Return the positions that any query at `first_query` to `num_tokens - 1` sees, ascending."""
    return [
        position
        for position in range(num_tokens)
        if window is None or position < num_sinks or max(position, first_query) - position < window
    ]


def read_slots(
    pool: KVPool, layer: int, block_ids: Sequence[int], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values of a sequence slot by slot, in any layout.

    Args:
        pool: Read only.
        layer: Layer of the pool.
        block_ids: Block table of the sequence; entries of other positions are not looked at.
        positions: At least one, of those that the sequence has.

    Returns:
        Keys and values, each [num_kv_heads, len(positions), head_dim], the pool's dtype, or fp32
        where it is scaled.

    Raises:
        ValueError: The table is too short, or an entry that is needed names no block.
    """
    layout = pool.layout
    most = len(block_ids) * layout.block_size
    if not positions or max(positions) >= most:
        raise ValueError(
            f"positions={positions}: expected some below {most}, which the block table holds"
        )
    places = [
        (block_ids[position // layout.block_size], position % layout.block_size)
        for position in positions
    ]
    for block_id, _offset in places:
        if not 0 <= block_id < pool.num_blocks:
            raise ValueError(f"block {block_id}: the pool has blocks 0 to {pool.num_blocks - 1}")
    keys = _read(pool.key_view(layer), pool.key_scale_view(layer), places)
    values = _read(pool.value_view(layer), pool.value_scale_view(layer), places)
    return keys, values


def _read(
    view: torch.Tensor, scale_view: torch.Tensor | None, places: Sequence[tuple[int, int]]
) -> torch.Tensor:
    # flatten joins the two parts of head_dim that the vectorised view of keys keeps apart.
    rows = [view[block_id, :, offset].flatten(1) for block_id, offset in places]
    vectors = torch.stack(rows, dim=1)
    if scale_view is None:
        return vectors
    scales = [scale_view[block_id, :, offset] for block_id, offset in places]
    return dequantise(vectors, torch.stack(scales, dim=1))


def dense_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    positions: Sequence[int] | None = None,
    window: int | None = None,
    num_sinks: int = 0,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention of the last tokens of one sequence, without paging.

    The queries stand at the positions of the last keys. A query at position q sees the keys up to
    its own; with a window, of these only those above q - window and below `num_sinks`.

    Args:
        queries: [num_queries, num_q_heads, head_dim].
        keys: [num_kv_heads, num_keys, head_dim], the queries' dtype.
        values: As `keys`.
        scale: Factor on the scores before the softmax.
        positions: Of the keys, ascending; None for 0 to num_keys - 1.
        window: Positions that a query sees, its own the last; None for all.
        num_sinks: First positions that every query sees besides.
        soft_cap: Bound on a score, before anything is added to it; None for none.
        alibi_slopes: [num_q_heads], factors on key position - query position; None to add nothing.

    Returns:
        [num_queries, num_q_heads, head_dim], the queries' dtype.
    """
    num_queries, num_q_heads, _ = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    group_size = num_q_heads // num_kv_heads
    # Query head h reads KV head h // group_size.
    keys = keys.repeat_interleave(group_size, dim=0)
    values = values.repeat_interleave(group_size, dim=0)
    scores = torch.einsum("qhd,hnd->hqn", queries, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if positions is None:
        positions = range(num_keys)
    key_at = torch.tensor(positions, device=queries.device)
    query_at = key_at[num_keys - num_queries :, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype)[:, None, None] * (key_at - query_at)
    hidden = key_at > query_at
    if window is not None:
        hidden |= (query_at - key_at >= window) & (key_at >= num_sinks)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqn,hnd->qhd", weights, values)
