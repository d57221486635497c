"""Known fault B62: what a block held before it was given out never reaches an output."""

import typing

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    ReferenceBackend,
    TorchBackend,
)
from rayserve_kernels.layout import KVLayout, Order
from rayserve_kernels.native_cpu import NativeBackend

ORDERS: tuple[Order, ...] = typing.get_args(Order)
BLOCK_SIZE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 16, 4, 2, 16, 50


def greedy(
    backend: AttentionBackend, layout: KVLayout, poison: float, num_new: int
) -> tuple[list[int], torch.Tensor]:
    """Decode with one layer of attention over embeddings; (token ids, all attention rows)."""
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB_SIZE, NUM_Q_HEADS, HEAD_DIM, generator=generator)
    embedding = embedding.to(layout.dtype)
    pool = layout.allocate(3)
    poison = min(poison, torch.finfo(layout.dtype).max)
    pool.payload.view(layout.dtype).fill_(poison)
    tables = np.array([[2, 7]], dtype=np.int32)
    token_ids, num_computed, rows = [11, 3, 8, 40, 22], 0, []
    for _ in range(num_new):
        new = token_ids[num_computed:]
        metadata = AttentionMetadata.for_step(tables, [num_computed], [len(new)], BLOCK_SIZE)
        hidden = embedding[new] * (1 + torch.arange(num_computed, len(token_ids))).view(-1, 1, 1)
        hidden = hidden.to(layout.dtype)
        kv = hidden[:, :NUM_KV_HEADS]
        backend.write(pool, 0, kv, kv, metadata)
        attended = backend.attend(pool, 0, hidden, metadata, 0.1)
        rows.append(attended)
        logits = embedding.flatten(1).float() @ attended[-1].flatten().float()
        num_computed = len(token_ids)
        token_ids.append(int(logits.argmax()))
    return token_ids, torch.cat(rows)


def check(order: Order, dtype: torch.dtype, backend: AttentionBackend) -> None:
    layout = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype, order)
    runs = [greedy(backend, layout, poison, 10) for poison in (float("nan"), 1e30, 0.0)]
    token_ids, attended = runs[0]
    assert len(token_ids) == 15
    assert attended.isfinite().all()
    for other_ids, other_attended in runs[1:]:
        assert other_ids == token_ids
        assert torch.equal(other_attended, attended)


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ORDERS)
def test_b62_stale_slots_never_reach_the_output(
    order: Order, dtype: torch.dtype, backend: AttentionBackend
) -> None:
    check(order, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_b62_stale_slots_never_reach_the_output_of_the_native_kernel(
    order: Order, dtype: torch.dtype, native: NativeBackend
) -> None:
    check(order, dtype, native)
