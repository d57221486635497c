"""Eager attention for one sequence, written to be read: the oracle of every other path."""

from collections.abc import Sequence

import torch

from rayserve_kernels.layout import KVPool


def read_slots(
    pool: KVPool, layer: int, block_ids: Sequence[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a sequence's keys and values slot by slot, in any layout.

    Args:
        pool: Read only.
        layer: Layer of the pool.
        block_ids: Block table of the sequence; entries beyond its length are not looked at.
        num_tokens: Length of the sequence, at least 1.

    Returns:
        Keys and values, each [num_kv_heads, num_tokens, head_dim], the pool's dtype.

    Raises:
        ValueError: The table is too short, or an entry that is needed names no block.
    """
    layout = pool.layout
    num_blocks = -(-num_tokens // layout.block_size)
    if num_tokens < 1 or num_blocks > len(block_ids):
        raise ValueError(
            f"num_tokens={num_tokens}: expected 1 to {len(block_ids)} blocks of {layout.block_size}"
        )
    for block_id in block_ids[:num_blocks]:
        if not 0 <= block_id < pool.num_blocks:
            raise ValueError(f"block {block_id}: the pool has blocks 0 to {pool.num_blocks - 1}")
    keys, values = pool.key_view(layer), pool.value_view(layer)
    places = [
        (block_ids[position // layout.block_size], position % layout.block_size)
        for position in range(num_tokens)
    ]
    # flatten joins the two parts of head_dim that the vectorised view keeps apart.
    key_rows = [keys[block_id, :, offset].flatten(1) for block_id, offset in places]
    value_rows = [values[block_id, :, offset] for block_id, offset in places]
    return torch.stack(key_rows, dim=1), torch.stack(value_rows, dim=1)


def dense_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal grouped-query attention of the last tokens of one sequence, without paging.

    Query i stands at position `num_tokens - num_queries + i` and sees the keys up to there.

    Args:
        queries: [num_queries, num_q_heads, head_dim].
        keys: [num_kv_heads, num_tokens, head_dim], the queries' dtype.
        values: As `keys`.
        scale: Factor on the scores before the softmax.

    Returns:
        [num_queries, num_q_heads, head_dim], the queries' dtype.
    """
    num_queries, num_q_heads, _ = queries.shape
    num_kv_heads, num_tokens, _ = keys.shape
    group_size = num_q_heads // num_kv_heads
    # Query head h reads KV head h // group_size.
    keys = keys.repeat_interleave(group_size, dim=0)
    values = values.repeat_interleave(group_size, dim=0)
    scores = torch.einsum("qhd,hnd->hqn", queries, keys) * scale
    positions = torch.arange(num_tokens, device=queries.device)
    is_later = positions > positions[num_tokens - num_queries :, None]
    weights = scores.masked_fill(is_later, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqn,hnd->qhd", weights, values)
