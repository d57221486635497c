"""Attention in plain torch: gather a sequence's blocks, then grouped-query SDPA.

Works on every device that torch has, and is meant for CPUs. One sequence is computed at a time,
so that its result cannot depend, not even in the last bit, on its neighbours in the batch.
"""

import torch
import torch.nn.functional as F

from rayserve_kernels.layout import KVPool
from rayserve_kernels.quantisation import dequantise

# Fewer query tokens skip more of the causal triangle, more of them feed larger matrix products.
# Of 32 to 512, 64 was the fastest or within 6% of it (chunks of 100 and 512 tokens, one core).
QUERY_TILE = 64


def gather_sequence(
    pool: KVPool, layer: int, block_ids: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a sequence's keys and values out of its blocks, in any layout and dtype.

    Args:
        pool: Read only.
        layer: Layer of the pool.
        block_ids: int32 or int64 [num_blocks], exactly the blocks that hold the sequence.
        num_tokens: Length of the sequence. Slots beyond it are not in the result.

    Returns:
        Keys and values, each [num_kv_heads, num_tokens, head_dim], the pool's dtype, or fp32 where
        it is scaled, with head and slot strides that depend on `num_blocks` and the layout's sizes
        alone.
    """
    keys = _read(pool.key_view(layer), pool.key_scale_view(layer), block_ids)
    values = _read(pool.value_view(layer), pool.value_scale_view(layer), block_ids)
    return keys.narrow(1, 0, num_tokens), values.narrow(1, 0, num_tokens)


def _read(
    view: torch.Tensor, scale_view: torch.Tensor | None, block_ids: torch.Tensor
) -> torch.Tensor:
    vectors = _gather(view, block_ids)
    if scale_view is None:
        return vectors
    return dequantise(vectors, _gather(scale_view.unsqueeze(-1), block_ids).squeeze(-1))


def _gather(view: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """[num_blocks, num_kv_heads, block_size, ...] -> [num_kv_heads, slots of these blocks, n]."""
    # The leading 1 matters: index_select makes the *whole pool* contiguous first where the
    # dimension that it selects from is the second of a strided tensor.
    picked = view.transpose(0, 1).unsqueeze(0).index_select(2, block_ids)
    num_kv_heads, num_slots = view.shape[1], block_ids.numel() * view.shape[2]
    return picked.view(num_kv_heads, num_slots, -1)


def attend_sequence(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """Causal grouped-query attention of the last tokens of one sequence.

    The query heads that share a KV head, and the tokens of a tile, are packed into the rows of
    one matrix per KV head: keys are never repeated, and decode (one token) is a case like others.

    Args:
        queries: [num_queries, num_kv_heads, group_size, head_dim], any strides, where KV head h
            serves query heads h * group_size and the group_size - 1 after it.
        keys: [num_kv_heads, num_tokens, head_dim], num_tokens >= num_queries, same dtype.
        values: As `keys`.
        scale: Factor on the scores before the softmax.

    Returns:
        Pieces of the result, to be concatenated in this order: each
        [some queries, num_kv_heads, group_size, head_dim].
    """
    num_queries, num_kv_heads, group_size, head_dim = queries.shape
    start = keys.shape[1] - num_queries
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    pieces = []
    for first in range(0, num_queries, QUERY_TILE):
        size = min(QUERY_TILE, num_queries - first)
        num_seen = start + first + size
        # Always a copy: matrix products differ in their last bits with the alignment of their
        # operands, and a view's alignment follows from the sequence's place in the batch.
        tile = queries.narrow(0, first, size).permute(1, 2, 0, 3)
        rows = tile.clone(memory_format=torch.contiguous_format)
        attended = F.scaled_dot_product_attention(
            rows.view(1, num_kv_heads, group_size * size, head_dim),
            keys.narrow(2, 0, num_seen),
            values.narrow(2, 0, num_seen),
            attn_mask=_causal_mask(size, num_seen, group_size, queries.device),
            scale=scale,
        )
        attended = attended.view(num_kv_heads, group_size, size, head_dim)
        pieces.append(attended.permute(2, 0, 1, 3))
    return pieces


def _causal_mask(
    num_queries: int, num_seen: int, group_size: int, device: torch.device
) -> torch.Tensor | None:
    """What each row of a tile may see: bool [group_size * num_queries, num_seen], None for all."""
    if num_queries == 1:
        return None
    mask = torch.ones(num_queries, num_seen, dtype=torch.bool, device=device)
    mask = mask.tril(num_seen - num_queries)
    return mask.expand(group_size, -1, -1).reshape(-1, num_seen)
