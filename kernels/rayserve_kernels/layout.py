"""Physical layout of the KV pool: where each block's keys and values lie in memory."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np
import torch

Order = typing.Literal["block_major", "nhd", "hnd", "vectorised"]

SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""What the codes of a scaled pool may be."""

_VECTOR_BYTES = 16
_ALIGNMENT_BYTES = 64
_SCALE_BYTES = 4


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

    A scaled pool holds codes, and for each slot and KV head one fp32 scale for its key and one for
    its value: vector = code * scale. The scales lie behind the codes of the same block, layer and
    K or V, in the order that heads and slots have there; both parts are padded to 16 bytes. So a
    slot is coded once, when it is written, whatever comes to stand beside it in its block.

    A block is a run of bytes (in plane orders: one run per plane) that this descriptor explains;
    two pools exchange blocks only where their descriptors are equal.

    Args:
        num_layers: Layers that share the pool.
        num_kv_heads: KV heads held by this rank.
        block_size: Slots per block.
        head_dim: Elements of one key or value vector.
        dtype: Of keys and values as they are stored. Integers are allowed without scales too: not
            every model stores floats.
        order: One of the orders above.
        scaled: Keys and values are codes with scales; of one of `SCALED_DTYPES`.

    Raises:
        ValueError: A size below 1, an unknown order, a head_dim that x does not divide, or a dtype
            that needs scales or cannot have them.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    order: Order = "block_major"
    scaled: bool = False

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
        if self.scaled and self.dtype not in SCALED_DTYPES:
            raise ValueError(f"dtype={self.dtype}: scaled pools hold one of {SCALED_DTYPES}")
        if self.dtype.is_floating_point and self.dtype.itemsize == 1 and not self.scaled:
            raise ValueError(f"dtype={self.dtype}: a range so small needs scaled=True")

    @property
    def vector_size(self) -> int:
        """Elements in 16 bytes: the x of the vectorised order."""
        return _VECTOR_BYTES // self.dtype.itemsize

    @property
    def run_elements(self) -> int:
        """Elements of one block in one layer, K or V alone."""
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def scales_start(self) -> int:
        """First byte of the scales in the run of one block, layer and K or V; its end if none."""
        size_bytes = self.run_elements * self.dtype.itemsize
        return _padded(size_bytes) if self.scaled else size_bytes

    @property
    def run_bytes(self) -> int:
        """Bytes of one block in one layer, K or V alone, scales included."""
        if not self.scaled:
            return self.scales_start
        return self.scales_start + _padded(self.num_kv_heads * self.block_size * _SCALE_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V, scales included."""
        return self.num_layers * 2 * self.run_bytes

    @property
    def coding(self) -> str:
        """Name of how a vector becomes bytes, such as "float32" or "int8-per-slot"."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}-per-slot" if self.scaled else name

    def describe(self) -> str:
        """Descriptor that travels with a block's bytes; equal exactly for equal layouts."""
        return (
            f"{self.order}:layers={self.num_layers},kv_heads={self.num_kv_heads},"
            f"block_size={self.block_size},head_dim={self.head_dim},dtype={self.coding}"
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
        key_scales: fp32 [num_layers, num_blocks, num_kv_heads, block_size], a strided view, or None
            where the layout has no scales.
        value_scales: Likewise.
        blocks: uint8 [num_blocks, ...], one block at each index, the rest in physical order.

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
        runs, self.blocks = _runs(layout, payload, num_blocks)
        self.keys, self.values = _vectors(layout, runs)
        self._key_views = self.keys.unbind(0)
        self._value_views = self.values.unbind(0)
        self.key_scales: torch.Tensor | None = None
        self.value_scales: torch.Tensor | None = None
        if layout.scaled:
            self.key_scales, self.value_scales = _scales(layout, runs)

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

    def key_scale_view(self, layer: int) -> torch.Tensor | None:
        """Scales of one layer's keys: `key_scales[layer]`; None where the layout has none.

        Raises:
            ValueError: As `key_view`.
        """
        layer = self._checked(layer)
        return None if self.key_scales is None else self.key_scales[layer]

    def value_scale_view(self, layer: int) -> torch.Tensor | None:
        """Scales of one layer's values: `value_scales[layer]`; otherwise as `key_scale_view`."""
        layer = self._checked(layer)
        return None if self.value_scales is None else self.value_scales[layer]

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


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _VECTOR_BYTES) * _VECTOR_BYTES


def _runs(
    layout: KVLayout, payload: torch.Tensor, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes as [2, num_layers, num_blocks, run_bytes], and as `KVPool.blocks`."""
    if layout.order == "block_major":
        runs = payload.view(num_blocks, layout.num_layers, 2, layout.run_bytes)
        return runs.permute(2, 1, 0, 3), payload.view(num_blocks, layout.block_bytes)
    runs = payload.view(layout.num_layers, 2, num_blocks, layout.run_bytes)
    return runs.transpose(0, 1), runs.permute(2, 0, 1, 3)


def _vectors(layout: KVLayout, runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views `keys` and `values` of a pool over its runs."""
    heads, slots, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
    size_bytes = layout.run_elements * layout.dtype.itemsize
    keys, values = runs.narrow(-1, 0, size_bytes).view(layout.dtype).unbind(0)
    if layout.order == "nhd":
        keys = keys.unflatten(-1, (slots, heads, dim)).transpose(2, 3)
        return keys, values.unflatten(-1, (slots, heads, dim)).transpose(2, 3)
    values = values.unflatten(-1, (heads, slots, dim))
    if layout.order != "vectorised":
        return keys.unflatten(-1, (heads, slots, dim)), values
    vector = layout.vector_size
    keys = keys.unflatten(-1, (heads, dim // vector, slots, vector)).transpose(3, 4)
    return keys, values


def _scales(layout: KVLayout, runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views `key_scales` and `value_scales` of a scaled pool over its runs."""
    heads, slots = layout.num_kv_heads, layout.block_size
    size_bytes = heads * slots * _SCALE_BYTES
    scales = runs.narrow(-1, layout.scales_start, size_bytes).view(torch.float32)
    if layout.order == "nhd":
        scales = scales.unflatten(-1, (slots, heads)).transpose(-1, -2)
    else:
        scales = scales.unflatten(-1, (heads, slots))
    keys, values = scales.unbind(0)
    return keys, values
