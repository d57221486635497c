"""The benchmark for GPUs, run on small cases in the interpreter with a clock that tells turns."""

import typing
from collections.abc import Callable

import pytest
import torch
from paged_case import DEVICE

from rayserve_kernels.gpu.configs import Key, Kind, LaunchConfig, LaunchTable, gpu_family
from rayserve_kernels.gpu_bench.measure import (
    Bench,
    attention_result,
    measure_attention,
    measure_cascade,
    measure_copies,
)
from rayserve_kernels.gpu_bench.rivals import RIVALS
from rayserve_kernels.gpu_bench.run import has_failed, line, measurements
from rayserve_kernels.gpu_bench.step import Step
from rayserve_kernels.gpu_bench.timing import Samples, one_line, take_turns
from rayserve_kernels.gpu_bench.traffic import Case, Dtype
from rayserve_kernels.layout import Order

SMALL = Case(2, 40, num_q_heads=4, num_kv_heads=2, head_dim=64)


class Turns:
    """Runs a call and takes it to last as many microseconds as there were calls so far."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        self.count += 1
        return float(self.count)


def bench(table: LaunchTable | None = None) -> Bench:
    source = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    table = table or LaunchTable.read()
    gpu = gpu_family(DEVICE)
    return Bench(DEVICE, gpu, table, 1, Turns(), source, torch.empty_like(source))


@pytest.mark.parametrize(
    ("dtype", "order", "num_queries"),
    [("bf16", "nhd", 1), ("int8", "vectorised", 1), ("fp16", "hnd", 40), ("fp8", "nhd", 3)],
)
def test_a_case_is_measured_beside_a_copy_and_tables_in_order(
    dtype: Dtype, order: Order, num_queries: int
) -> None:
    case = Case(2, 40, dtype, num_queries, 0, order, 4, 2, 64)
    result = measure_attention(bench(), case, rivals=("sdpa",) if dtype == "fp16" else ())
    names = ["copy", "paged", "in_order", *(["sdpa"] if dtype == "fp16" else [])]
    assert list(result["samples_us"]) == names
    # Each in its turn.
    assert [us for (us,) in result["samples_us"].values()] == [1.0, 2.0, 3.0, 4.0][: len(names)]
    assert result["errors"] == {}
    assert not has_failed(result)
    assert ("tflop_per_s" in result) == (num_queries > 8)


def test_rivals_that_are_missing_or_compute_something_else_say_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(step: Step) -> Callable[[int], torch.Tensor]:
        return lambda layer: -step.queries

    monkeypatch.setitem(RIVALS, "wrong", wrong)  # pyright: ignore[reportArgumentType]
    case = Case(2, 40, order="nhd", num_q_heads=4, num_kv_heads=2, head_dim=64)
    names = ("sdpa", "grouped_sdpa", "flashinfer", "vllm_flash", "vllm_triton", "wrong")
    result = measure_attention(bench(), case, names)
    assert list(result["samples_us"]) == ["copy", "paged", "in_order", "sdpa", "grouped_sdpa"]
    assert result["errors"].pop("wrong").startswith("ValueError: computes something else")
    assert result["errors"] == {
        "flashinfer": "not installed: flashinfer",
        "vllm_flash": "not installed: vllm",
        "vllm_triton": "not installed: vllm",
    }
    assert not has_failed(result)
    assert line({"part": "decode", **result}).count("\n") == 3


def test_a_cascade_is_measured_with_its_prefix_read_once_and_for_each() -> None:
    case = Case(17, 528, shared_tokens=512, num_q_heads=2, num_kv_heads=1, head_dim=64)
    # The interpreter takes as long for a large tile as for a small one.
    block_n = 512 if DEVICE.type == "cpu" else 64
    kinds: tuple[Kind, ...] = typing.get_args(Kind)
    rows = {
        Key("any", 64, "half", kind): LaunchConfig(
            16, block_n, 512 if "decode" in kind else None, 4, 1
        )
        for kind in kinds
    }
    result = measure_cascade(bench(LaunchTable(rows)), case)
    assert list(result["samples_us"]) == ["copy", "paged", "unshared"]
    assert result["errors"] == {}
    assert result["needed_bytes"] < 2 * 17 * 528 * 64 * 2 / 8


def test_block_copies_are_measured_beside_a_copy() -> None:
    result = measure_copies(bench(), "hnd", num_blocks=3, num_layers=2)
    assert result["needed_bytes"] == 2 * 3 * (2 * 2 * 8 * 16 * 128 * 2)
    assert {"copy", "copy_blocks"} <= set(result["samples_us"])
    assert not has_failed(result)


def test_the_pool_holds_what_is_contiguous_and_in_order_names_the_same_blocks() -> None:
    case = Case(3, 40, shared_tokens=16, num_q_heads=4, num_kv_heads=2, head_dim=64)
    step = Step.build(case, DEVICE, num_layers=2)
    assert step.pool.num_blocks == 1 + 3 * 2
    assert step.in_order.block_tables.tolist() == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    assert (step.tables[:, 0] == step.tables[0, 0]).all()
    assert sorted({*step.tables.flatten().tolist()}) == list(range(7))
    for row in range(3):
        blocks = step.pool.keys[1, step.tables[row].tolist()]
        keys = blocks.transpose(0, 1).flatten(1, 2)[:, :40]
        assert torch.equal(keys, step.contiguous[1, 0, row])
    with pytest.raises(ValueError, match="shared_tokens=8: expected a multiple of 16"):
        Step.build(Case(2, 40, shared_tokens=8), DEVICE, num_layers=1)


def test_contestants_take_turns_over_layers_after_warming_up() -> None:
    calls: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[int], object]:
        return lambda layer: calls.append((name, layer))

    def fail(_layer: int) -> object:
        raise RuntimeError("no\n  such   kernel")

    samples = take_turns({"a": note("a"), "b": note("b"), "c": fail}, 2, 3, Turns())
    assert calls[:6] == [("a", 0), ("a", 1), ("a", 0), ("b", 0), ("b", 1), ("b", 0)]
    assert calls[6:] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0), ("b", 0)]
    assert samples.us == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}
    assert samples.errors == {"c": "RuntimeError: no such kernel"}
    assert (samples.median_us("a"), samples.median_us("c")) == (3.0, None)
    assert len(one_line(ValueError("x" * 999))) < 250


def test_shares_are_of_needed_bytes_and_the_copys_rate() -> None:
    # 1,074,855,936 bytes in 300 us are 3,582.9 GB/s; the copy moves 2^30 bytes in 250 us.
    samples = Samples(
        {"copy": [250.0, 250.0, 900.0], "paged": [300.0], "in_order": [297.0], "sdpa": [450.0]}, {}
    )
    result = attention_result(Case(64, 4096), samples, 512, 2**30)
    assert result["copy_gb_per_s"] == 4295.0
    assert result["gb_per_s"] == 3582.9
    assert result["share_of_copy"] == 0.834
    assert result["meets_target"] is False
    assert result["over_paged"] == {"in_order": 0.99, "sdpa": 1.5}
    faster = Samples({"copy": [250.0], "paged": [270.0]}, {})
    assert attention_result(Case(64, 4096), faster, 512, 2**30)["meets_target"] is True
    assert "meets_target" not in attention_result(SMALL, samples, 512, 2**30)
    failed = attention_result(SMALL, Samples({"copy": [250.0]}, {"paged": "x"}), 512, 2**30)
    assert "share_of_copy" not in failed
    assert has_failed(failed)


def test_prefill_counts_operations() -> None:
    samples = Samples({"copy": [250.0], "paged": [1000.0]}, {})
    case = Case(1, 4096, num_queries=4096)
    # 4 * 4096 * 4097 / 2 * 32 * 128 operations in a millisecond.
    assert attention_result(case, samples, None, 2**30)["tflop_per_s"] == 137.5


def test_gpus_without_fp8_are_spared_it() -> None:
    old, new = bench(), bench()
    object.__setattr__(old, "gpu", "sm80")
    object.__setattr__(new, "gpu", "sm90")
    counts = []
    for one in (old, new):
        parts = list(measurements(one, is_full=False))
        assert {part for part, _, _ in parts} == {"decode", "cascade", "prefill", "copies"}
        counts.append(sum("fp8" in str(identity) for _, identity, _ in parts))
    assert counts == [0, 4 + 1 + 1]
