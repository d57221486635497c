"""The one interface between a model and the kernels: write keys and values, then attend."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from rayserve_kernels.cache_write import write_kv
from rayserve_kernels.cpu import attend_sequence, gather_sequence
from rayserve_kernels.cpu_scores import attend_scores
from rayserve_kernels.cpu_window import attend_window
from rayserve_kernels.layout import KVPool
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.reference import dense_attention, read_slots, seen_positions


class AttentionBackend(Protocol):
    """Runs attention over a paged pool. Implementations keep no state between calls.

    Attributes:
        numerics: Name of the class of implementations whose results may be mixed.
    """

    numerics: str

    def write(
        self,
        pool: KVPool,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the new tokens' keys and values into their slots.

        Args:
            pool: Written in place.
            layer: Layer of the pool.
            keys: [num_tokens, num_kv_heads, head_dim], as `cache_write.write_kv` takes them.
            values: As `keys`.
            metadata: Of this step.

        Raises:
            ValueError: A tensor does not fit the pool or the metadata.
        """
        ...

    def attend(
        self,
        pool: KVPool,
        layer: int,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from the new tokens, whose keys and values are written, to their sequences.

        Args:
            pool: Read only. Slots beyond a sequence's length, and those that windows hide from all
                its queries, never influence the result.
            layer: Layer of the pool.
            queries: [num_tokens, num_q_heads, head_dim], floats, innermost stride 1. The pool holds
                floats of any dtype, or codes with scales.
            metadata: Of this step.
            scale: Factor on the scores before the softmax.
            soft_cap: Positive: bounds a score to soft_cap * tanh(scale * q.k / soft_cap), before
                anything is added to it (Gemma 2, arXiv 2408.00118, section 2). None for no bound.
            alibi_slopes: fp32 [num_q_heads], contiguous: adds slope * (key position - query
                position) to a score (ALiBi, arXiv 2108.12409). None to add nothing.

        Returns:
            [num_tokens, num_q_heads, head_dim], the queries' dtype.

        Raises:
            ValueError: A tensor does not fit the pool or the metadata.
        """
        ...


class TorchBackend:
    """Gather and SDPA, sequence by sequence: what runs where no faster kernel does."""

    numerics = "default"

    def write(
        self,
        pool: KVPool,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """As `AttentionBackend.write`."""
        write_kv(pool, layer, keys, values, metadata.slot_mapping)

    def attend(
        self,
        pool: KVPool,
        layer: int,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`; a sequence's result does not depend on the others.

        Computes in the wider dtype of queries and pool, for which codes count as fp32.
        """
        check_attend(pool, queries, metadata, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
        stored = torch.float32 if pool.layout.scaled else pool.layout.dtype
        dtype = torch.promote_types(queries.dtype, stored)
        grouped = queries.to(dtype).unflatten(1, (pool.layout.num_kv_heads, -1))
        pieces = [grouped.narrow(0, 0, 0)]
        for row, span in enumerate(metadata.spans):
            if span.first_query == span.end_query:
                continue
            own_queries = grouped.narrow(0, span.first_query, span.end_query - span.first_query)
            table = metadata.block_tables.select(0, row)
            if soft_cap is not None or alibi_slopes is not None:
                pieces += attend_scores(
                    pool,
                    layer,
                    own_queries,
                    table,
                    span.num_tokens,
                    window=span.window,
                    num_sinks=span.num_sinks,
                    scale=scale,
                    soft_cap=soft_cap,
                    alibi_slopes=alibi_slopes,
                )
            elif span.window is None:
                num_blocks = -(-span.num_tokens // pool.layout.block_size)
                keys, values = gather_sequence(
                    pool, layer, table.narrow(0, 0, num_blocks), span.num_tokens
                )
                pieces += attend_sequence(own_queries, keys.to(dtype), values.to(dtype), scale)
            else:
                pieces += attend_window(
                    pool,
                    layer,
                    own_queries,
                    table,
                    span.num_tokens,
                    window=span.window,
                    num_sinks=span.num_sinks,
                    scale=scale,
                )
        return torch.cat(pieces).view(queries.shape).to(queries.dtype)


class ReferenceBackend:
    """The oracle: slow, eager, one slot at a time.

    Args:
        compute_dtype: What attention is computed in and answered in; None for the queries' own.
    """

    numerics = "reference"

    def __init__(self, compute_dtype: torch.dtype | None = None) -> None:
        self._compute_dtype = compute_dtype

    def write(
        self,
        pool: KVPool,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """As `AttentionBackend.write`."""
        write_kv(pool, layer, keys, values, metadata.slot_mapping)

    def attend(
        self,
        pool: KVPool,
        layer: int,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        soft_cap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`; the result has the compute dtype."""
        check_attend(pool, queries, metadata, soft_cap=soft_cap, alibi_slopes=alibi_slopes)
        dtype = self._compute_dtype or queries.dtype
        output = torch.empty(queries.shape, dtype=dtype, device=queries.device)
        tables: Sequence[Sequence[int]] = metadata.block_tables.tolist()
        for table, span in zip(tables, metadata.spans, strict=True):
            first, end, num_tokens, window, num_sinks = span
            if first == end:
                continue
            seen = seen_positions(num_tokens - (end - first), num_tokens, window, num_sinks)
            keys, values = read_slots(pool, layer, table, seen)
            output[first:end] = dense_attention(
                queries[first:end].to(dtype),
                keys.to(dtype),
                values.to(dtype),
                scale,
                positions=seen,
                window=window,
                num_sinks=num_sinks,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
            )
        return output


def check_attend(
    pool: KVPool,
    queries: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Check what every implementation of `AttentionBackend.attend` expects.

    Raises:
        ValueError: A shape, dtype, device or stride that does not fit, or a cap that is none.
    """
    layout = pool.layout
    num_q_heads = queries.shape[1] if queries.dim() == 3 else 0
    if num_q_heads < 1 or queries.shape != (metadata.num_tokens, num_q_heads, layout.head_dim):
        raise ValueError(
            f"queries is {tuple(queries.shape)}: expected [{metadata.num_tokens}, num_q_heads, "
            f"{layout.head_dim}]"
        )
    if num_q_heads % layout.num_kv_heads:
        raise ValueError(
            f"{num_q_heads} query heads: expected a multiple of {layout.num_kv_heads} KV heads"
        )
    holds_floats = layout.scaled or layout.dtype.is_floating_point
    if not queries.dtype.is_floating_point or not holds_floats:
        raise ValueError(
            f"queries is {queries.dtype} and the pool {layout.coding}: expected floats, and a pool "
            f"of floats or of codes with scales"
        )
    if queries.device != pool.device or metadata.seq_lens.device != pool.device:
        raise ValueError(
            f"queries on {queries.device}, metadata on {metadata.seq_lens.device} and the pool on "
            f"{pool.device}: expected one device"
        )
    if queries.stride(-1) != 1:
        raise ValueError(f"queries has strides {queries.stride()}: expected innermost stride 1")
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"soft_cap={soft_cap}: expected None or a positive finite number")
    if alibi_slopes is None:
        return
    if alibi_slopes.dtype != torch.float32 or alibi_slopes.shape != (num_q_heads,):
        raise ValueError(
            f"alibi_slopes is {alibi_slopes.dtype} {tuple(alibi_slopes.shape)}: expected "
            f"torch.float32 ({num_q_heads},)"
        )
    if alibi_slopes.device != pool.device or not alibi_slopes.is_contiguous():
        raise ValueError(
            f"alibi_slopes on {alibi_slopes.device} with strides {alibi_slopes.stride()}: expected "
            f"a contiguous tensor on {pool.device}"
        )
