"""Known faults B62 and B64: the Triton kernels read what is a sequence's own, and nothing else."""

import typing

import pytest
import torch
from attend_case import SMALL_TABLE
from paged_case import DEVICE
from stale_slots import check, check_limit

from rayserve_kernels.gpu.backend import TritonBackend
from rayserve_kernels.layout import Order

ORDERS: tuple[Order, ...] = typing.get_args(Order)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize(("order", "dtype"), list(zip(ORDERS, DTYPES, strict=True)))
def test_b62_stale_slots_never_reach_the_output_of_the_triton_kernels(
    order: Order, dtype: torch.dtype
) -> None:
    check(order, dtype, TritonBackend("any", SMALL_TABLE), DEVICE)


@pytest.mark.parametrize("limit", [1, 15, 17, 100])
def test_b64_a_sequence_at_the_model_limit_leaves_the_next_table_row_alone(limit: int) -> None:
    check_limit(limit, TritonBackend("any", SMALL_TABLE), DEVICE)
