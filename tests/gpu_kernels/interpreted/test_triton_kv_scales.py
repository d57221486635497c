"""Known fault B66: the scales of quantised KV follow what is written, in the Triton kernels too."""

import pytest
import torch
from attend_case import SMALL_TABLE
from kv_scales import PATHS, check_agreement, check_scales
from paged_case import DEVICE

from rayserve_kernels.gpu.backend import TritonBackend
from rayserve_kernels.layout import SCALED_DTYPES


@pytest.mark.parametrize(("path", "coding"), [(p, c) for p in PATHS for c in SCALED_DTYPES])
def test_b66_after_a_warm_up_with_zeros_every_path_of_the_triton_kernels_agrees_with_16_bit_kv(
    path: str, coding: torch.dtype
) -> None:
    check_agreement(path, coding, TritonBackend("any", SMALL_TABLE), DEVICE)


def test_b66_the_scale_of_a_key_of_8_covers_it_after_a_warm_up_with_zeros_in_triton() -> None:
    check_scales(TritonBackend("any", SMALL_TABLE), DEVICE)
