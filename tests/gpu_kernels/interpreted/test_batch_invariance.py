"""A sequence's bits depend on itself alone; and what the host knows of a step changes none."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from attend_case import SMALL_TABLE, attend
from paged_case import DEVICE, PagedCase, build

from rayserve_kernels.attention import ReferenceBackend
from rayserve_kernels.gpu.backend import TritonBackend
from rayserve_kernels.layout import KVLayout, Order
from rayserve_kernels.metadata import AttentionMetadata

NUM_COMPUTED = (130, 0, 33, 70, 20)
# One has as many queries as are decoded at most, the next one more.
NUM_NEW = (1, 40, 3, 8, 9)


def rows_of(case: PagedCase, rows: list[int], width: int) -> PagedCase:
    """The step of some of the sequences, with a wider block table."""
    metadata = case.metadata
    tables = torch.full((len(rows), width), -5, dtype=torch.int32)
    tables[:, : metadata.block_tables.shape[1]] = metadata.block_tables.cpu()[rows]
    step = AttentionMetadata.for_step(
        np.zeros(tables.shape, np.int32),
        [NUM_COMPUTED[row] for row in rows],
        [NUM_NEW[row] for row in rows],
        case.layout.block_size,
        DEVICE,
        None if metadata.windows is None else metadata.windows.cpu().numpy()[rows],
        None if metadata.num_sinks is None else metadata.num_sinks.cpu().numpy()[rows],
    )
    return dataclasses.replace(
        case,
        metadata=dataclasses.replace(step, block_tables=tables.to(DEVICE)),
        queries=[case.queries[row] for row in rows],
    )


@pytest.mark.parametrize("windows", [None, (50, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(
    dtype: torch.dtype, windows: tuple[int, ...] | None
) -> None:
    case = build(dtype=dtype, num_computed=NUM_COMPUTED, num_new=NUM_NEW, windows=windows)
    together = attend(case).split(NUM_NEW)
    for rows in ([0], [3], [4, 1, 2]):
        part = rows_of(case, rows, width=40)
        for row, got in zip(rows, attend(part).split([NUM_NEW[r] for r in rows]), strict=True):
            assert torch.equal(got, together[row])


def test_what_the_host_knows_of_a_step_changes_no_bits() -> None:
    case = build(dtype=torch.float32, num_computed=NUM_COMPUTED, num_new=NUM_NEW)
    want = attend(case)
    for known in ({"query_lens": None}, {"max_seq_len": None}, {"max_seq_len": 1000}):
        other = dataclasses.replace(case, metadata=dataclasses.replace(case.metadata, **known))
        assert torch.equal(attend(other), want)


def test_a_step_padded_for_a_graph_gives_the_bits_of_the_step() -> None:
    computed, new = (130, 33), (1, 1)
    case = build(dtype=torch.float32, num_computed=computed, num_new=new)
    want = attend(case)
    metadata = case.metadata
    # Two rows more, of sequences that have neither queries nor tokens.
    padded = AttentionMetadata(
        query_start=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.nn.functional.pad(metadata.seq_lens, (0, 2)),
        block_tables=torch.nn.functional.pad(metadata.block_tables, (0, 0, 0, 2), value=-1),
        slot_mapping=torch.nn.functional.pad(metadata.slot_mapping, (0, 2)),
        query_lens=np.ones(4, np.int64),
    )
    queries = [*case.queries, torch.zeros(2, *case.queries[0].shape[1:])]
    got = attend(dataclasses.replace(case, metadata=padded, queries=queries))
    assert torch.equal(got[:2], want)


def test_a_prompt_in_chunks_agrees_with_the_whole() -> None:
    case = build(dtype=torch.float32, num_computed=(0,), num_new=(100,))
    want = attend(case)
    for size in (33, 16):
        for start in range(0, 100, size):
            end = min(start + size, 100)
            step = AttentionMetadata.for_step(
                case.metadata.block_tables.cpu().numpy(), [start], [end - start], 16, DEVICE
            )
            queries = [case.queries[0][start:end]]
            got = attend(dataclasses.replace(case, metadata=step, queries=queries))
            assert (got - want[start:end]).abs().max() < case.tolerance()


@pytest.mark.parametrize("order", ["nhd", "hnd", "vectorised"])
def test_every_layout_gives_the_same_bits(order: Order) -> None:
    batch: dict[str, Any] = {"dtype": torch.float16, "num_computed": (70, 20), "num_new": (1, 12)}
    want = attend(build(**batch))
    assert torch.equal(attend(build(**batch, order=order)), want)


@pytest.mark.parametrize(
    ("slots", "order"),
    [
        (torch.int8, "block_major"),
        (torch.int8, "nhd"),
        (torch.int8, "hnd"),
        (torch.int8, "vectorised"),
        (torch.bfloat16, "block_major"),
    ],
)
def test_offsets_may_exceed_what_32_bits_hold(slots: torch.dtype, order: Order) -> None:
    batch: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "pool_dtype": slots,
        "order": order,
        "heads": (2, 1),
        "num_layers": 1,
        "num_computed": (40, 0),
        "num_new": (1, 20),
    }
    # Cut to 32 bits, an offset would name one of the zeros at the beginning.
    block_stride = build(**batch).view.keys.stride(0)
    case = build(**batch, skipped_blocks=2**32 // block_stride)
    for view in (case.view.keys, case.view.values):
        last = (view.shape[0] - 1) * view.stride(0)
        assert 2**32 < last < 2**32 + 2**31
    assert case.agrees(attend(case))


def test_a_backend_is_named_after_its_gpu_and_its_table() -> None:
    backend = TritonBackend("sm90", SMALL_TABLE)
    assert backend.numerics == f"triton-sm90-{SMALL_TABLE.digest}"
    assert TritonBackend("sm90").numerics != backend.numerics
    assert TritonBackend.for_device(torch.device("cpu")).numerics.startswith("triton-interpreter-")


def test_a_backend_refuses_dtypes_that_no_kernel_takes() -> None:
    step = AttentionMetadata.for_step(np.zeros((1, 2), np.int32), [3], [1], 16, DEVICE)
    for queries, slots, gpu, message in (
        (torch.float64, torch.float32, "any", r"queries of torch\.float64"),
        (torch.float16, torch.int32, "any", "expected floats"),
        (torch.float16, torch.float8_e4m3fn, "sm80", "compute capability 8.9"),
    ):
        scaled = slots == torch.float8_e4m3fn
        pool = KVLayout(1, 1, 16, 64, slots, scaled=scaled).allocate(2, DEVICE)
        row = torch.zeros(1, 2, 64, dtype=queries, device=DEVICE)
        with pytest.raises(ValueError, match=message):
            TritonBackend(gpu, SMALL_TABLE).attend(pool, 0, row, step, 0.1)


@pytest.mark.parametrize("slots", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_backend_attends_to_what_it_writes(slots: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    layout = KVLayout(2, 1, 8, 64, slots, scaled=slots != torch.bfloat16)
    pool = layout.allocate(6, DEVICE)
    step = AttentionMetadata.for_step(np.array([[4, 2, 5]], np.int32), [0], [20], 8, DEVICE)
    queries, keys, values = torch.randn(3, 20, 2, 64, generator=generator).bfloat16().to(DEVICE)
    backend = TritonBackend("any", SMALL_TABLE)
    backend.write(pool, 1, keys[:, :1], values[:, :1], step)
    got = backend.attend(pool, 1, queries, step, 0.125, soft_cap=3.0)
    want = ReferenceBackend(torch.float64).attend(pool, 1, queries, step, 0.125, soft_cap=3.0)
    assert (got - want).abs().max() < 2 * 2**-8 * values.abs().max()


def test_a_step_without_tokens_has_no_output() -> None:
    pool = KVLayout(1, 1, 16, 64, torch.float32).allocate(2, DEVICE)
    step = AttentionMetadata.for_step(np.zeros((0, 2), np.int32), [], [], 16, DEVICE)
    queries = torch.zeros(0, 2, 64, device=DEVICE)
    output = TritonBackend("any", SMALL_TABLE).attend(pool, 0, queries, step, 0.1)
    assert output.shape == (0, 2, 64)
