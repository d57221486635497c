"""The benchmark's figures are ratios of medians over cases that it names."""

import pytest
import torch

from rayserve_kernels.attention import TorchBackend
from rayserve_kernels.bench_cpu import Case, Figures, all_cases, measure


def test_the_cases_are_every_dtype_shape_and_batch() -> None:
    cases = list(all_cases())
    assert len(set(cases)) == len(cases) == 12
    assert {(case.num_q_heads, case.num_kv_heads, case.head_dim) for case in cases} == {
        (9, 3, 64),
        (32, 8, 128),
    }
    assert {(case.dtype, case.batch_size, case.num_tokens) for case in cases} == {
        (dtype, batch_size, 1024) for dtype in ("fp32", "bf16", "int8") for batch_size in (8, 32)
    }


def test_a_ratio_above_one_means_that_the_native_kernel_is_faster() -> None:
    case = Case("bf16", 32, 8, 128, 32)
    assert case.kv_bytes == 2 * 32 * 1024 * 8 * 128 * 2
    assert Case("int8", 32, 8, 128, 32).kv_bytes == 2 * 32 * 1024 * 8 * (128 + 4)
    figures = Figures(case, [90.0, 100.0, 900.0], [150.0] * 3, [400.0] * 3, [70.0] * 3).as_dict()
    assert figures["native_us"] == 100.0
    assert figures["over_contiguous_sdpa"] == 1.5
    assert figures["over_gather_sdpa"] == 4.0
    assert figures["share_of_read_rate"] == 0.7
    assert figures["native_gb_per_s"] == 1342.18


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_case_is_measured_over_scattered_blocks(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayserve_kernels.bench_cpu._MIN_BYTES", 1)
    layers: list[int] = []

    class Watched(TorchBackend):
        def attend(self, pool, layer, queries, metadata, scale, **edits) -> torch.Tensor:  # noqa: ANN001, ANN003
            layers.append(layer)
            # Sequences in other blocks than those that a table in order would name.
            assert metadata.block_tables.flatten().tolist() != list(range(pool.num_blocks))
            return super().attend(pool, layer, queries, metadata, scale, **edits)

    figures = measure(Case(dtype, 6, 2, 16, 2, 40), Watched(), "block_major", 3)
    assert layers == [0, 1, 0, 1]
    for samples in figures.samples().values():
        assert len(samples) == 3
        assert min(samples) > 0
