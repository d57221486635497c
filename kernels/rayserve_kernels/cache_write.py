"""Write the keys and values of new tokens into their slots."""

import torch

from rayserve_kernels.layout import KVPool
from rayserve_kernels.quantisation import quantise


def write_kv(
    pool: KVPool,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write one layer's keys and values by slot, in any layout, with scales where it has some.

    Args:
        pool: Written in place.
        layer: Layer of the pool.
        keys: [num_tokens, num_kv_heads, head_dim], on the pool's device, any strides. Any floating
            dtype where the pool holds floats or codes, else the pool's own.
        values: As `keys`.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset of each token. No slot
            twice: which of two writers wins is undefined.

    Raises:
        ValueError: A shape, dtype or device that does not fit, or (on CPU; on a GPU the check
            would wait for the device) a slot outside the pool.
    """
    layout = pool.layout
    check_write(pool, keys, values, slot_mapping)
    block_ids = slot_mapping.div(layout.block_size, rounding_mode="floor")
    offsets = slot_mapping.remainder(layout.block_size)
    for vectors, view, scale_view in (
        (keys, pool.key_view(layer), pool.key_scale_view(layer)),
        (values, pool.value_view(layer), pool.value_scale_view(layer)),
    ):
        if scale_view is None:
            stored = vectors.to(layout.dtype)
        else:
            stored, scale_view[block_ids, :, offsets] = quantise(vectors, layout.dtype)
        # [num_tokens, num_kv_heads, head_dim], or with head_dim split as the vectorised view is.
        view[block_ids, :, offsets] = stored.unflatten(-1, view.shape[3:])


def check_write(
    pool: KVPool, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Check what `write_kv` expects, whatever writes.

    Raises:
        ValueError: As there.
    """
    _check_vectors(pool, keys, values, slot_mapping.numel())
    _check_slots(pool, slot_mapping)


def _check_vectors(pool: KVPool, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
    layout = pool.layout
    expected = (num_tokens, layout.num_kv_heads, layout.head_dim)
    takes_floats = layout.scaled or layout.dtype.is_floating_point
    for name, tensor in (("keys", keys), ("values", values)):
        fits = tensor.dtype.is_floating_point if takes_floats else tensor.dtype == layout.dtype
        if tensor.shape != expected or not fits:
            accepted = "floats" if takes_floats else layout.dtype
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {accepted} {expected}"
            )
        if tensor.device != pool.device:
            raise ValueError(f"{name} is on {tensor.device}: the pool is on {pool.device}")


def _check_slots(pool: KVPool, slot_mapping: torch.Tensor) -> None:
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)}: expected "
            f"torch.int64 [num_tokens]"
        )
    if slot_mapping.device != pool.device:
        raise ValueError(f"slot_mapping is on {slot_mapping.device}: the pool is on {pool.device}")
    if pool.device.type == "cpu" and slot_mapping.numel():
        # A negative slot would silently land in the last block.
        low, high = (int(bound) for bound in torch.aminmax(slot_mapping))
        if low < 0 or high >= pool.num_slots:
            raise ValueError(
                f"slot_mapping runs from {low} to {high}: the pool has slots 0 to "
                f"{pool.num_slots - 1}"
            )
