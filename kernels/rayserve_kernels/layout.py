"""Physical layout of the KV pool: where each block's keys and values lie in memory."""

from __future__ import annotations

import dataclasses
import math
import typing

import numpy as np
import torch

Order = typing.Literal["block_major", "nhd", "hnd", "vectorised"]

_VECTOR_BYTES = 16
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """How the KV slots of one rank are laid out. A value: kernels take strides, not layouts.

    Orders, outermost dimension first (K and V alike unless said otherwise):

    - `block_major`: one run per block, all layers, K then V of each:
      `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
    - `hnd`: a plane per layer and K or V, `[num_blocks, num_kv_heads, block_size, head_dim]`.
    - `nhd`: a plane per layer and K or V, `[num_blocks, block_size, num_kv_heads, head_dim]`.
    - `vectorised`: K planes `[num_blocks, num_kv_heads, head_dim / x, block_size, x]`, where x
      elements make 16 bytes; V planes as in `hnd`.

    A block is a run of bytes (in plane orders: one run per plane) that this descriptor explains;
    two pools exchange blocks only where their descriptors are equal.

    Args:
        num_layers: Layers that share the pool.
        num_kv_heads: KV heads held by this rank.
        block_size: Slots per block.
        head_dim: Elements of one key or value vector.
        dtype: Of keys and values. Integers are allowed: not every model stores floats.
        order: One of the orders above.

    Raises:
        ValueError: A size below 1, an unknown order, or a head_dim that x does not divide.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    order: Order = "block_major"

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("num_layers", "num_kv_heads", "block_size", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.order not in typing.get_args(Order):
            raise ValueError(f"order={self.order!r}: expected one of {typing.get_args(Order)}")
        if self.order == "vectorised" and self.head_dim % self.vector_size:
            raise ValueError(
                f"head_dim={self.head_dim}: the vectorised order of {self.dtype} needs a "
                f"multiple of {self.vector_size}"
            )

    @property
    def vector_size(self) -> int:
        """Elements in 16 bytes: the x of the vectorised order."""
        return _VECTOR_BYTES // self.dtype.itemsize

    @property
    def block_elements(self) -> int:
        """Elements of one block: all layers, K and V."""
        slots = self.num_layers * 2 * self.num_kv_heads * self.block_size
        return slots * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V."""
        return self.block_elements * self.dtype.itemsize

    def describe(self) -> str:
        """Descriptor that travels with a block's bytes; equal exactly for equal layouts."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.order}:layers={self.num_layers},kv_heads={self.num_kv_heads},"
            f"block_size={self.block_size},head_dim={self.head_dim},dtype={dtype}"
        )

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> KVPool:
        """Allocate a pool of zeros; on CPU, memory is committed when a block is first written.

        Args:
            num_blocks: Blocks of the pool.
            device: Where the payload lives.

        Raises:
            ValueError: `num_blocks` is below 1.
            MemoryError: The system refuses that much (on a GPU: torch.OutOfMemoryError).
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: expected at least 1")
        size_bytes = num_blocks * self.block_bytes
        device = torch.device(device)
        if device.type != "cpu":
            return KVPool(self, torch.zeros(size_bytes, dtype=torch.uint8, device=device))
        # torch.zeros writes its zeros and so commits every byte; numpy leaves them to the kernel.
        memory = np.zeros(size_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
        skip = -memory.ctypes.data % _ALIGNMENT_BYTES
        return KVPool(self, torch.from_numpy(memory[skip : skip + size_bytes]))


class KVPool:
    """The payload of one rank's blocks, and views of it. Who owns which block is not its business.

    Args:
        layout: Explains the payload.
        payload: uint8 [num_blocks * layout.block_bytes], contiguous, on any device.

    Attributes:
        keys: All layers' keys, a strided view in logical order whatever the layout:
            [num_layers, num_blocks, num_kv_heads, block_size, head_dim]. In the vectorised
            order the last dimension is split: [..., block_size, head_dim / x, x].
        values: Likewise, never split.
        blocks: [num_blocks, ...], one block at each index, the rest in physical order.

    Raises:
        ValueError: The payload is not a whole number of blocks, or not a flat run of bytes.
    """

    def __init__(self, layout: KVLayout, payload: torch.Tensor) -> None:
        num_blocks, rest = divmod(payload.numel(), layout.block_bytes)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise ValueError(
                f"payload is {payload.dtype} {tuple(payload.shape)}: expected contiguous uint8 [n]"
            )
        if num_blocks < 1 or rest:
            raise ValueError(
                f"payload has {payload.numel()} bytes: expected a multiple of "
                f"block_bytes={layout.block_bytes}"
            )
        self.layout = layout
        self.payload = payload
        self.num_blocks = num_blocks
        self.keys, self.values, self.blocks = _views(layout, payload.view(layout.dtype), num_blocks)
        self._key_views = self.keys.unbind(0)
        self._value_views = self.values.unbind(0)

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self.num_blocks * self.layout.block_size

    @property
    def device(self) -> torch.device:
        """Where the payload lives."""
        return self.payload.device

    def key_view(self, layer: int) -> torch.Tensor:
        """Keys of one layer: `keys[layer]`. Raises ValueError for a layer that does not exist."""
        return self._key_views[self._checked(layer)]

    def value_view(self, layer: int) -> torch.Tensor:
        """Values of one layer: `values[layer]`. Raises ValueError as `key_view` does."""
        return self._value_views[self._checked(layer)]

    def block_bytes_view(self, block_id: int) -> torch.Tensor:
        """The run of one block, uint8 [layout.block_bytes]; a view, so that writes go through.

        Raises:
            ValueError: No such block, or the order scatters a block over planes.
        """
        if self.layout.order != "block_major":
            raise ValueError(f"order={self.layout.order!r}: only block_major has one run per block")
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id={block_id}: the pool has {self.num_blocks} blocks")
        start = block_id * self.layout.block_bytes
        return self.payload[start : start + self.layout.block_bytes]

    def _checked(self, layer: int) -> int:
        # A negative layer would index from the end.
        if not 0 <= layer < self.layout.num_layers:
            raise ValueError(f"layer={layer}: the pool has {self.layout.num_layers} layers")
        return layer


def _views(
    layout: KVLayout, elements: torch.Tensor, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views `keys`, `values` and `blocks` of a pool over its flat elements."""
    layers, heads, dim = layout.num_layers, layout.num_kv_heads, layout.head_dim
    slots = layout.block_size
    if layout.order == "block_major":
        blocks = elements.view(num_blocks, layers, 2, heads, slots, dim)
        planes = blocks.permute(2, 1, 0, 3, 4, 5)
        return planes[0], planes[1], blocks
    flat = elements.view(layers, 2, num_blocks, math.prod((heads, slots, dim)))
    blocks = flat.permute(2, 0, 1, 3)
    keys, values = flat.unbind(1)
    if layout.order == "nhd":
        keys = keys.unflatten(-1, (slots, heads, dim)).transpose(2, 3)
        values = values.unflatten(-1, (slots, heads, dim)).transpose(2, 3)
        return keys, values, blocks
    values = values.unflatten(-1, (heads, slots, dim))
    if layout.order == "hnd":
        return keys.unflatten(-1, (heads, slots, dim)), values, blocks
    vector = layout.vector_size
    keys = keys.unflatten(-1, (heads, dim // vector, slots, vector)).transpose(3, 4)
    return keys, values, blocks
