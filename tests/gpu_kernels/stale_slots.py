"""Greedy decoding by attention alone, over a pool that holds old values."""

import numpy as np
import torch

from rayserve_kernels.attention import AttentionBackend
from rayserve_kernels.layout import KVLayout, Order
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.reference import dense_attention

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 16, 4, 2, 16, 50


def greedy(
    backend: AttentionBackend, layout: KVLayout, poison: float, num_new: int, device: torch.device
) -> tuple[list[int], torch.Tensor]:
    """Decode with one layer of attention over embeddings; (token ids, all attention rows)."""
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB_SIZE, NUM_Q_HEADS, HEAD_DIM, generator=generator)
    embedding = embedding.to(device, layout.dtype)
    pool = layout.allocate(3, device)
    poison = min(poison, torch.finfo(layout.dtype).max)
    pool.payload.view(layout.dtype).fill_(poison)
    tables = np.array([[2, 7]], dtype=np.int32)
    token_ids, num_computed, rows = [11, 3, 8, 40, 22], 0, []
    for _ in range(num_new):
        new = token_ids[num_computed:]
        metadata = AttentionMetadata.for_step(
            tables, [num_computed], [len(new)], BLOCK_SIZE, device
        )
        positions = torch.arange(num_computed, len(token_ids), device=device)
        hidden = embedding[new] * (1 + positions).view(-1, 1, 1)
        hidden = hidden.to(layout.dtype)
        kv = hidden[:, :NUM_KV_HEADS]
        backend.write(pool, 0, kv, kv, metadata)
        attended = backend.attend(pool, 0, hidden, metadata, 0.1)
        rows.append(attended)
        logits = embedding.flatten(1).float() @ attended[-1].flatten().float()
        num_computed = len(token_ids)
        token_ids.append(int(logits.argmax()))
    return token_ids, torch.cat(rows)


def check(
    order: Order,
    dtype: torch.dtype,
    backend: AttentionBackend,
    device: torch.device = CPU,
) -> None:
    """Decode 10 tokens of a prompt of 5 over three kinds of old values: finite, and the same."""
    layout = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype, order)
    runs = [greedy(backend, layout, poison, 10, device) for poison in (float("nan"), 1e30, 0.0)]
    token_ids, attended = runs[0]
    assert len(token_ids) == 15
    assert attended.isfinite().all()
    for other_ids, other_attended in runs[1:]:
        assert other_ids == token_ids
        assert torch.equal(other_attended, attended)


def check_limit(limit: int, backend: AttentionBackend, device: torch.device = CPU) -> None:
    """Let one of two adjacent sequences grow to a limit while the other decodes as well."""
    generator = torch.Generator().manual_seed(limit)
    width = -(-limit // BLOCK_SIZE)
    pool = KVLayout(1, 1, BLOCK_SIZE, 32, torch.float32).allocate(2 * width, device)
    pool.payload.view(torch.float32).fill_(float("nan"))
    tables = torch.randperm(2 * width, generator=generator).view(2, width).int().numpy()
    assert tables.shape[1] == {1: 1, 15: 1, 17: 2, 100: 7}[limit]
    keys, values = torch.randn(2, 2, limit, 1, 32, generator=generator)
    # One is given its prompt and grows to the limit, while the one in the next row decodes too.
    num_steps = min(limit, 6)
    lengths = np.zeros(2, dtype=np.int64)
    for step in range(num_steps):
        grown = np.array([limit - num_steps + 1 + step, 1 + step])
        metadata = AttentionMetadata.for_step(tables, lengths, grown - lengths, BLOCK_SIZE, device)
        own = [slice(int(a), int(b)) for a, b in zip(lengths, grown, strict=True)]
        new_keys = torch.cat([keys[row, span] for row, span in enumerate(own)])
        new_values = torch.cat([values[row, span] for row, span in enumerate(own)])
        backend.write(pool, 0, new_keys.to(device), new_values.to(device), metadata)
        queries = torch.randn(len(new_keys), 3, 32, generator=generator)
        output = backend.attend(pool, 0, queries.to(device), metadata, 0.2).cpu()
        pieces = zip(queries.split((grown - lengths).tolist()), grown, strict=True)
        want = [
            dense_attention(
                query.double(),
                keys[row, :length].transpose(0, 1).double(),
                values[row, :length].transpose(0, 1).double(),
                0.2,
            )
            for row, (query, length) in enumerate(pieces)
        ]
        assert (output - torch.cat(want)).abs().max() < 1e-5
        lengths = grown
    assert lengths[0] == limit
