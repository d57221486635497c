"""What a step of attention must move and multiply: the counts that every ratio is taken of."""

import dataclasses
import typing

import torch

from rayserve_kernels.gpu.configs import DECODE_QUERIES
from rayserve_kernels.layout import SCALED_DTYPES, Order

Dtype = typing.Literal["fp32", "bf16", "fp16", "int8", "fp8"]
"""Of the pool; queries are of the same, and bf16 beside codes."""

_SLOTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_SCALE_BYTES = 4
_TABLE_ENTRY_BYTES = 4
_PARTIAL_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One step over one layer, all sequences alike.

    Args:
        batch_size: Sequences.
        num_tokens: Of each sequence in the cache, the new ones included.
        dtype: Of the pool.
        num_queries: New tokens of each sequence.
        shared_tokens: First tokens that all sequences share.
        order: Of the pool.
        num_q_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Of a head.
        block_size: Slots of a block.
    """

    batch_size: int
    num_tokens: int
    dtype: Dtype = "bf16"
    num_queries: int = 1
    shared_tokens: int = 0
    order: Order = "block_major"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def slots(self) -> torch.dtype:
        """Of the pool."""
        return _SLOTS[self.dtype]

    @property
    def queries(self) -> torch.dtype:
        """Of queries and outputs."""
        return torch.bfloat16 if self.is_scaled else self.slots

    @property
    def is_scaled(self) -> bool:
        """Whether the pool holds codes."""
        return self.slots in SCALED_DTYPES


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one step over one layer, each tensor as if read or written once.

    Args:
        keys_values: Keys and values that some query sees.
        scales: Of these, where the pool holds codes.
        tables: Entries of the block tables.
        queries: Read.
        outputs: Written.
        partials: Partial outputs of a split decode, written and read again.
    """

    keys_values: int
    scales: int
    tables: int
    queries: int
    outputs: int
    partials: int

    @property
    def needed(self) -> int:
        """What no kernel can do without: all but the partial outputs."""
        return self.keys_values + self.scales + self.tables + self.queries + self.outputs

    @property
    def total(self) -> int:
        """With the partial outputs, which are this kernel's own expense."""
        return self.needed + self.partials


def traffic_of(case: Case, split_tokens: int | None = None) -> Traffic:
    """Count the bytes of a step.

    Args:
        case: The step. A shared prefix counts once, and each sequence has its own table.
        split_tokens: Positions of a split of a decode; None where nothing is split.
    """
    tokens = case.batch_size * case.num_tokens - (case.batch_size - 1) * case.shared_tokens
    vectors = 2 * tokens * case.num_kv_heads
    rows = case.batch_size * case.num_queries * case.num_q_heads
    num_splits = 1
    if split_tokens is not None and case.num_queries <= DECODE_QUERIES:
        num_splits = -(-case.num_tokens // split_tokens)
    num_partials = rows * num_splits if num_splits > 1 else 0
    query_bytes = rows * case.head_dim * case.queries.itemsize
    blocks_per_sequence = -(-case.num_tokens // case.block_size)
    return Traffic(
        keys_values=vectors * case.head_dim * case.slots.itemsize,
        scales=vectors * _SCALE_BYTES if case.is_scaled else 0,
        tables=case.batch_size * blocks_per_sequence * _TABLE_ENTRY_BYTES,
        queries=query_bytes,
        outputs=query_bytes,
        # An output and the logarithm of its sum.
        partials=2 * num_partials * (case.head_dim + 1) * _PARTIAL_BYTES,
    )


def flops_of(case: Case) -> int:
    """Count the operations of a step's two products, a multiplication and an addition being two.

    Only pairs of a query and a position that it sees count.
    """
    start = case.num_tokens - case.num_queries
    pairs = case.num_queries * start + case.num_queries * (case.num_queries + 1) // 2
    return 4 * case.batch_size * pairs * case.num_q_heads * case.head_dim
