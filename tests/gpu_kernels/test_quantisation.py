"""Codes with scales: what a vector becomes, and what comes back."""

import pytest
import torch

from rayserve_kernels.layout import SCALED_DTYPES
from rayserve_kernels.quantisation import dequantise, quantise

TINY = torch.finfo(torch.float32).tiny


def test_int8_codes_are_rounded_to_nearest_with_ties_to_even() -> None:
    vectors = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.49], [-63.5, 0.25, 0.75, 1.25, 0.0]])
    codes, scales = quantise(vectors, torch.int8)
    assert scales.tolist() == [1.0, 0.5]
    assert codes.tolist() == [[127, 0, 2, -2, 0], [-127, 0, 2, 2, 0]]


def test_fp8_codes_are_those_of_a_cast_after_the_scale() -> None:
    # Between 16 and 32 an e4m3 number has steps of 2: 17 and 19 are ties.
    vectors = torch.tensor([[448.0, -17.0, 19.0, 18.0, 2.0**-10, -(2.0**-9)]])
    codes, scales = quantise(vectors, torch.float8_e4m3fn)
    assert scales.tolist() == [1.0]
    assert codes.float().tolist() == [[448.0, -16.0, 20.0, 18.0, 0.0, -(2.0**-9)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_what_comes_back_is_within_half_a_step(coding: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-4, 4, 500)[:, None, None]
    vectors = (torch.randn(500, 3, 64, generator=generator) * sizes).to(dtype)
    codes, scales = quantise(vectors, coding)
    back = dequantise(codes, scales)
    half_step = scales[..., None] / 2
    if coding != torch.int8:
        # Three bits behind the leading one, and subnormal numbers in steps of 2**-9.
        half_step = torch.maximum(vectors.float().abs() / 16, half_step * 2**-9)
    assert ((back - vectors.float()).abs() <= half_step * 1.00001).all()
    assert ((back.abs().amax(-1) / vectors.float().abs().amax(-1) - 1).abs() < 1e-6).all()


@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_zeros_stay_zeros_and_the_smallest_numbers_stay_finite(coding: torch.dtype) -> None:
    vectors = torch.tensor([[0.0, -0.0, 0.0], [1e-45, -1e-45, 0.0], [1e-36, 1e-38, 0.0]])
    codes, scales = quantise(vectors, coding)
    assert (scales >= TINY).all()
    back = dequantise(codes, scales)
    assert back[:2].eq(0).all()
    assert back[2, 0].item() == pytest.approx(1e-36, rel=0.07)


@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_very_large_numbers_stay_finite(coding: torch.dtype) -> None:
    largest = torch.finfo(torch.float32).max * 0.999
    back = dequantise(*quantise(torch.tensor([[largest, -largest / 2]]), coding))
    assert back.isfinite().all()
    assert back[0].tolist() == pytest.approx([largest, -largest / 2], rel=0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_a_vector_that_is_not_finite_comes_back_as_nan_alone(
    coding: torch.dtype, bad: float
) -> None:
    vectors = torch.ones(3, 2, 4)
    vectors[1, 0, 2] = bad
    codes, scales = quantise(vectors, coding)
    assert codes[1, 0].view(torch.uint8).eq(0).all()
    assert scales[1, 0].view(torch.int32).item() == 0x7FC00000
    back = dequantise(codes, scales)
    assert back[1, 0].isnan().all()
    back[1, 0] = 1
    assert back.sub(1).abs().max() < 1e-6
