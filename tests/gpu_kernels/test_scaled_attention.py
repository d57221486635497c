"""Attention over pools of codes, and over floats of another dtype than the queries'."""

import typing
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import AttentionBackend, ReferenceBackend, TorchBackend
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout, Order
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.native_cpu import NativeBackend
from rayserve_kernels.quantisation import dequantise, quantise
from rayserve_kernels.reference import dense_attention

ORDERS: tuple[Order, ...] = typing.get_args(Order)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_COMPUTED, NUM_NEW = [0, 0, 7, 8, 9, 5, 70], [1, 9, 1, 1, 1, 67, 3]
SIZES: tuple[tuple[Order, int, int, torch.dtype], ...] = (
    ("block_major", 1, 16, torch.int8),
    ("block_major", 16, 80, torch.float8_e4m3fn),
    ("nhd", 8, 96, torch.int8),
    ("nhd", 4, 8, torch.float8_e4m3fn),
    ("hnd", 4, 5, torch.int8),
    ("hnd", 32, 64, torch.float8_e4m3fn),
    ("vectorised", 16, 64, torch.int8),
    ("vectorised", 8, 128, torch.float8_e4m3fn),
)
LAYOUTS = [KVLayout(2, 2, slots, dim, coding, o, scaled=True) for o, slots, dim, coding in SIZES]


def max_abs_diff(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=KVLayout.describe)
def test_attention_over_codes_agrees_with_the_float64_oracle(
    paged_batch: Callable, layout: KVLayout, dtype: torch.dtype
) -> None:
    batch = paged_batch(layout, 6, NUM_COMPUTED, NUM_NEW, dtype=dtype)
    output = batch.step(TorchBackend())
    assert {rows.dtype for rows in output} == {dtype}
    assert max_abs_diff(output, batch.oracle()) < TOLERANCE[dtype]
    assert max_abs_diff(batch.step(ReferenceBackend(torch.float64)), batch.oracle()) < 1e-12


