"""Sequences scattered over a poisoned pool of any dtype, with float64 attention over them."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
import torch

from rayserve_kernels.gpu.launch import LayerView
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout, KVPool, Order
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.quantisation import dequantise, quantise
from rayserve_kernels.reference import dense_attention, seen_positions

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
GARBAGE_BLOCK = 2**31 - 1
NO_WINDOW = 2**31 - 1


@dataclasses.dataclass
class PagedCase:
    """One step. keys[i] and values[i] are what the pool's slots mean, fp32
    [num_kv_heads, length, head_dim], and queries[i] is [num_new, num_q_heads, head_dim]."""

    layout: KVLayout
    view: LayerView
    metadata: AttentionMetadata
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    windows: list[int] | None
    sinks: list[int]
    scale: float
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None

    def oracle(self) -> list[torch.Tensor]:
        """Float64 attention over the sequences' own keys and values: no pool, no table."""
        outputs = []
        for row, queries in enumerate(self.queries):
            keys, values = self.keys[row].double(), self.values[row].double()
            window = None if self.windows is None else self.windows[row]
            seen = seen_positions(
                keys.shape[1] - len(queries), keys.shape[1], window, self.sinks[row]
            )
            outputs.append(
                dense_attention(
                    queries.double(),
                    keys[:, seen],
                    values[:, seen],
                    self.scale,
                    positions=seen,
                    window=window,
                    num_sinks=self.sinks[row],
                    soft_cap=self.soft_cap,
                    alibi_slopes=self.alibi_slopes,
                )
                if len(queries)
                else queries.double()
            )
        return outputs

    def tolerance(self) -> float:
        """What rounding may do: to the weights, to the output, and in fp32 to everything else."""
        rounding = torch.finfo(self.queries[0].dtype).eps / 2
        largest = max(float(values.abs().max()) for values in self.values)
        return (2 * rounding + 64 * 2**-24) * largest

    def agrees(self, output: torch.Tensor) -> bool:
        """Whether rows [num_tokens, num_q_heads, head_dim] are those of the oracle."""
        want = torch.cat(self.oracle())
        error = (output.cpu().double() - want).abs().max()
        # Not <= alone: NaN compares false either way.
        return bool(output.dtype == self.queries[0].dtype and error <= self.tolerance())


def build(
    *,
    dtype: torch.dtype,
    pool_dtype: torch.dtype | None = None,
    order: Order = "block_major",
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    num_computed: Sequence[int] = (40, 0, 17),
    num_new: Sequence[int] = (1, 20, 3),
    windows: Sequence[int] | None = None,
    sinks: Sequence[int] | None = None,
    soft_cap: float | None = None,
    has_alibi: bool = False,
    num_layers: int = 2,
    skipped_blocks: int = 0,
    seed: int = 17,
) -> PagedCase:
    """Scatter sequences over the last layer of a pool; what no query sees is NaN and garbage.

    The queries' dtype is `dtype`, the pool's `pool_dtype` or the same. Windows and sinks go round.
    The first `skipped_blocks` blocks are zeros that no table names, and take no memory.
    """
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    lengths = [a + b for a, b in zip(num_computed, num_new, strict=True)]
    num_seqs = len(lengths)
    windows = None if windows is None else [windows[i % len(windows)] for i in range(num_seqs)]
    sinks = [0] * num_seqs if sinks is None else [sinks[i % len(sinks)] for i in range(num_seqs)]
    slots = pool_dtype or dtype
    layout = KVLayout(
        num_layers, num_kv_heads, block_size, head_dim, slots, order, slots in SCALED_DTYPES
    )
    counts = [-(-length // block_size) for length in lengths]
    pool = layout.allocate(skipped_blocks + sum(counts) + 2)
    for plane in (pool.keys, pool.values, pool.key_scales, pool.value_scales):
        if plane is not None:
            _poison(plane[:, skipped_blocks:])
    num_free = pool.num_blocks - skipped_blocks
    free = (torch.randperm(num_free, generator=generator) + skipped_blocks).tolist()
    tables = np.full((num_seqs, max(counts) + 2), GARBAGE_BLOCK, dtype=np.int32)
    full_tables = np.zeros(tables.shape, dtype=np.int32)
    keys, values = [], []
    for row, length in enumerate(lengths):
        block_ids = [free.pop() for _ in range(counts[row])]
        full_tables[row, : counts[row]] = block_ids
        window = None if windows is None else windows[row]
        seen = seen_positions(num_computed[row], length, window, sinks[row])
        places = [(block_ids[at // block_size], at % block_size) for at in seen]
        for at in seen:
            tables[row, at // block_size] = block_ids[at // block_size]
        for vectors, plane, scales in (
            (keys, pool.keys, pool.key_scales),
            (values, pool.values, pool.value_scales),
        ):
            exact = torch.randn(num_kv_heads, length, head_dim, generator=generator)
            if scales is None:
                stored, factor = exact.to(slots), None
                # The kernels multiply in the queries' dtype.
                vectors.append(stored.to(dtype).float())
            else:
                stored, factor = quantise(exact, slots)
                vectors.append(dequantise(stored, factor))
            for at, (block_id, offset) in zip(seen, places, strict=True):
                target = plane[-1, block_id, :, offset]
                target.copy_(stored[:, at].reshape(target.shape))
                if scales is not None and factor is not None:
                    scales[-1, block_id, :, offset] = factor[:, at]
    metadata = AttentionMetadata.for_step(
        full_tables,
        num_computed,
        num_new,
        block_size,
        DEVICE,
        None if windows is None else np.array(windows, np.int32),
        None if windows is None else np.array(sinks, np.int32),
    )
    metadata = dataclasses.replace(metadata, block_tables=torch.tensor(tables, device=DEVICE))
    pool = KVPool(layout, pool.payload.to(DEVICE))
    return PagedCase(
        layout=layout,
        view=LayerView.of(pool, num_layers - 1),
        metadata=metadata,
        queries=[
            torch.randn(n, num_q_heads, head_dim, generator=generator).to(dtype) for n in num_new
        ],
        keys=keys,
        values=values,
        windows=windows,
        sinks=sinks,
        scale=head_dim**-0.5,
        soft_cap=soft_cap,
        alibi_slopes=0.5 ** torch.arange(1, num_q_heads + 1).float() if has_alibi else None,
    )


def _poison(slots: torch.Tensor) -> None:
    if slots.dtype == torch.int8:
        slots.fill_(127)
    else:
        slots.copy_(torch.full((), float("nan")).to(slots.dtype).expand(slots.shape))
