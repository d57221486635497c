"""The Triton cache write leaves the bytes that the torch path leaves, in every layout."""

import os
import typing

import pytest
import torch

from rayserve_kernels import cache_write
from rayserve_kernels.gpu.cache_write import write_kv
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout, KVPool, Order

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
ORDERS: tuple[Order, ...] = typing.get_args(Order)
# Dtypes of vectors and pool.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float16),
    (torch.int64, torch.int64),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e4m3fn),
]
NUM_BLOCKS = 5


def pools(layout: KVLayout) -> tuple[KVPool, KVPool]:
    """Two with the same garbage, on the CPU and where the kernels run."""
    generator = torch.Generator().manual_seed(8)
    size = (NUM_BLOCKS * layout.block_bytes,)
    payload = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return KVPool(layout, payload.clone()), KVPool(layout, payload.to(DEVICE, copy=True))


def vectors(num_tokens: int, layout: KVLayout, dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, with zeros, ties and subnormal numbers; strided."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (layout.num_kv_heads, num_tokens, 2 * layout.head_dim)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    drawn *= torch.logspace(-6, 4, num_tokens, dtype=torch.float64)[None, :, None]
    drawn[0, 0] = -0.0
    drawn[-1, 1, ::3] = torch.linspace(-8, 8, len(drawn[-1, 1, ::3]), dtype=torch.float64).round()
    drawn[0, 2] *= 1e-36
    if not dtype.is_floating_point:
        drawn *= 1e6
    return drawn.to(dtype).transpose(0, 1)[..., ::2]


def assert_same_bytes(
    layout: KVLayout, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, layer: int = 0
) -> KVPool:
    expected, pool = pools(layout)
    cache_write.write_kv(expected, layer, keys, values, slots)
    write_kv(pool, layer, keys.to(DEVICE), values.to(DEVICE), slots.to(DEVICE))
    assert torch.equal(pool.payload.cpu(), expected.payload)
    return pool


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "stored"), DTYPES)
def test_the_bytes_are_those_of_the_torch_path(
    order: Order, dtype: torch.dtype, stored: torch.dtype
) -> None:
    scaled = stored in SCALED_DTYPES and dtype != stored
    # An odd block size pads the scales; 48 is no power of two.
    layout = KVLayout(2, 3, 7, 48, stored, order, scaled)
    keys, values = vectors(9, layout, dtype), vectors(9, layout, dtype).flip(0)
    slots = torch.randperm(NUM_BLOCKS * 7, generator=torch.Generator().manual_seed(5))
    assert_same_bytes(layout, keys, values, slots[:18:2], layer=1)


@pytest.mark.parametrize("coding", SCALED_DTYPES)
def test_every_tie_and_every_code_rounds_as_the_torch_path_does(coding: torch.dtype) -> None:
    layout = KVLayout(1, 1, 8, 256, coding, "hnd", scaled=True)
    codes = torch.arange(-128, 128, dtype=torch.int8).view(torch.uint8)
    if coding == torch.int8:
        numbers = torch.arange(-128.0, 128.0).clamp(-127, 127)
    else:
        numbers = codes.view(torch.float8_e4m3fn).float().nan_to_num(448.0).sort().values
    middles = (numbers + numbers.roll(-1)) / 2
    middles[-1] = numbers[0]
    near = [numbers, middles, middles.nextafter(numbers), middles.nextafter(numbers.roll(-1))]
    keys = torch.stack(near)[:, None]
    # The largest of each is a code, so that scales are 1.
    keys[..., 0] = numbers.abs().max()
    pool = assert_same_bytes(layout, keys, -keys * 3, torch.arange(4))
    assert torch.equal(pool.key_view(0)[0, 0, 0].float().cpu()[1:], numbers[1:])


@pytest.mark.parametrize("coding", SCALED_DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_vector_that_is_not_finite_marks_its_own_scale_alone(
    coding: torch.dtype, bad: float
) -> None:
    layout = KVLayout(1, 2, 4, 16, coding, "nhd", scaled=True)
    keys, values = torch.ones(3, 2, 16), torch.ones(3, 2, 16)
    keys[1, 0, 5] = values[2, 1, 15] = bad
    pool = assert_same_bytes(layout, keys, values, torch.tensor([4, 9, 0]))
    scales = pool.key_scale_view(0)
    assert scales is not None
    assert scales[2, 0, 1].view(torch.int32).item() == 0x7FC00000
    assert int(scales.isnan().sum()) == 1


def test_offsets_beyond_two_to_the_31_elements_reach_their_slots() -> None:
    # Only the pages that are written take memory.
    layout = KVLayout(1, 1, 1024, 256, torch.int8, "hnd", scaled=True)
    pool = layout.allocate(9000, DEVICE)
    assert pool.key_view(0)[-1].data_ptr() - pool.payload.data_ptr() > 2**31
    keys = torch.linspace(-1, 1, 256).expand(2, 1, 256).to(DEVICE)
    slots = torch.tensor([pool.num_slots - 1, 0], device=DEVICE)
    write_kv(pool, 0, keys, keys * 2, slots)
    assert pool.key_view(0)[[-1, 0], 0, [-1, 0], -1].tolist() == [127, 127]
    scales = pool.value_scale_view(0)
    assert scales is not None
    assert scales[[-1, 0], 0, [-1, 0]].tolist() == pytest.approx([2 / 127, 2 / 127])


def test_no_token_writes_nothing_and_what_does_not_fit_is_refused() -> None:
    layout = KVLayout(1, 2, 4, 16, torch.float32)
    empty = torch.empty(0, 2, 16)
    assert_same_bytes(layout, empty, empty, torch.empty(0, dtype=torch.int64))
    pool, keys = pools(layout)[1], torch.zeros(1, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"keys is torch\.float32 \(1, 2, 8\)"):
        write_kv(pool, 0, keys[..., :8], keys, torch.zeros(1, dtype=torch.int64, device=DEVICE))