@pytest.mark.parametrize(("dtype", "stored"), [(a, b) for a in FLOATS for b in FLOATS if a != b])
def test_queries_of_one_dtype_attend_over_floats_of_another(
    paged_batch: Callable, dtype: torch.dtype, stored: torch.dtype
) -> None:
    batch = paged_batch(KVLayout(2, 2, 4, 16, stored), 6, NUM_COMPUTED, NUM_NEW, dtype=dtype)
    output = batch.step(TorchBackend())
    assert {rows.dtype for rows in output} == {dtype}
    assert max_abs_diff(output, batch.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_every_order_gives_the_same_bits(paged_batch: Callable, coding: torch.dtype) -> None:
    outputs = []
    for order in ORDERS:
        layout = KVLayout(2, 2, 4, 16, coding, order, scaled=True)
        batch = paged_batch(layout, 6, NUM_COMPUTED, NUM_NEW, dtype=torch.float32)
        outputs.append(torch.cat(batch.step(TorchBackend())))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_a_sequence_gives_the_bits_that_it_gives_alone(
    paged_batch: Callable, coding: torch.dtype
) -> None:
    layout = KVLayout(2, 2, 4, 16, coding, scaled=True)
    batch = paged_batch(layout, 6, [5, 9, 0], [1, 3, 70], dtype=torch.float32)
    rows = batch.step(TorchBackend())
    poisoned = paged_batch(layout, 6, [5, 9, 0], [1, 3, 70], dtype=torch.float32)
    poisoned.keys[1][0, 10, 3] = float("nan")
    poisoned.values[2][1, 69, 0] = float("inf")
    others = poisoned.step(TorchBackend())
    assert torch.equal(others[0], rows[0])
    # What is not finite shows in the heads that read it, and in no other.
    assert others[1][1:, :3].isnan().all()
    assert torch.equal(others[1][:, 3:], rows[1][:, 3:])
    assert others[2][69, 3:].isnan().all()
    assert torch.equal(others[2][:, :3], rows[2][:, :3])


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_codes_and_scales_of_slots_that_nobody_wrote_never_matter(
    paged_batch: Callable, coding: torch.dtype, poison: float
) -> None:
    layout = KVLayout(1, 2, 8, 16, coding, scaled=True)
    build = (layout, 4, NUM_COMPUTED, NUM_NEW)
    clean = paged_batch(*build, poison=0.0, dtype=torch.float32)
    dirty = paged_batch(*build, poison=poison, dtype=torch.float32)
    for backend in (TorchBackend(), ReferenceBackend()):
        assert torch.equal(torch.cat(clean.step(backend)), torch.cat(dirty.step(backend)))


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
def test_windows_hide_codes_as_they_hide_floats(
    paged_batch: Callable, backend: AttentionBackend, coding: torch.dtype
) -> None:
    layout = KVLayout(1, 2, 4, 16, coding, scaled=True)
    rows = []
    for hidden in (0.0, float("nan")):
        batch = paged_batch(layout, 4, [89], [1], dtype=torch.float32)
        # The query sees positions 0 to 2 and 70 to 89.
        block_size = layout.block_size
        for position in range(3, 70):
            place = int(batch.tables[0, position // block_size]), slice(None), position % block_size
            for view in (batch.pool.key_scale_view(0), batch.pool.value_scale_view(0)):
                assert view is not None
                view[place] = hidden
        batch.metadata = AttentionMetadata.for_step(
            batch.tables,
            [89],
            [1],
            block_size,
            windows=np.array([20], np.int32),
            num_sinks=np.array([3], np.int32),
        )
        rows.append(batch.step(backend)[0])
    assert torch.equal(rows[0], rows[1])
    seen = [*range(3), *range(70, 90)]
    keys, values = (
        dequantise(*quantise(part[0][:, seen], coding)) for part in (batch.keys, batch.values)
    )
    wanted = dense_attention(batch.queries[0], keys, values, batch.scale)
    assert max_abs_diff(rows[:1], [wanted]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_scores_over_codes_are_capped_and_biased_as_over_floats(
    paged_batch: Callable, coding: torch.dtype
) -> None:
    layout = KVLayout(1, 2, 4, 16, coding, scaled=True)
    batch = paged_batch(layout, 4, NUM_COMPUTED, NUM_NEW, dtype=torch.bfloat16)
    batch.soft_cap, batch.alibi_slopes = 2.0, 0.5 ** torch.arange(1, 5)
    output, wanted = batch.step(TorchBackend()), batch.step(ReferenceBackend(torch.float64))
    assert {rows.dtype for rows in output} == {torch.bfloat16}
    assert max_abs_diff(output, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, FLOATS[place % 3]) for place, layout in enumerate(LAYOUTS)],
    ids=str,
)
def test_native_attention_over_codes_agrees_with_the_float64_oracle(
    paged_batch: Callable, native: NativeBackend, layout: KVLayout, dtype: torch.dtype
) -> None:
    batch = paged_batch(layout, 6, NUM_COMPUTED, NUM_NEW, dtype=dtype)
    output = batch.step(native)
    assert {rows.dtype for rows in output} == {dtype}
    assert max_abs_diff(output, batch.oracle()) < TOLERANCE[dtype]
    batch.soft_cap, batch.alibi_slopes = 2.0, 0.5 ** torch.arange(1, 7)
    wanted = batch.step(ReferenceBackend(torch.float64))
    assert max_abs_diff(batch.step(native), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "stored"), [(a, b) for a in FLOATS for b in FLOATS if a != b])
def test_native_queries_of_one_dtype_attend_over_floats_of_another(
    paged_batch: Callable, native: NativeBackend, dtype: torch.dtype, stored: torch.dtype
) -> None:
    batch = paged_batch(KVLayout(2, 2, 4, 16, stored), 6, NUM_COMPUTED, NUM_NEW, dtype=dtype)
    output = batch.step(native)
    assert {rows.dtype for rows in output} == {dtype}
    assert max_abs_diff(output, batch.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_a_prompt_in_chunks_gives_the_native_bits_of_one_step_over_codes(
    paged_batch: Callable, native: NativeBackend, coding: torch.dtype
) -> None:
    layout = KVLayout(1, 2, 8, 64, coding, scaled=True)
    batch = paged_batch(layout, 6, [0], [600], dtype=torch.float32)
    whole = batch.step(native)[0]
    for size in (1, 65):
        for start in range(0, 600, size):
            end = min(start + size, 600)
            metadata = AttentionMetadata.for_step(batch.tables, [start], [end - start], 8)
            queries = batch.queries[0][start:end]
            chunk = native.attend(batch.pool, 0, queries, metadata, batch.scale)
            assert torch.equal(chunk, whole[start:end])


def one_slot(
    layout: KVLayout, values: torch.Tensor, native: NativeBackend, dtype: torch.dtype
) -> torch.Tensor:
    """What attention to a single position answers, which is its value in the queries' dtype."""
    pool = layout.allocate(1)
    pool.value_view(0)[0, :, 0] = values
    if pool.key_scales is not None and pool.value_scales is not None:
        pool.key_scales.fill_(1.0)
        pool.value_scales.fill_(1.0)
    metadata = AttentionMetadata.for_step(np.zeros((1, 1), np.int32), [0], [1], 1)
    queries = torch.zeros(1, layout.num_kv_heads, layout.head_dim, dtype=dtype)
    return native.attend(pool, 0, queries, metadata, 1.0)[0]


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        (torch.float8_e4m3fn, torch.uint8),
        (torch.int8, torch.uint8),
        (torch.float16, torch.uint16),
        (torch.bfloat16, torch.uint16),
    ],
)
def test_the_native_kernel_reads_every_number_of_a_format(
    native: NativeBackend, stored: torch.dtype, bits: torch.dtype
) -> None:
    count = 1 << (8 * bits.itemsize)
    numbers = torch.arange(count).to(bits).view(stored).view(-1, 64)
    is_scaled = stored in SCALED_DTYPES
    layout = KVLayout(1, len(numbers), 1, 64, stored, scaled=is_scaled)
    output = one_slot(layout, numbers, native, torch.float32)
    assert torch.equal(output.nan_to_num(1e9), numbers.float().nan_to_num(1e9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_native_kernel_rounds_its_answers_as_torch_does(
    native: NativeBackend, dtype: torch.dtype
) -> None:
    # Every exponent, with mantissas at, just below and just above what is half way.
    tails = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000])
    exponents = torch.arange(512)[:, None] << 23
    numbers = (exponents | torch.cat((tails, 0x7FFFFF - tails))).flatten()
    numbers = numbers.to(torch.uint32).view(torch.float32).view(-1, 64)
    layout = KVLayout(1, len(numbers), 1, 64, torch.float32)
    output = one_slot(layout, numbers, native, dtype)
    assert torch.equal(output.nan_to_num(7.0), numbers.to(dtype).nan_to_num(7.0))
