"""Known fault B66: the scales of quantised KV follow what is written, on every path."""

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import AttentionMetadata, TorchBackend
from rayserve_kernels.layout import KVLayout, KVPool

NUM_KV_HEADS, NUM_Q_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 4, 64, 16
LENGTHS = (33, 7, 16)
LARGEST_KEY, LARGEST_CODE = 8.0, 448.0


def sequences() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Queries, keys and values of each sequence, [length, heads, 64]; the largest key is 8."""
    generator = torch.Generator().manual_seed(66)

    def draw(num_heads: int) -> list[torch.Tensor]:
        return [torch.randn(n, num_heads, HEAD_DIM, generator=generator) for n in LENGTHS]

    queries, keys, values = draw(NUM_Q_HEADS), draw(NUM_KV_HEADS), draw(NUM_KV_HEADS)
    largest = max(float(part.abs().max()) for part in keys)
    return queries, [part / largest * LARGEST_KEY for part in keys], values


def warm_pool(layout: KVLayout) -> KVPool:
    """A pool whose every slot was written before, with zeros."""
    pool = layout.allocate(8)
    zeros = torch.zeros(8 * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    tables = np.arange(8, dtype=np.int32)[None]
    metadata = AttentionMetadata.for_step(tables, [0], [8 * BLOCK_SIZE], BLOCK_SIZE)
    TorchBackend().write(pool, 0, zeros, zeros, metadata)
    return pool


def attend(layout: KVLayout, steps: list[list[int]]) -> tuple[KVPool, list[torch.Tensor]]:
    """Run steps of so many tokens of each sequence; the rows of each sequence."""
    backend, pool = TorchBackend(), warm_pool(layout)
    tables = np.array([[5, 2, 7], [0, 9, 9], [3, 9, 9]], dtype=np.int32)
    parts = sequences()
    rows: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    computed = [0] * len(LENGTHS)
    for counts in steps:
        metadata = AttentionMetadata.for_step(tables, computed, counts, BLOCK_SIZE)
        queries, keys, values = (
            torch.cat(
                [part[s][n : n + c] for s, (n, c) in enumerate(zip(computed, counts, strict=True))]
            )
            for part in parts
        )
        backend.write(pool, 0, keys, values, metadata)
        output = backend.attend(pool, 0, queries, metadata, HEAD_DIM**-0.5)
        for own, new in zip(rows, output.split(counts), strict=True):
            own.append(new)
        computed = [n + c for n, c in zip(computed, counts, strict=True)]
    return pool, [torch.cat(own) for own in rows]


RAGGED: list[list[int]] = [[*LENGTHS]]
PREFILL = [[n if row == own else 0 for row in range(3)] for own, n in enumerate(LENGTHS)]
DECODE = [[int(step < n) for n in LENGTHS] for step in range(max(LENGTHS))]


@pytest.mark.parametrize("coding", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("steps", [RAGGED, PREFILL, DECODE], ids=["ragged", "prefill", "decode"])
def test_b66_after_a_warm_up_with_zeros_every_path_agrees_with_16_bit_kv(
    steps: list[list[int]], coding: torch.dtype
) -> None:
    layout = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, coding, scaled=True)
    _, rows = attend(layout, steps)
    _, exact = attend(KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.bfloat16), RAGGED)
    for mine, wanted in zip(rows, exact, strict=True):
        # A scale of zeros or of another layer would be off by a factor.
        assert (mine.norm() / wanted.norm() - 1).abs() < 0.02
        assert (mine - wanted).norm() / wanted.norm() < 0.06


def test_b66_the_scale_of_a_key_of_8_covers_it_after_a_warm_up_with_zeros() -> None:
    layout = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.float8_e4m3fn, scaled=True)
    payloads = []
    for steps in (RAGGED, PREFILL, DECODE):
        pool, _ = attend(layout, steps)
        scales = pool.key_scale_view(0)
        assert scales is not None
        assert float(scales.max()) == pytest.approx(LARGEST_KEY / LARGEST_CODE)
        assert float((pool.key_view(0).float() * scales[..., None]).abs().max()) == LARGEST_KEY
        payloads.append(pool.payload)
    # Prefill and decode write the same bytes.
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)
