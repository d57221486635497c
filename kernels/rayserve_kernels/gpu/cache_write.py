"""Write the keys and values of new tokens into their slots, in Triton."""

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rayserve_kernels.cache_write import check_write
from rayserve_kernels.gpu.tile import jit
from rayserve_kernels.layout import KVPool
from rayserve_kernels.quantisation import LARGEST, SMALLEST_SCALE

_jit_for_any_size: Callable[[Any], Any] = triton.jit(do_not_specialize=["num_vectors", "num_slots"])

# 16 for each thread of NVIDIA's, 8 for each of AMD's.
_TILE_ELEMENTS = 2048
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_EXPONENT_BITS = tl.constexpr(0x7F800000)
_SIGN_BIT = tl.constexpr(-(2**31))
# Added to x and taken off again, a multiple of it rounds x to multiples of a power of two, ties to
# even, since fp32 has no bits for the rest.
_ANCHOR = tl.constexpr(1.5 * 2**23)
# Steps between e4m3 numbers: an eighth of their power of two, and 2**-9 among subnormal ones.
_SMALLEST_FP8_STEP = tl.constexpr(2.0**-9)


class TargetArgs(NamedTuple):
    """Keys or values of one layer, as views of a pool: pointers, and strides in elements.

    `part` is the stride between the parts of a vector that the vectorised order splits, else 0.
    Scales are fp32, None where the pool has none.
    """

    cache: torch.Tensor
    scales: torch.Tensor | None
    block: int
    head: int
    slot: int
    part: int
    scale_block: int
    scale_head: int
    scale_slot: int


class SourceArgs(NamedTuple):
    """New vectors [num_tokens, num_kv_heads, head_dim], with strides in elements."""

    vectors: torch.Tensor
    token: int
    head: int
    dim: int


