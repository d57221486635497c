"""The cases that a run measures."""

import typing
from collections.abc import Iterator

from rayserve_kernels.gpu_bench.traffic import Case, Dtype
from rayserve_kernels.layout import Order

TARGET = Case(batch_size=64, num_tokens=4096)
"""The case by which the kernel is judged: 32 query and 8 KV heads of 128, bf16."""
TARGET_SHARE = 0.9
"""Of a device copy's bytes per second, to be reached in the target case."""

_BATCH_SIZES = (1, 8, 64, 256)
_NUM_TOKENS = (1024, 4096, 16384, 32768)
_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "int8", "fp8")
_ORDERS: tuple[Order, ...] = typing.get_args(Order)


def decode_cases(is_full: bool = False) -> Iterator[Case]:
    """Decodes, the target first.

    Args:
        is_full: Every batch and context in every dtype and order; otherwise the target in every
            dtype and order, and every batch and context in bf16, block-major and nhd, which others
            take too.
    """
    yield TARGET
    for batch_size in _BATCH_SIZES:
        for num_tokens in _NUM_TOKENS:
            for dtype in _DTYPES:
                for order in _ORDERS:
                    case = Case(batch_size, num_tokens, dtype, order=order)
                    is_size = (batch_size, num_tokens) == (TARGET.batch_size, TARGET.num_tokens)
                    is_kind = dtype == TARGET.dtype and order in (TARGET.order, "nhd")
                    if case != TARGET and (is_full or is_size or is_kind):
                        yield case


def cascade_cases() -> Iterator[Case]:
    """Decodes of sequences that share a prefix."""
    for dtype in _DTYPES:
        yield Case(64, 4096, dtype, shared_tokens=3072)
    yield Case(256, 4096, shared_tokens=2048)
    yield Case(16, 16384, shared_tokens=15360)


def prefill_cases() -> Iterator[Case]:
    """Whole prompts, and chunks over what is cached."""
    for dtype in _DTYPES:
        yield Case(4, 4096, dtype, num_queries=4096)
    yield Case(4, 4096, order="nhd", num_queries=4096)
    yield Case(1, 16384, num_queries=16384)
    yield Case(4, 8704, num_queries=512)
