"""The worked example of paged attention: two sequences, one shared block, a pool of seven.

    logical     0 .. 3   4 .. 7   8 .. 11
    sequence A  block 5  block 1  block 6    10 tokens, the last block holds 2
    sequence B  block 5  block 3             7 tokens, the last block holds 3

The first four tokens are the same, so B finds block 5 under the key that A's first block was
sealed with. The pool hands out blocks in the order of its free list, which is seeded so that
these tables come out of it. Attention through the tables is then compared with attention over
contiguous copies of the same keys and values, in three memory layouts.

Run it with `python examples/paged_attention_reference.py`; it prints `name=value` lines.
"""

import dataclasses

import numpy as np
import torch

from rayserve_kernels.attention import ReferenceBackend
from rayserve_kernels.layout import KVLayout, KVPool, Order
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_kernels.reference import dense_attention
from rayserve_paged.core.accounting import Accounting, account
from rayserve_paged.core.block_identity import BlockScope, extend_chain
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.kv_manager import KVManager

BLOCK_SIZE = 4
NUM_Q_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5
FREE_ORDER = (5, 1, 6, 3, 0, 2, 4)
SCOPE = BlockScope(
    model_fingerprint=b"example",
    dtype="fp32",
    kv_dtype="fp32",
    numerics="eager",
    positions="none",
    block_size=BLOCK_SIZE,
)
ORDERS: tuple[Order, ...] = ("block_major", "hnd", "vectorised")


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Tokens, and what a model would make of them: [num_tokens, heads, head_dim] each."""

    token_ids: list[int]
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def make_sequences() -> tuple[Sequence, Sequence]:
    """Two sequences of 10 and 7 tokens whose first 4 are the same."""
    generator = torch.Generator().manual_seed(0)
    token_ids = [*range(100, 110)], [*range(100, 104), *range(200, 203)]
    shape = 300, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM
    # Equal tokens at equal positions have equal keys: that is what makes a block shareable.
    projected = torch.randn(shape, generator=generator)
    split = [NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    first, second = (Sequence(ids, *projected[ids].split(split, dim=1)) for ids in token_ids)
    return first, second


def run(sequence: Sequence, manager: KVManager, payload: KVPool) -> tuple[BlockTable, float]:
    """Compute one sequence through its block table, taking from the cache what is there.

    Returns:
        Its table, and the largest absolute difference to attention without paging.
    """
    num_tokens = len(sequence.token_ids)
    keys = extend_chain(SCOPE.root(), sequence.token_ids, BLOCK_SIZE)
    matched = manager.match(keys, num_tokens)
    table = manager.open(matched)
    if manager.grow(table, num_tokens) is None:
        raise SystemExit("the pool is too small")

    num_cached = len(matched) * BLOCK_SIZE
    metadata = AttentionMetadata.for_step(
        np.array([table.block_ids], dtype=np.int32),
        num_computed=[num_cached],
        num_new=[num_tokens - num_cached],
        block_size=BLOCK_SIZE,
    )
    backend = ReferenceBackend()
    new = slice(num_cached, num_tokens)
    backend.write(payload, 0, sequence.keys[new], sequence.values[new], metadata)
    paged = backend.attend(payload, 0, sequence.queries[new], metadata, SCALE)
    for block_id, key in zip(table.block_ids, keys, strict=False):
        manager.seal(block_id, key)

    dense = dense_attention(
        sequence.queries[new],
        sequence.keys.transpose(0, 1).contiguous(),
        sequence.values.transpose(0, 1).contiguous(),
        SCALE,
    )
    return table, float((paged - dense).abs().max())


def run_layout(order: Order) -> tuple[list[BlockTable], Accounting, float]:
    """Run both sequences in a pool of one layout: (tables, accounting, largest difference)."""
    pool = BlockPool(len(FREE_ORDER), free_order=FREE_ORDER)
    manager = KVManager(pool, BLOCK_SIZE)
    layout = KVLayout(1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.float32, order)
    payload = layout.allocate(pool.num_blocks)
    # Whatever is read and was not written shows.
    payload.payload.view(layout.dtype).fill_(float("nan"))
    sequences = make_sequences()
    tables, differences = zip(*(run(s, manager, payload) for s in sequences), strict=True)
    holders = [
        (table.block_ids, len(s.token_ids)) for table, s in zip(tables, sequences, strict=True)
    ]
    # torch's maximum, not Python's, which would lose a NaN.
    difference = float(torch.tensor(differences).max())
    return list(tables), account(holders, pool, BLOCK_SIZE), difference


def main() -> None:
    """Print the tables, the accounting and the differences."""
    results = {order: run_layout(order) for order in ORDERS}
    tables, accounting, _ = results["block_major"]
    width = max(len(table.block_ids) for table in tables)
    for name, table in zip("ab", tables, strict=True):
        # -1 pads the printed row; no table holds it.
        padding = [-1] * (width - len(table.block_ids))
        print(f"block_table_{name}={[*table.block_ids, *padding]}")
    print(f"unique_blocks={accounting.num_held_blocks}")
    print(f"allocated_slots={accounting.allocated_slots}")
    print(f"unique_live_tokens={accounting.unique_live_tokens}")
    print(f"internal_fragmentation_slots={accounting.internal_fragmentation_slots}")
    print(f"prefix_sharing_saved_slots={accounting.prefix_sharing_saved_slots}")
    for order, (_, _, difference) in results.items():
        print(f"max_attention_abs_diff_{order}={difference:g}")
    overall = float(torch.tensor([difference for _, _, difference in results.values()]).max())
    print(f"max_attention_abs_diff={overall:g}")


if __name__ == "__main__":
    main()