def write_kv(
    pool: KVPool,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As `rayserve_kernels.cache_write.write_kv`, with the same bytes; waits for no device.

    NaN in a pool of floats stays NaN, of whatever bits. A slot outside the pool, which is refused
    on a CPU, is left out on a GPU.

    Args:
        pool: Written in place; where it holds fp8, on a GPU that has that dtype.
        layer: As there.
        keys: As there.
        values: As there.
        slot_mapping: As there.

    Raises:
        ValueError: As there.
    """
    check_write(pool, keys, values, slot_mapping)
    layout = pool.layout
    num_vectors = slot_mapping.numel() * layout.num_kv_heads
    if not num_vectors:
        return
    key_view, value_view = pool.key_view(layer), pool.value_view(layer)
    padded_dim = 1 << (layout.head_dim - 1).bit_length()
    rows = max(1, _TILE_ELEMENTS // padded_dim)
    write_slots[(triton.cdiv(num_vectors, rows), 2)](
        SourceArgs(keys, *keys.stride()),
        SourceArgs(values, *values.stride()),
        _target_args(key_view, pool.key_scale_view(layer)),
        _target_args(value_view, pool.value_scale_view(layer)),
        slot_mapping,
        slot_mapping.stride(0),
        num_vectors,
        pool.num_slots,
        NUM_KV_HEADS=layout.num_kv_heads,
        BLOCK_SIZE=layout.block_size,
        HEAD_DIM=layout.head_dim,
        PADDED_DIM=padded_dim,
        KEY_PART=key_view.shape[-1],
        LARGEST_CODE=LARGEST[layout.dtype] if layout.scaled else None,
        ROWS=rows,
        num_warps=4,
    )


def _target_args(view: torch.Tensor, scales: torch.Tensor | None) -> TargetArgs:
    block, head, slot, *parts = view.stride()
    scale_block, scale_head, scale_slot = (0, 0, 0) if scales is None else scales.stride()
    return TargetArgs(
        cache=view,
        scales=scales,
        block=block,
        head=head,
        slot=slot,
        part=parts[0] if view.dim() == 5 else 0,
        scale_block=scale_block,
        scale_head=scale_head,
        scale_slot=scale_slot,
    )


@jit
def code_rows(
    vectors: typing.Any, LARGEST_CODE: tl.constexpr, IS_INTEGER: tl.constexpr
) -> typing.Any:
    """Code vectors as `quantisation.quantise` does, bit for bit.

    Args:
        vectors: fp32 [ROWS, PADDED_DIM], zeros behind a vector's end.
        LARGEST_CODE: As `quantisation.LARGEST`.
        IS_INTEGER: Codes are int8, else e4m3.

    Returns:
        fp32 [ROWS, PADDED_DIM], of which every value is one of the codes' dtype, and scales, fp32
        [ROWS].
    """
    # A maximum of floats may leave NaN out.
    is_finite = tl.min((tl.abs(vectors) < float("inf")).to(tl.int32), 1) > 0
    vectors = tl.where(is_finite[:, None], vectors, 0.0)
    largest = tl.max(tl.abs(vectors), 1)
    scale = tl.maximum(
        tl.div_rn(largest, tl.full(largest.shape, LARGEST_CODE, tl.float32)), _SMALLEST
    )
    quotient = tl.div_rn(vectors, tl.broadcast_to(scale[:, None], vectors.shape))
    # Rounded here, not by a cast: how that rounds depends on the GPU.
    size = tl.abs(quotient)
    if IS_INTEGER:
        anchor = tl.full(size.shape, _ANCHOR, tl.float32)
    else:
        power = (size.to(tl.int32, bitcast=True) & _EXPONENT_BITS).to(tl.float32, bitcast=True)
        anchor = tl.maximum(power * 0.125, _SMALLEST_FP8_STEP) * _ANCHOR
    size = tl.minimum((size + anchor) - anchor, LARGEST_CODE)
    sign = quotient.to(tl.int32, bitcast=True) & _SIGN_BIT
    code = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return code, tl.where(is_finite, scale, float("nan"))


@jit
def write_rows(
    source: typing.Any,
    target: typing.Any,
    token: typing.Any,
    head: typing.Any,
    slot: typing.Any,
    is_row: typing.Any,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PART_DIM: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
) -> None:
    """Write a tile of `SourceArgs` to `TargetArgs`, keys or values; see `write_slots`."""
    dims = tl.arange(0, PADDED_DIM)
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    source_at = token * source.token + head * source.head
    vectors = tl.load(
        source.vectors + source_at[:, None] + (dims.to(tl.int64) * source.dim)[None, :],
        mask=is_element,
        other=0,
    )
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if LARGEST_CODE is not None:
        IS_INTEGER: tl.constexpr = target.cache.dtype.element_ty == tl.int8
        vectors, scale = code_rows(vectors.to(tl.float32), LARGEST_CODE, IS_INTEGER)
        scale_at = block * target.scale_block + offset * target.scale_slot
        tl.store(target.scales + scale_at + head * target.scale_head, scale, mask=is_row)
    elif vectors.dtype != target.cache.dtype.element_ty:
        vectors = vectors.to(tl.float32)
    target_at = block * target.block + offset * target.slot + head * target.head
    if PART_DIM == HEAD_DIM:
        part_at = dims
    else:
        # Of all strides, as the compiler cannot see: it writes so many elements at once.
        target_at = tl.multiple_of(target_at, PART_DIM)
        part_at = (dims // PART_DIM).to(tl.int64) * target.part + dims % PART_DIM
    tl.store(
        target.cache + target_at[:, None] + part_at[None, :],
        vectors.to(target.cache.dtype.element_ty),
        mask=is_element,
    )


@_jit_for_any_size
def write_slots(
    keys: SourceArgs,
    values: SourceArgs,
    key_target: TargetArgs,
    value_target: TargetArgs,
    slot_mapping: typing.Any,
    mapping_stride: typing.Any,
    num_vectors: typing.Any,
    num_slots: typing.Any,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEY_PART: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Write vectors, a row for each token and head; a program for keys and one for values.

    Grid: (num_vectors / ROWS, rounded up, 2).

    Args:
        keys: To write.
        values: To write.
        key_target: Where to.
        value_target: Where to.
        slot_mapping: int64 [num_tokens].
        mapping_stride: Of it.
        num_vectors: Tokens times heads.
        num_slots: Of the pool; rows of other slots are left out.
        NUM_KV_HEADS: Of the pool.
        BLOCK_SIZE: Slots of a block.
        HEAD_DIM: Of a vector.
        PADDED_DIM: The next power of two.
        KEY_PART: Adjacent elements of a key: HEAD_DIM unless the order splits keys.
        LARGEST_CODE: As `quantisation.LARGEST`; None where the pool has no scales.
        ROWS: Of a tile.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_vectors
    token, head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    slot = tl.load(slot_mapping + token * mapping_stride, mask=is_row, other=0)
    is_row = is_row & (slot >= 0) & (slot < num_slots)
    if tl.program_id(1) == 0:
        write_rows(
            keys,
            key_target,
            token,
            head,
            slot,
            is_row,
            BLOCK_SIZE,
            HEAD_DIM,
            PADDED_DIM,
            KEY_PART,
            LARGEST_CODE,
        )
    else:
        write_rows(
            values,
            value_target,
            token,
            head,
            slot,
            is_row,
            BLOCK_SIZE,
            HEAD_DIM,
            PADDED_DIM,
            HEAD_DIM,
            LARGEST_CODE,
        )
