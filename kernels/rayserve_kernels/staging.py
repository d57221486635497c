"""Uploads what the host prepares for a step: one copy, from pinned memory, on a stream of its own.

The streams and events are those of the device's module in torch. On a CPU these do nothing, and the
same code copies at once.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

# Steps whose bytes are kept apart: that which is computed, and that which is prepared meanwhile.
_NUM_SLOTS = 2
# What every dtype is content with, and accesses of 128 bits.
_ALIGNMENT = 16


class ArraySpec(NamedTuple):
    """Where one array of a step lies in the bytes of all."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The array as a tensor over the bytes. `flat` is uint8 [n]."""
        size_bytes = math.prod(self.shape) * self.dtype.itemsize
        return flat[self.begin : self.begin + size_bytes].view(self.dtype).view(self.shape)


def lay_out(arrays: Sequence[Array]) -> tuple[tuple[ArraySpec, ...], int]:
    """Place arrays one after the other, each aligned; the same for equal shapes and dtypes.

    Returns:
        Their places, and the bytes of all.
    """
    specs, end = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        specs.append(ArraySpec(end, array.shape, dtype))
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(specs), end


class _Slot:
    """The bytes of one step on both sides, and what must happen before each is written again."""

    def __init__(self, size_bytes: int, device: torch.device, module: Any) -> None:
        self.host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self.device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.uploaded = module.Event()
        self.computed = module.Event()


class StepUploads:
    """Sends the arrays of a step to the device, while the step before is computed.

    A buffer of the host is written again only when the device has read it, and one of the device
    only when the step that reads it has been computed. One thread uses it, with one compute
    stream, and it enqueues a step before it uploads the next.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._copies = self._module.Stream(device)
        self._slots: list[_Slot | None] = [None] * _NUM_SLOTS
        self._last = 0

    def upload(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
        """Send arrays, and let the compute stream wait for them.

        Returns:
            A tensor for each, on the device. They hold until the upload after the next.
        """
        flat, specs = self.upload_bytes(arrays)
        return tuple(spec.view(flat) for spec in specs)

    def upload_bytes(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, tuple[ArraySpec, ...]]:
        """As `upload`; returns the bytes, uint8 [n], and where each array lies in them."""
        specs, size_bytes = lay_out(arrays)
        compute = self._module.current_stream(self._device)
        last = self._slots[self._last]
        if last is not None:
            # Whatever reads the last upload has been enqueued by now.
            last.computed.record(compute)
        slot = self._next_slot(size_bytes)
        slot.uploaded.synchronize()
        for spec, array in zip(specs, arrays, strict=True):
            spec.view(slot.host).copy_(torch.from_numpy(np.ascontiguousarray(array)))
        sent = slot.device[:size_bytes]
        with self._module.stream(self._copies):
            self._copies.wait_event(slot.computed)
            sent.copy_(slot.host[:size_bytes], non_blocking=True)
            slot.uploaded.record(self._copies)
        compute.wait_event(slot.uploaded)
        return sent, specs

    def _next_slot(self, size_bytes: int) -> _Slot:
        self._last = (self._last + 1) % _NUM_SLOTS
        slot = self._slots[self._last]
        if slot is None or slot.host.numel() < size_bytes:
            if slot is not None:
                slot.computed.synchronize()
            # Twice as much as is needed now, so that it seldom grows.
            slot = _Slot(2 * size_bytes, self._device, self._module)
            # Its memory may be what steps under way have given back, which only the compute stream
            # may take as free.
            slot.computed.record(self._module.current_stream(self._device))
            self._slots[self._last] = slot
        return slot
