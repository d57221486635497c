"""A batch of sequences scattered over a pool, with the same keys and values kept in the clear."""

import dataclasses
import shutil
import typing
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import AttentionBackend
from rayserve_kernels.cache_write import write_kv
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.native_build import COMPILERS, Width, available_widths, build_library
from rayserve_kernels.native_cpu import NativeBackend
from rayserve_kernels.quantisation import dequantise, quantise
from rayserve_kernels.reference import dense_attention

GARBAGE_BLOCK = 2**31 - 1


@dataclasses.dataclass
class PagedBatch:
    """One step over several sequences, its pool written up to `num_computed`.

    keys[i], values[i]: [num_kv_heads, length, head_dim] of sequence i, contiguous.
    queries[i]: [num_new, num_q_heads, head_dim].
    """

    pool: KVPool
    layer: int
    metadata: AttentionMetadata
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    tables: np.ndarray
    num_computed: Sequence[int]
    scale: float
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None

    def step(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """Write the new tokens, attend, and give each sequence's rows."""
        new_keys = [k[:, n:].transpose(0, 1) for k, n in self._with_computed(self.keys)]
        new_values = [v[:, n:].transpose(0, 1) for v, n in self._with_computed(self.values)]
        backend.write(
            self.pool, self.layer, torch.cat(new_keys), torch.cat(new_values), self.metadata
        )
        queries = torch.cat(self.queries)
        output = backend.attend(
            self.pool,
            self.layer,
            queries,
            self.metadata,
            self.scale,
            soft_cap=self.soft_cap,
            alibi_slopes=self.alibi_slopes,
        )
        return list(output.split([len(q) for q in self.queries]))

    def oracle(self) -> list[torch.Tensor]:
        """Float64 attention over the sequences' own keys and values: no pool, no table."""
        return [
            dense_attention(q.double(), self._stored(k), self._stored(v), self.scale)
            for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
        ]

    def _stored(self, vectors: torch.Tensor) -> torch.Tensor:
        layout = self.pool.layout
        if layout.scaled:
            return dequantise(*quantise(vectors, layout.dtype)).double()
        return vectors.to(layout.dtype).double()

    def _with_computed(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        return list(zip(tensors, self.num_computed, strict=True))


@pytest.fixture(scope="session", params=typing.get_args(Width))
def width(request: pytest.FixtureRequest) -> Width:
    """Each instruction set that this processor has, where there is a compiler."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler")
    width: Width = request.param
    if width not in available_widths():
        pytest.skip(f"this processor has no {width}")
    return width


@pytest.fixture(scope="session")
def native(width: Width, tmp_path_factory: pytest.TempPathFactory) -> NativeBackend:
    """The native kernel, once for each instruction set that this processor has."""
    return NativeBackend(build_library(tmp_path_factory.getbasetemp(), width), width)


@pytest.fixture
def paged_batch() -> Callable[..., PagedBatch]:
    """Build a `PagedBatch`: blocks at random, poison in every slot that is not written."""

    def build(
        layout: KVLayout,
        num_q_heads: int,
        num_computed: Sequence[int],
        num_new: Sequence[int],
        poison: float = float("nan"),
        garbage: int = GARBAGE_BLOCK,
        dtype: torch.dtype | None = None,
    ) -> PagedBatch:
        """`dtype` is that of queries, keys and values; needed where the pool is scaled."""
        dtype = layout.dtype if dtype is None else dtype
        generator = torch.Generator().manual_seed(17)
        lengths = [a + b for a, b in zip(num_computed, num_new, strict=True)]
        counts = [-(-n // layout.block_size) for n in lengths]
        pool = layout.allocate(sum(counts) + 3)
        if pool.key_scales is not None and pool.value_scales is not None:
            pool.payload.fill_(127)
            pool.key_scales.fill_(poison)
            pool.value_scales.fill_(poison)
        else:
            pool.payload.view(layout.dtype).fill_(poison)
        order = torch.randperm(pool.num_blocks, generator=generator).tolist()
        tables = np.full((len(lengths), max(counts) + 2), garbage, dtype=np.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = [order.pop() for _ in range(count)]

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        batch = PagedBatch(
            pool=pool,
            layer=layout.num_layers - 1,
            metadata=AttentionMetadata.for_step(tables, num_computed, num_new, layout.block_size),
            queries=[draw(n, num_q_heads, layout.head_dim) for n in num_new],
            keys=[draw(layout.num_kv_heads, n, layout.head_dim) for n in lengths],
            values=[draw(layout.num_kv_heads, n, layout.head_dim) for n in lengths],
            tables=tables,
            num_computed=num_computed,
            scale=layout.head_dim**-0.5,
        )
        for row, n in enumerate(num_computed):
            for position in range(n):
                block_id = int(tables[row, position // layout.block_size])
                offset = position % layout.block_size
                if layout.scaled:
                    key, value = batch.keys[row][:, position], batch.values[row][:, position]
                    slot = torch.tensor([block_id * layout.block_size + offset])
                    write_kv(pool, batch.layer, key[None], value[None], slot)
                    continue
                key_slot = pool.key_view(batch.layer)[block_id, :, offset]
                key_slot.copy_(batch.keys[row][:, position].reshape(key_slot.shape))
                pool.value_view(batch.layer)[block_id, :, offset] = batch.values[row][:, position]
        return batch

    return build
