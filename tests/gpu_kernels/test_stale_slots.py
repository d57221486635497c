"""Known fault B62: what a block held before it was given out never reaches an output."""

import typing

import pytest
import torch
from stale_slots import check, check_limit

from rayserve_kernels.attention import AttentionBackend, ReferenceBackend, TorchBackend
from rayserve_kernels.layout import Order
from rayserve_kernels.native_cpu import NativeBackend

ORDERS: tuple[Order, ...] = typing.get_args(Order)


@pytest.mark.parametrize("backend", [TorchBackend(), ReferenceBackend()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ORDERS)
def test_b62_stale_slots_never_reach_the_output(
    order: Order, dtype: torch.dtype, backend: AttentionBackend
) -> None:
    check(order, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_b62_stale_slots_never_reach_the_output_of_the_native_kernel(
    order: Order, dtype: torch.dtype, native: NativeBackend
) -> None:
    check(order, dtype, native)


@pytest.mark.parametrize("limit", [1, 15, 17, 100])
def test_b64_a_sequence_at_the_model_limit_leaves_the_next_table_row_alone_on_a_cpu(
    limit: int, native: NativeBackend
) -> None:
    check_limit(limit, native)
    check_limit(limit, TorchBackend())
