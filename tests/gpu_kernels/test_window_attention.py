"""Windows and sinks: paged attention against float64 attention that masks what is hidden."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import AttentionBackend, ReferenceBackend, TorchBackend
from rayserve_kernels.layout import KVLayout, Order
from rayserve_kernels.metadata import AttentionMetadata, SequenceSpan
from rayserve_kernels.reference import dense_attention, seen_positions

Batch = Any
"""A `PagedBatch` of conftest.py, which cannot be imported."""

ORDERS: tuple[Order, ...] = typing.get_args(Order)
BACKENDS = [TorchBackend(), ReferenceBackend()]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 3e-2}
NO_WINDOW = 2**31 - 1
# Of six sequences (num_computed, num_new): decodes, prompts and chunks, longer than a query tile.
NUM_COMPUTED = [40, 0, 17, 33, 5, 70]
NUM_NEW = [1, 90, 1, 7, 67, 3]
WINDOWS = [[8, 8, 8, 8, 8, 8], [1, 1, 1, 1, 1, 1], [16, NO_WINDOW, 1, 5, 3, 66]]
SINKS = [[0] * 6, [4] * 6, [1, 0, 0, 7, 2, 200]]


def with_windows(batch: Batch, windows: list[int], sinks: list[int]) -> Batch:
    metadata = dataclasses.replace(
        batch.metadata,
        windows=torch.tensor(windows, dtype=torch.int32),
        num_sinks=torch.tensor(sinks, dtype=torch.int32),
    )
    return dataclasses.replace(batch, metadata=metadata)


def is_seen(query: int, position: int, window: int, num_sinks: int) -> bool:
    return position <= query and (query - position < window or position < num_sinks)


def masked_oracle(batch: Batch, windows: list[int], sinks: list[int]) -> list[torch.Tensor]:
    """Query by query, softmax over the keys that it sees, in float64."""
    outputs = []
    for row, queries in enumerate(batch.queries):
        keys, values = batch.keys[row].double(), batch.values[row].double()
        group_size = queries.shape[1] // keys.shape[0]
        start = keys.shape[1] - len(queries)
        output = torch.empty(queries.shape, dtype=torch.float64)
        for index, query in enumerate(queries.double()):
            seen = [
                position
                for position in range(keys.shape[1])
                if is_seen(start + index, position, windows[row], sinks[row])
            ]
            for head in range(queries.shape[1]):
                own_keys = keys[head // group_size][seen]
                weights = (own_keys @ query[head] * batch.scale).softmax(0)
                output[index, head] = weights @ values[head // group_size][seen]
        outputs.append(output)
    return outputs


def max_abs_diff(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True))


def hide(batch: Batch, windows: list[int], sinks: list[int], garbage: int) -> None:
    """Poison every slot that no query sees, and put garbage for blocks that none of them sees."""
    block_size = batch.pool.layout.block_size
    tables = batch.tables.copy()
    for row, (start, count) in enumerate(zip(batch.num_computed, NUM_NEW, strict=True)):
        end = start + count
        seen = {
            position
            for position in range(end)
            if any(
                is_seen(query, position, windows[row], sinks[row]) for query in range(start, end)
            )
        }
        for position in set(range(start)) - seen:
            block_id = int(batch.tables[row, position // block_size])
            offset = position % block_size
            batch.pool.key_view(batch.layer)[block_id, :, offset] = float("nan")
            batch.pool.value_view(batch.layer)[block_id, :, offset] = float("nan")
        # The places that new tokens are written to stay, as their slots are taken from there.
        needed = {position // block_size for position in seen | set(range(start, end))}
        for place in range(-(-end // block_size)):
            if place not in needed:
                tables[row, place] = garbage
    batch.metadata = dataclasses.replace(batch.metadata, block_tables=torch.tensor(tables))


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_windows_agree_with_the_masked_oracle_whatever_the_hidden_slots_hold(
    paged_batch: Callable,
    dtype: torch.dtype,
    block_size: int,
    windows: list[int],
    sinks: list[int],
) -> None:
    layout = KVLayout(2, 2, block_size, 16, dtype)
    batch = with_windows(paged_batch(layout, 6, NUM_COMPUTED, NUM_NEW), windows, sinks)
    want = masked_oracle(batch, windows, sinks)
    for backend in BACKENDS:
        hide(batch, windows, sinks, garbage=2**31 - 1)
        assert max_abs_diff(batch.step(backend), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("order", ORDERS)
def test_every_layout_gives_the_same_bits_behind_a_window(
    paged_batch: Callable, order: Order
) -> None:
    windows, sinks = WINDOWS[2], SINKS[2]
    outputs = []
    for one in ("block_major", order):
        batch = paged_batch(KVLayout(2, 2, 4, 16, torch.float32, one), 6, NUM_COMPUTED, NUM_NEW)
        outputs.append(with_windows(batch, windows, sinks).step(TorchBackend()))
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_the_whole_length_gives_the_bits_of_full_attention(
    paged_batch: Callable, backend: AttentionBackend
) -> None:
    batch = paged_batch(KVLayout(1, 2, 4, 16, torch.float32), 6, NUM_COMPUTED, NUM_NEW)
    lengths = [a + b for a, b in zip(NUM_COMPUTED, NUM_NEW, strict=True)]
    plain = batch.step(backend)
    assert all(map(torch.equal, with_windows(batch, lengths, [3] * 6).step(backend), plain))


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 65])
def test_a_windowed_prompt_in_chunks_gives_what_it_gives_in_one_step(
    paged_batch: Callable, chunk_size: int
) -> None:
    num_tokens = 150
    whole = with_windows(
        paged_batch(KVLayout(1, 2, 8, 64, torch.float32), 6, [0], [num_tokens]), [20], [3]
    )
    want = whole.step(TorchBackend())
    rows = []
    for start in range(0, num_tokens, chunk_size):
        end = min(start + chunk_size, num_tokens)
        metadata = AttentionMetadata.for_step(
            whole.tables,
            [start],
            [end - start],
            8,
            windows=np.array([20], np.int32),
            num_sinks=np.array([3], np.int32),
        )
        queries = whole.queries[0][start:end]
        rows.append(TorchBackend().attend(whole.pool, 0, queries, metadata, whole.scale))
    assert max_abs_diff([torch.cat(rows)], want) < 4e-6


def test_a_windowed_sequence_gets_the_same_bits_alone_and_in_any_batch(
    paged_batch: Callable,
) -> None:
    # Rows of 5 elements stand at every alignment, which shows in the last bits of a product.
    batch = paged_batch(KVLayout(1, 2, 4, 5, torch.float32), 6, NUM_COMPUTED, NUM_NEW)
    together = with_windows(batch, WINDOWS[2], SINKS[2]).step(TorchBackend())
    for rows in ([5], [3], [1, 0], [4, 2], [2, 5, 3, 0, 1, 4]):
        metadata = AttentionMetadata.for_step(
            batch.tables[rows],
            [NUM_COMPUTED[row] for row in rows],
            [NUM_NEW[row] for row in rows],
            4,
            windows=np.array([WINDOWS[2][row] for row in rows], np.int32),
            num_sinks=np.array([SINKS[2][row] for row in rows], np.int32),
        )
        queries = torch.cat([batch.queries[row] for row in rows])
        output = TorchBackend().attend(batch.pool, 0, queries, metadata, batch.scale)
        for row, got in zip(rows, output.split([NUM_NEW[row] for row in rows]), strict=True):
            assert torch.equal(got, together[row])


def test_the_dense_reference_hides_what_the_window_hides() -> None:
    assert seen_positions(9, 10, 3, 2) == [0, 1, 7, 8, 9]
    assert seen_positions(7, 10, 3, 1) == [0, 5, 6, 7, 8, 9]
    assert seen_positions(0, 4, 1) == [0, 1, 2, 3]
    assert seen_positions(3, 4) == [0, 1, 2, 3]
    queries = torch.zeros(2, 1, 1, dtype=torch.float64)
    values = torch.tensor([[[1.0], [10.0], [100.0], [1000.0], [10000.0]]], dtype=torch.float64)
    output = dense_attention(queries, torch.zeros_like(values), values, 1.0, window=2, num_sinks=1)
    assert output[:, 0, 0].tolist() == pytest.approx([1101 / 3, 11001 / 3])


def test_spans_name_the_windows_that_hide_something() -> None:
    tables = np.zeros((3, 4), np.int32)
    metadata = AttentionMetadata.for_step(
        tables,
        [9, 3, 5],
        [1, 1, 1],
        4,
        windows=np.array([4, 4, NO_WINDOW], np.int32),
        num_sinks=np.array([2, 2, 0], np.int32),
    )
    assert metadata.spans == (
        SequenceSpan(0, 1, 10, 4, 2),
        SequenceSpan(1, 2, 4),
        SequenceSpan(2, 3, 6),
    )


def test_windows_that_are_none_are_refused() -> None:
    good = AttentionMetadata.for_step(np.zeros((2, 4), np.int32), [9, 3], [1, 1], 4)
    ones = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="both or neither"):
        dataclasses.replace(good, windows=ones)
    with pytest.raises(ValueError, match=r"windows is torch\.int32 \(1,\): expected"):
        dataclasses.replace(good, windows=ones[:1].clone(), num_sinks=ones)
    with pytest.raises(ValueError, match=r"num_sinks is torch\.int64"):
        dataclasses.replace(good, windows=ones, num_sinks=ones.long())
    for windows, sinks in ((0 * ones, ones), (ones, -ones)):
        with pytest.raises(ValueError, match="expected at least 1 and at least 0"):
            _ = dataclasses.replace(good, windows=windows, num_sinks=sinks).spans
