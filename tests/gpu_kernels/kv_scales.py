"""Sequences over a pool that was warmed up with zeros: its scales must follow what is written."""

import numpy as np
import pytest
import torch

from rayserve_kernels.attention import AttentionBackend, TorchBackend
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_kernels.metadata import AttentionMetadata

NUM_KV_HEADS, NUM_Q_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 4, 64, 16
LENGTHS = (33, 7, 16)
LARGEST_KEY, LARGEST_CODE = 8.0, 448.0
CPU = torch.device("cpu")


def sequences() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Queries, keys and values of each sequence, [length, heads, 64]; the largest key is 8."""
    generator = torch.Generator().manual_seed(66)

    def draw(num_heads: int) -> list[torch.Tensor]:
        return [torch.randn(n, num_heads, HEAD_DIM, generator=generator) for n in LENGTHS]

    queries, keys, values = draw(NUM_Q_HEADS), draw(NUM_KV_HEADS), draw(NUM_KV_HEADS)
    largest = max(float(part.abs().max()) for part in keys)
    return queries, [part / largest * LARGEST_KEY for part in keys], values


def warm_pool(layout: KVLayout, backend: AttentionBackend, device: torch.device) -> KVPool:
    """A pool whose every slot was written before, with zeros."""
    pool = layout.allocate(8, device)
    zeros = torch.zeros(8 * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, device=device)
    tables = np.arange(8, dtype=np.int32)[None]
    metadata = AttentionMetadata.for_step(tables, [0], [8 * BLOCK_SIZE], BLOCK_SIZE, device)
    backend.write(pool, 0, zeros, zeros, metadata)
    return pool


def attend(
    layout: KVLayout, steps: list[list[int]], backend: AttentionBackend, device: torch.device = CPU
) -> tuple[KVPool, list[torch.Tensor]]:
    """Run steps of so many tokens of each sequence; the rows of each sequence."""
    pool = warm_pool(layout, backend, device)
    tables = np.array([[5, 2, 7], [0, 9, 9], [3, 9, 9]], dtype=np.int32)
    parts = sequences()
    rows: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    computed = [0] * len(LENGTHS)
    for counts in steps:
        metadata = AttentionMetadata.for_step(tables, computed, counts, BLOCK_SIZE, device)
        queries, keys, values = (
            torch.cat(
                [part[s][n : n + c] for s, (n, c) in enumerate(zip(computed, counts, strict=True))]
            ).to(device)
            for part in parts
        )
        backend.write(pool, 0, keys, values, metadata)
        output = backend.attend(pool, 0, queries, metadata, HEAD_DIM**-0.5)
        for own, new in zip(rows, output.split(counts), strict=True):
            own.append(new.cpu())
        computed = [n + c for n, c in zip(computed, counts, strict=True)]
    return pool, [torch.cat(own) for own in rows]


RAGGED: list[list[int]] = [[*LENGTHS]]
PREFILL = [[n if row == own else 0 for row in range(3)] for own, n in enumerate(LENGTHS)]
DECODE = [[int(step < n) for n in LENGTHS] for step in range(max(LENGTHS))]
PATHS = {"ragged": RAGGED, "prefill": PREFILL, "decode": DECODE}


def check_agreement(
    path: str, coding: torch.dtype, backend: AttentionBackend, device: torch.device = CPU
) -> None:
    """A path over codes agrees with 16-bit KV."""
    layout = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, coding, scaled=True)
    _, rows = attend(layout, PATHS[path], backend, device)
    plain = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.bfloat16)
    _, exact = attend(plain, RAGGED, TorchBackend())
    for mine, wanted in zip(rows, exact, strict=True):
        # A scale of zeros or of another layer would be off by a factor.
        assert (mine.norm() / wanted.norm() - 1).abs() < 0.02
        assert (mine - wanted).norm() / wanted.norm() < 0.06


def check_scales(backend: AttentionBackend, device: torch.device = CPU) -> None:
    """The largest scale covers the key of 8, and every path writes the same bytes."""
    layout = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.float8_e4m3fn, scaled=True)
    payloads = []
    for steps in PATHS.values():
        pool, _ = attend(layout, steps, backend, device)
        scales = pool.key_scale_view(0)
        assert scales is not None
        assert float(scales.max()) == pytest.approx(LARGEST_KEY / LARGEST_CODE)
        assert float((pool.key_view(0).float() * scales[..., None]).abs().max()) == LARGEST_KEY
        payloads.append(pool.payload)
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)
