"""The native kernel against float64 attention, and its promise of equal bits."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import TorchBackend
from rayserve_kernels.layout import KVLayout, Order
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.native_cpu import NativeBackend
from rayserve_kernels.reference import dense_attention, seen_positions

Batch = Any
"""A `PagedBatch` of conftest.py, which cannot be imported."""

ORDERS: tuple[Order, ...] = typing.get_args(Order)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
NO_WINDOW = 2**31 - 1
# Decodes, prompts and chunks; lengths around multiples of a tile (64) and of a split (512).
NUM_COMPUTED = [0, 63, 64, 511, 512, 700, 0, 0, 30, 490, 5]
NUM_NEW = [1, 1, 1, 1, 1, 1, 9, 130, 67, 40, 0]
WINDOWS = [1, 8, 70, NO_WINDOW, 513, 600, 4, 20, 66, 100, 1]
SINKS = [0, 4, 0, 9, 1, 600, 2, 3, 0, 65, 1]


def max_abs_diff(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    pairs = [pair for pair in zip(got, want, strict=True) if pair[0].numel()]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def with_windows(batch: Batch, windows: list[int], sinks: list[int]) -> Batch:
    """The batch behind windows; what no query sees is poisoned, as are blocks seen by none."""
    block_size = batch.pool.layout.block_size
    tables = batch.tables.copy()
    for row, (start, count) in enumerate(zip(batch.num_computed, NUM_NEW, strict=True)):
        end = start + count
        seen = set(seen_positions(start, end, windows[row], sinks[row])) if count else set()
        for position in set(range(start)) - seen:
            block_id = int(batch.tables[row, position // block_size])
            for view in (batch.pool.key_view(batch.layer), batch.pool.value_view(batch.layer)):
                view[block_id, :, position % block_size] = float("nan")
        # New tokens are written to their places even where none sees them.
        needed = {position // block_size for position in seen | set(range(start, end))}
        for place in set(range(-(-end // block_size))) - needed:
            tables[row, place] = -(2**31)
    metadata = dataclasses.replace(
        batch.metadata,
        block_tables=torch.tensor(tables),
        windows=torch.tensor(windows, dtype=torch.int32),
        num_sinks=torch.tensor(sinks, dtype=torch.int32),
    )
    return dataclasses.replace(batch, metadata=metadata)


def windowed_oracle(batch: Batch, windows: list[int], sinks: list[int]) -> list[torch.Tensor]:
    return [
        dense_attention(
            queries.double(),
            keys.double(),
            values.double(),
            batch.scale,
            window=window,
            num_sinks=num_sinks,
        )
        for queries, keys, values, window, num_sinks in zip(
            batch.queries, batch.keys, batch.values, windows, sinks, strict=True
        )
    ]


def rows_of(
    backend: NativeBackend,
    batch: Batch,
    start: int,
    end: int,
    window: int | None = None,
    num_sinks: int = 0,
) -> torch.Tensor:
    """Attend from tokens `start` to `end - 1` of the only sequence, whose slots are written."""
    metadata = AttentionMetadata.for_step(
        batch.tables,
        [start],
        [end - start],
        batch.pool.layout.block_size,
        windows=None if window is None else np.array([window], np.int32),
        num_sinks=None if window is None else np.array([num_sinks], np.int32),
    )
    queries = batch.queries[0][start:end]
    return backend.attend(batch.pool, batch.layer, queries, metadata, batch.scale)


# (num_q_heads, num_kv_heads): multi-head, grouped by 2, 3, 4, 7, multi-query.
@pytest.mark.parametrize(
    ("head_dim", "num_heads"),
    [
        *((5, (6, 2)), (64, (3, 3)), (64, (7, 1)), (80, (4, 2)), (96, (8, 2)), (128, (1, 1))),
        *((128, (8, 2)), (256, (7, 1))),
    ],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_native_attention_agrees_with_the_float64_oracle(
    paged_batch: Callable[..., Batch],
    native: NativeBackend,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: tuple[int, int],
) -> None:
    layout = KVLayout(2, num_heads[1], 16, head_dim, dtype)
    batch = paged_batch(layout, num_heads[0], NUM_COMPUTED, NUM_NEW)
    assert max_abs_diff(batch.step(native), batch.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("block_size", "dtype"),
    [
        *((1, torch.float32), (3, torch.bfloat16), (8, torch.float16), (40, torch.float32)),
        *((64, torch.bfloat16), (130, torch.float32)),
    ],
)
def test_native_attention_takes_blocks_of_every_size(
    paged_batch: Callable[..., Batch], native: NativeBackend, dtype: torch.dtype, block_size: int
) -> None:
    batch = paged_batch(KVLayout(1, 2, block_size, 32, dtype), 6, NUM_COMPUTED, NUM_NEW)
    assert max_abs_diff(batch.step(native), batch.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 4), (torch.bfloat16, 16), (torch.float16, 4)]
)
def test_every_layout_gives_the_same_bits_by_the_native_kernel(
    paged_batch: Callable[..., Batch], native: NativeBackend, dtype: torch.dtype, block_size: int
) -> None:
    outputs = []
    for order in ORDERS:
        batch = paged_batch(KVLayout(2, 2, block_size, 80, dtype, order), 6, NUM_COMPUTED, NUM_NEW)
        outputs.append(batch.step(native))
        assert max_abs_diff(outputs[-1], batch.oracle()) < TOLERANCE[dtype]
    for output in outputs[1:]:
        assert all(map(torch.equal, output, outputs[0]))


@pytest.mark.parametrize(
    ("windows", "sinks"),
    [(WINDOWS, SINKS), ([1] * 11, [0] * 11), ([16] * 11, [4] * 11), ([90] * 11, SINKS)],
)
@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 3), (torch.bfloat16, 16), (torch.float16, 3)]
)
def test_native_windows_agree_with_the_oracle_whatever_the_hidden_slots_hold(
    paged_batch: Callable[..., Batch],
    native: NativeBackend,
    dtype: torch.dtype,
    block_size: int,
    windows: list[int],
    sinks: list[int],
) -> None:
    plain = paged_batch(KVLayout(2, 2, block_size, 16, dtype), 6, NUM_COMPUTED, NUM_NEW)
    batch = with_windows(plain, windows, sinks)
    want = windowed_oracle(batch, windows, sinks)
    assert max_abs_diff(batch.step(native), want) < TOLERANCE[dtype]


def test_a_window_of_the_whole_length_gives_the_bits_of_full_native_attention(
    paged_batch: Callable[..., Batch], native: NativeBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 16, torch.float32), 6, NUM_COMPUTED, NUM_NEW)
    plain = batch.step(native)
    lengths = [a + b for a, b in zip(NUM_COMPUTED, NUM_NEW, strict=True)]
    assert all(map(torch.equal, with_windows(batch, lengths, [3] * 11).step(native), plain))


@pytest.mark.parametrize(
    ("head_dim", "num_heads"), [(64, (3, 3)), (80, (6, 2)), (5, (8, 2)), (64, (70, 1))]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_sequence_gets_the_same_native_bits_alone_and_in_any_batch(
    paged_batch: Callable[..., Batch],
    native: NativeBackend,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: tuple[int, int],
) -> None:
    batch = paged_batch(
        KVLayout(1, num_heads[1], 4, head_dim, dtype), num_heads[0], NUM_COMPUTED, NUM_NEW
    )
    together = batch.step(native)
    for rows in ([5], [7], [9, 3], [4, 10, 2], [2, 5, 3, 0, 1, 4, 9, 8, 7, 6]):
        metadata = AttentionMetadata.for_step(
            batch.tables[rows],
            [NUM_COMPUTED[row] for row in rows],
            [NUM_NEW[row] for row in rows],
            4,
        )
        queries = torch.cat([batch.queries[row] for row in rows])
        output = native.attend(batch.pool, 0, queries, metadata, batch.scale)
        for row, got in zip(rows, output.split([NUM_NEW[row] for row in rows]), strict=True):
            assert torch.equal(got, together[row])


@pytest.mark.parametrize("masks", [{}, {"window": 70, "num_sinks": 3}])
@pytest.mark.parametrize(
    ("head_dim", "num_heads"), [(64, (2, 2)), (80, (6, 2)), (96, (4, 1)), (64, (7, 1))]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_prompt_in_any_chunks_gives_the_native_bits_of_one_step(
    paged_batch: Callable[..., Batch],
    native: NativeBackend,
    dtype: torch.dtype,
    num_heads: tuple[int, int],
    head_dim: int,
    masks: dict[str, int],
) -> None:
    num_tokens = 600
    batch = paged_batch(KVLayout(1, num_heads[1], 8, head_dim, dtype), num_heads[0], [0], [600])
    batch.step(native)
    whole = rows_of(native, batch, 0, num_tokens, **masks)
    for chunk_size in (1, 7, 64, 65, 512):
        starts = range(0, num_tokens, chunk_size)
        ends = [min(start + chunk_size, num_tokens) for start in starts]
        chunks = [
            rows_of(native, batch, start, end, **masks)
            for start, end in zip(starts, ends, strict=True)
        ]
        assert torch.equal(torch.cat(chunks), whole)


def test_the_number_of_threads_does_not_show_in_the_bits(
    paged_batch: Callable[..., Batch], native: NativeBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 8, 64, torch.float32), 6, NUM_COMPUTED, NUM_NEW)
    num_threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outputs.append(batch.step(native))
    finally:
        torch.set_num_threads(num_threads)
    assert all(map(torch.equal, outputs[0], outputs[1]))
    assert all(map(torch.equal, outputs[0], outputs[2]))


@pytest.mark.parametrize("garbage", [-1, 0, 10**6, -(2**31)])
def test_the_native_kernel_never_looks_at_table_entries_beyond_the_length(
    paged_batch: Callable[..., Batch], native: NativeBackend, garbage: int
) -> None:
    plain = paged_batch(KVLayout(1, 2, 4, 8, torch.float32), 4, NUM_COMPUTED, NUM_NEW)
    other = paged_batch(
        KVLayout(1, 2, 4, 8, torch.float32), 4, NUM_COMPUTED, NUM_NEW, garbage=garbage
    )
    assert all(map(torch.equal, other.step(native), plain.step(native)))


@pytest.mark.parametrize("block_id", [-1, 5, 2**31 - 1])
def test_a_block_in_use_that_is_outside_the_pool_is_refused(
    paged_batch: Callable[..., Batch], native: NativeBackend, block_id: int
) -> None:
    batch = paged_batch(KVLayout(1, 1, 4, 8, torch.float32), 1, [7], [1])
    assert batch.pool.num_blocks == 5
    batch.step(native)
    batch.metadata.block_tables[0, 1] = block_id
    with pytest.raises(ValueError, match="block_tables: expected an entry from 0 to 4"):
        native.attend(batch.pool, 0, batch.queries[0], batch.metadata, 1.0)


def test_a_table_that_is_too_short_is_refused(
    paged_batch: Callable[..., Batch], native: NativeBackend
) -> None:
    batch = paged_batch(KVLayout(1, 1, 4, 8, torch.float32), 1, [7], [1])
    short = dataclasses.replace(
        batch.metadata, block_tables=batch.metadata.block_tables[:, :1].contiguous()
    )
    with pytest.raises(ValueError, match="for each block of a sequence"):
        native.attend(batch.pool, 0, batch.queries[0], short, 1.0)


def test_a_seen_slot_that_is_not_a_number_shows_in_the_output(
    paged_batch: Callable[..., Batch], native: NativeBackend
) -> None:
    for name in ("keys", "values"):
        batch = paged_batch(KVLayout(1, 1, 4, 64, torch.float32), 2, [69, 69], [1, 1])
        getattr(batch, name)[0][:, -1] = float("nan")
        ill, well = batch.step(native)
        assert ill.isnan().all()
        assert well.isfinite().all()


def test_scores_far_apart_neither_overflow_nor_vanish(
    paged_batch: Callable[..., Batch], native: NativeBackend
) -> None:
    batch = paged_batch(KVLayout(1, 1, 4, 64, torch.float32), 2, [600, 0], [1, 80])
    batch.scale = 1e4
    assert max_abs_diff(batch.step(native), batch.oracle()) < 1e-3
    batch.scale = 0.0
    assert max_abs_diff(batch.step(native), batch.oracle()) < 4e-6


def test_strided_queries_as_a_model_passes_them_are_taken_natively(
    paged_batch: Callable[..., Batch], native: NativeBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 8, torch.float32), 4, NUM_COMPUTED, NUM_NEW)
    plain = batch.step(native)
    heads_first = torch.cat(batch.queries).transpose(0, 1).contiguous()
    output = native.attend(batch.pool, 0, heads_first.transpose(0, 1), batch.metadata, batch.scale)
    assert torch.equal(output, torch.cat(plain))


@pytest.mark.parametrize("dtype", [torch.float64])
def test_dtypes_that_the_native_kernel_does_not_take_are_left_to_torch(
    paged_batch: Callable[..., Batch], native: NativeBackend, dtype: torch.dtype
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 8, dtype), 4, NUM_COMPUTED, NUM_NEW)
    assert all(map(torch.equal, batch.step(native), batch.step(TorchBackend())))


def test_the_native_kernel_refuses_queries_that_do_not_fit(
    paged_batch: Callable[..., Batch], native: NativeBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 8, torch.float32), 4, [5, 0], [1, 3])
    good = torch.cat(batch.queries)
    with pytest.raises(ValueError, match=r"\(3, 4, 8\): expected \[4, num_q_heads, 8\]"):
        native.attend(batch.pool, 0, good[:3], batch.metadata, 1.0)
