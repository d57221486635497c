"""Codes vectors as small integers or fp8, each with a scale of its own, and back."""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest code of each dtype."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantise(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Code vectors so that `codes * scales` is close to them.

    The scale is the largest magnitude over 127 (int8) or 448 (fp8), and no less than the smallest
    normal fp32, so that zeros stay zeros and nothing is divided by 0. A code is the quotient, both
    rounded to nearest, ties to even. A vector's bytes depend on nothing beside it.

    A vector with an element that is not finite has NaN for its scale and zeros for its codes: all
    its elements come back as NaN, and whatever attends to it shows it.

    Args:
        vectors: [..., n], any floating dtype and strides.
        dtype: Of the codes, one of `layout.SCALED_DTYPES`.

    Returns:
        Codes [..., n], and scales, fp32 [...].
    """
    exact = vectors.float()
    largest = exact.abs().amax(-1)
    # By a tensor: a GPU multiplies by the inverse of a number, which has other bits.
    scales = (largest / largest.new_full((), LARGEST[dtype])).clamp_min(SMALLEST_SCALE)
    is_finite = largest.isfinite()
    # Not whatever NaN the division made, whose bits differ between devices.
    scales = scales.masked_fill(~is_finite, torch.nan)
    quotients = (exact / scales.unsqueeze(-1)).masked_fill(~is_finite.unsqueeze(-1), 0.0)
    if dtype == torch.int8:
        quotients = quotients.round()
    # Rounding may have left the largest quotient just above the largest code.
    return quotients.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return fp32 [..., n], the vectors that codes [..., n] and scales [...] stand for."""
    return codes.float() * scales.unsqueeze(-1)
