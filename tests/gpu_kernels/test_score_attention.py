"""Soft caps and ALiBi: paged attention against float64 attention, query by query, by the book."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayserve_kernels.attention import AttentionBackend, ReferenceBackend, TorchBackend
from rayserve_kernels.layout import KVLayout
from rayserve_kernels.metadata import AttentionMetadata

Batch = Any
"""A `PagedBatch` of conftest.py, which cannot be imported."""

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
NO_WINDOW = 2**31 - 1
# Of six sequences (num_computed, num_new): decodes, prompts and chunks, longer than a query tile.
NUM_COMPUTED = [40, 0, 17, 33, 5, 70]
NUM_NEW = [1, 90, 1, 7, 67, 3]
WINDOWS = [None, ([8] * 6, [0] * 6), ([16, NO_WINDOW, 1, 5, 3, 66], [1, 0, 0, 7, 2, 200])]


def edited(
    batch: Batch,
    soft_cap: float | None,
    with_alibi: bool,
    windows: tuple[list[int], list[int]] | None = None,
) -> Batch:
    num_q_heads = batch.queries[0].shape[1]
    metadata = batch.metadata
    if windows is not None:
        of_each, sinks = (torch.tensor(numbers, dtype=torch.int32) for numbers in windows)
        metadata = dataclasses.replace(metadata, windows=of_each, num_sinks=sinks)
    return dataclasses.replace(
        batch,
        metadata=metadata,
        soft_cap=soft_cap,
        alibi_slopes=0.5 ** torch.arange(1, num_q_heads + 1) if with_alibi else None,
    )


def oracle(batch: Batch, windows: tuple[list[int], list[int]] | None) -> list[torch.Tensor]:
    """Number by number in float64, from the definitions."""
    outputs = []
    for row, queries in enumerate(batch.queries):
        window, num_sinks = (NO_WINDOW, 0) if windows is None else (w[row] for w in windows)
        keys, values = batch.keys[row].double(), batch.values[row].double()
        group_size = queries.shape[1] // keys.shape[0]
        output = torch.empty(queries.shape, dtype=torch.float64)
        for index, query in enumerate(queries.double()):
            at = keys.shape[1] - len(queries) + index
            seen = [key for key in range(at + 1) if at - key < window or key < num_sinks]
            for head in range(queries.shape[1]):
                scores = keys[head // group_size][seen] @ query[head] * batch.scale
                if batch.soft_cap is not None:
                    scores = batch.soft_cap * torch.tanh(scores / batch.soft_cap)
                if batch.alibi_slopes is not None:
                    scores += float(batch.alibi_slopes[head]) * (torch.tensor(seen) - at)
                output[index, head] = scores.softmax(0) @ values[head // group_size][seen]
        outputs.append(output)
    return outputs


def max_abs_diff(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("soft_cap", "with_alibi"), [(0.7, False), (None, True), (1.5, True)])
@pytest.mark.parametrize(
    ("dtype", "num_heads", "block_size", "head_dim"),
    [
        (torch.float64, (6, 2), 4, 8),
        (torch.float32, (3, 3), 1, 80),
        (torch.float32, (6, 2), 16, 16),
        (torch.float16, (4, 1), 4, 64),
        (torch.bfloat16, (6, 2), 8, 5),
    ],
)
def test_caps_and_slopes_agree_with_the_float64_oracle(
    paged_batch: Callable,
    dtype: torch.dtype,
    num_heads: tuple[int, int],
    block_size: int,
    head_dim: int,
    soft_cap: float | None,
    with_alibi: bool,
    windows: tuple[list[int], list[int]] | None,
) -> None:
    layout = KVLayout(2, num_heads[1], block_size, head_dim, dtype)
    plain = paged_batch(layout, num_heads[0], NUM_COMPUTED, NUM_NEW)
    batch = edited(plain, soft_cap, with_alibi, windows)
    want = oracle(batch, windows)
    assert max_abs_diff(batch.step(TorchBackend()), want) < TOLERANCE[dtype]
    in_float64 = batch.step(ReferenceBackend(compute_dtype=torch.float64))
    assert max_abs_diff(in_float64, want) < 1e-12
    unedited = edited(plain, None, False, windows).step(TorchBackend())
    assert max_abs_diff(unedited, want) > 10 * TOLERANCE[dtype], "the edits change nothing here"


@pytest.mark.parametrize("windows", [None, WINDOWS[2]])
def test_an_edited_sequence_gets_the_same_bits_alone_and_in_any_batch(
    paged_batch: Callable, windows: tuple[list[int], list[int]] | None
) -> None:
    # Rows of 5 elements stand at every alignment, which shows in the last bits of a product.
    layout = KVLayout(1, 2, 4, 5, torch.float32)
    batch = edited(paged_batch(layout, 6, NUM_COMPUTED, NUM_NEW), 0.7, True, windows)
    together = batch.step(TorchBackend())
    for rows in ([5], [3], [1, 0], [4, 2], [2, 5, 3, 0, 1, 4]):
        metadata = AttentionMetadata.for_step(
            batch.tables[rows],
            [NUM_COMPUTED[row] for row in rows],
            [NUM_NEW[row] for row in rows],
            4,
        )
        part = dataclasses.replace(
            batch,
            metadata=metadata,
            num_computed=[NUM_COMPUTED[row] for row in rows],
            queries=[batch.queries[row] for row in rows],
            keys=[batch.keys[row] for row in rows],
            values=[batch.values[row] for row in rows],
        )
        if windows is not None:
            own = ([windows[0][row] for row in rows], [windows[1][row] for row in rows])
            part = edited(part, 0.7, True, own)
        for row, got in zip(rows, part.step(TorchBackend()), strict=True):
            assert torch.equal(got, together[row])


@pytest.mark.parametrize("chunk_size", [1, 7, 65])
def test_a_prompt_with_edits_in_chunks_gives_what_it_gives_in_one_step(
    paged_batch: Callable, chunk_size: int
) -> None:
    num_tokens = 150
    layout = KVLayout(1, 2, 8, 64, torch.float32)
    whole = edited(paged_batch(layout, 6, [0], [num_tokens]), 0.7, True)
    want = whole.step(TorchBackend())
    rows = []
    for start in range(0, num_tokens, chunk_size):
        end = min(start + chunk_size, num_tokens)
        metadata = AttentionMetadata.for_step(whole.tables, [start], [end - start], 8)
        chunk = dataclasses.replace(
            whole,
            metadata=metadata,
            num_computed=[start],
            queries=[whole.queries[0][start:end]],
            keys=[whole.keys[0][:, :end]],
            values=[whole.values[0][:, :end]],
        )
        rows += chunk.step(TorchBackend())
    assert max_abs_diff([torch.cat(rows)], want) < 4e-6


@pytest.mark.parametrize("windows", [None, WINDOWS[2]])
@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_dim", "soft_cap", "with_alibi"),
    [
        (torch.float32, (3, 3), 80, 0.7, False),
        (torch.float32, (12, 1), 16, 1.5, True),
        (torch.float16, (4, 1), 64, None, True),
        (torch.bfloat16, (6, 2), 64, 1.5, True),
        (torch.bfloat16, (6, 2), 5, 0.7, False),
    ],
)
def test_native_caps_and_slopes_agree_with_the_float64_oracle(
    paged_batch: Callable,
    native: AttentionBackend,
    dtype: torch.dtype,
    num_heads: tuple[int, int],
    head_dim: int,
    soft_cap: float | None,
    with_alibi: bool,
    windows: tuple[list[int], list[int]] | None,
) -> None:
    plain = paged_batch(
        KVLayout(2, num_heads[1], 8, head_dim, dtype), num_heads[0], NUM_COMPUTED, NUM_NEW
    )
    batch = edited(plain, soft_cap, with_alibi, windows)
    assert max_abs_diff(batch.step(native), oracle(batch, windows)) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
def test_caps_and_slopes_that_are_none_are_refused(
    paged_batch: Callable, backend: AttentionBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 8, torch.float32), 4, [5, 0], [1, 3])
    for soft_cap in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"soft_cap=.*: expected None or a positive finite"):
            dataclasses.replace(batch, soft_cap=soft_cap).step(backend)
    for slopes, message in (
        (torch.ones(3), r"torch.float32 \(3,\): expected torch.float32 \(4,\)"),
        (torch.ones(4, 1), r"torch.float32 \(4, 1\): expected"),
        (torch.ones(4).double(), "alibi_slopes is torch.float64"),
        (torch.ones(4, device="meta"), "on meta .*: expected a contiguous tensor on cpu"),
        (torch.ones(8)[::2], r"with strides \(2,\): expected a contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(batch, alibi_slopes=slopes).step(backend)
