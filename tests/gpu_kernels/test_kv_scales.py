"""Known fault B66: the scales of quantised KV follow what is written, on every path."""

import pytest
import torch
from kv_scales import PATHS, check_agreement, check_scales

from rayserve_kernels.attention import TorchBackend
from rayserve_kernels.layout import SCALED_DTYPES
from rayserve_kernels.native_cpu import NativeBackend


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_b66_after_a_warm_up_with_zeros_every_path_agrees_with_16_bit_kv(
    path: str, coding: torch.dtype
) -> None:
    check_agreement(path, coding, TorchBackend())


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_b66_after_a_warm_up_with_zeros_every_path_of_the_native_kernel_agrees_with_16_bit_kv(
    native: NativeBackend, path: str, coding: torch.dtype
) -> None:
    check_agreement(path, coding, native)


def test_b66_the_scale_of_a_key_of_8_covers_it_after_a_warm_up_with_zeros() -> None:
    check_scales(TorchBackend())
