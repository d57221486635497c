"""Paged attention against float64 attention over the same keys and values in the clear."""

import typing
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import AttentionBackend, ReferenceBackend, TorchBackend
from rayserve_kernels.layout import KVLayout, Order
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.reference import dense_attention

ORDERS: tuple[Order, ...] = typing.get_args(Order)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
# (num_q_heads, num_kv_heads): multi-head, grouped, multi-query.
HEADS = [(3, 3), (6, 2), (4, 1)]


def max_abs_diff(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True))


def odd_steps(block_size: int) -> tuple[list[int], list[int]]:
    """(num_computed, num_new): lengths around multiples of the block, prompts, chunks, decodes."""
    num_computed = [0, 0, 0, 0, 2 * block_size - 1, 2 * block_size, 2 * block_size + 1, 5, 70]
    num_new = [1, max(1, block_size - 1), block_size, block_size + 1, 1, 1, 1, 67, 3]
    return num_computed, num_new


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_attention_agrees_with_the_float64_oracle(
    paged_batch: Callable,
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    num_heads: tuple[int, int],
) -> None:
    layout = KVLayout(2, num_heads[1], block_size, head_dim, dtype)
    batch = paged_batch(layout, num_heads[0], *odd_steps(block_size))
    assert max_abs_diff(batch.step(TorchBackend()), batch.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_paged_reference_equals_attention_without_paging(
    paged_batch: Callable, block_size: int, order: Order
) -> None:
    layout = KVLayout(2, 2, block_size, 8, torch.float64, order)
    batch = paged_batch(layout, 4, *odd_steps(block_size))
    assert max_abs_diff(batch.step(ReferenceBackend()), batch.oracle()) == 0.0


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_layout_gives_the_same_bits(
    paged_batch: Callable, block_size: int, dtype: torch.dtype
) -> None:
    outputs = []
    for order in ORDERS:
        layout = KVLayout(2, 2, block_size, 16, dtype, order)
        batch = paged_batch(layout, 6, *odd_steps(block_size))
        outputs.append(batch.step(TorchBackend()))
        assert max_abs_diff(outputs[-1], batch.oracle()) < TOLERANCE[dtype]
    for output in outputs[1:]:
        assert all(map(torch.equal, output, outputs[0]))


def test_the_dense_reference_is_softmax_by_the_book() -> None:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(2, 7, 8, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 7, 8, generator=generator, dtype=torch.float64)
    got = dense_attention(queries, keys, values, 0.5)
    for index in range(3):
        for head in range(4):
            num_seen = 7 - 3 + index + 1
            weights = [
                torch.exp(0.5 * queries[index, head] @ keys[head // 2, position])
                for position in range(num_seen)
            ]
            seen_values = values[head // 2, :num_seen]
            want = torch.stack(weights) @ seen_values / torch.stack(weights).sum()
            assert torch.allclose(got[index, head], want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [1, 7, 8, 9, 64, 65])
def test_a_prompt_in_chunks_gives_what_it_gives_in_one_step(
    paged_batch: Callable, chunk_size: int, dtype: torch.dtype
) -> None:
    layout = KVLayout(1, 2, 8, 64, dtype)
    num_tokens = 150
    whole = paged_batch(layout, 6, [0], [num_tokens])
    want = whole.step(TorchBackend())[0]
    rows = []
    for start in range(0, num_tokens, chunk_size):
        end = min(start + chunk_size, num_tokens)
        chunk = paged_batch(layout, 6, [start], [end - start])
        chunk.keys, chunk.values = [whole.keys[0][:, :end]], [whole.values[0][:, :end]]
        chunk.pool, chunk.queries = whole.pool, [whole.queries[0][start:end]]
        chunk.metadata = AttentionMetadata.for_step(whole.tables, [start], [end - start], 8)
        rows += chunk.step(TorchBackend())
    assert max_abs_diff([torch.cat(rows)], [want]) < TOLERANCE[dtype]
    assert max_abs_diff([torch.cat(rows)], whole.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [5, 8, 64, 80])
@pytest.mark.parametrize("num_heads", [(1, 1), *HEADS])
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(
    paged_batch: Callable, num_heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    # Rows of 5 elements stand at every alignment, which shows in the last bits of a product.
    layout = KVLayout(1, num_heads[1], 4, head_dim, dtype)
    num_computed, num_new = [30, 0, 17, 40, 0, 9], [1, 3, 1, 5, 70, 1]
    batch = paged_batch(layout, num_heads[0], num_computed, num_new)
    together = batch.step(TorchBackend())
    backend = TorchBackend()
    for rows in ([5], [3], [1, 0], [4, 2], [2, 5, 3, 0, 1, 4]):
        tables = batch.tables[rows]
        metadata = AttentionMetadata.for_step(
            tables, [num_computed[row] for row in rows], [num_new[row] for row in rows], 4
        )
        queries = torch.cat([batch.queries[row] for row in rows])
        output = backend.attend(batch.pool, 0, queries, metadata, batch.scale)
        for row, got in zip(rows, output.split([num_new[row] for row in rows]), strict=True):
            assert torch.equal(got, together[row])


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
@pytest.mark.parametrize("garbage", [-1, 0, 10**6, -(2**31)])
def test_table_entries_beyond_the_length_are_never_looked_at(
    paged_batch: Callable, garbage: int, backend: AttentionBackend
) -> None:
    layout = KVLayout(1, 2, 4, 8, torch.float32)
    plain = paged_batch(layout, 4, [0, 7], [9, 1])
    other = paged_batch(layout, 4, [0, 7], [9, 1], garbage=garbage)
    assert all(map(torch.equal, other.step(backend), plain.step(backend)))


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
def test_a_sequence_without_new_tokens_has_no_rows(
    paged_batch: Callable, backend: AttentionBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 8, torch.float32), 4, [5, 6, 0], [1, 0, 3])
    output = batch.step(backend)
    assert [len(rows) for rows in output] == [1, 0, 3]
    want = batch.oracle()
    assert max_abs_diff([output[0], output[2]], [want[0], want[2]]) < 4e-6


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
def test_strided_queries_as_a_model_passes_them_are_taken(
    paged_batch: Callable, backend: AttentionBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 8, torch.float32), 4, [5, 0], [1, 70])
    plain = batch.step(backend)
    heads_first = torch.cat(batch.queries).transpose(0, 1).contiguous()
    output = backend.attend(batch.pool, 0, heads_first.transpose(0, 1), batch.metadata, batch.scale)
    assert torch.equal(output, torch.cat(plain))


def test_queries_that_do_not_fit_are_refused_with_the_numbers(paged_batch: Callable) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 8, torch.float32), 4, [5, 0], [1, 3])
    backend, good = TorchBackend(), torch.cat(batch.queries)
    for queries, message in (
        (good[:3], r"\(3, 4, 8\): expected \[4, num_q_heads, 8\]"),
        (good[:, :3], "3 query heads: expected a multiple of 2 KV heads"),
        (good.int(), "queries is torch.int32 and the pool float32: expected floats"),
        (good[..., :4], r"expected \[4, num_q_heads, 8\]"),
        (good.transpose(1, 2).contiguous().transpose(1, 2), "expected innermost stride 1"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.attend(batch.pool, 0, queries, batch.metadata, 1.0)


def test_attention_over_integers_is_refused() -> None:
    pool = KVLayout(1, 1, 4, 1, torch.int64).allocate(2)
    metadata = AttentionMetadata.for_step(np.zeros((1, 1), np.int32), [0], [1], 4)
    for dtype in (torch.int64, torch.float32):
        with pytest.raises(ValueError, match="the pool int64: expected floats, and a pool"):
            TorchBackend().attend(pool, 0, torch.ones(1, 1, 1, dtype=dtype), metadata, 1.0)
