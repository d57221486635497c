"""A step to measure: sequences scattered over a pool, and the same keys and values contiguous."""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from rayserve_kernels.cache_write import write_kv
from rayserve_kernels.gpu_bench.traffic import Case, traffic_of
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_kernels.metadata import AttentionMetadata

_MIN_POOL_BYTES = 256 << 20
_FEWEST_LAYERS, _MOST_LAYERS = 2, 64


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step over a pool that random keys and values fill.

    Args:
        case: What the step is of.
        pool: All sequences, in blocks at random.
        tables: int32 [batch_size, blocks of a sequence].
        metadata: Of the step.
        in_order: The same with tables that name the pool's blocks in their order, so that each
            sequence is one contiguous run of other sequences' blocks.
        queries: [batch_size * num_queries, num_q_heads, head_dim].
        contiguous: [num_layers, 2, batch_size, num_kv_heads, num_tokens, head_dim], the queries'
            dtype: what the pool was filled from.
    """

    case: Case
    pool: KVPool
    tables: npt.NDArray[np.int32]
    metadata: AttentionMetadata
    in_order: AttentionMetadata
    queries: torch.Tensor
    contiguous: torch.Tensor

    @classmethod
    def build(cls, case: Case, device: torch.device, num_layers: int | None = None) -> "Step":
        """Make a step, the same one each time.

        Args:
            case: What it is to be of. A shared prefix is of whole blocks.
            device: Of all tensors.
            num_layers: Of the pool; None for as many as hold more than caches do.
        """
        if num_layers is None:
            fitting = -(-_MIN_POOL_BYTES // traffic_of(case).keys_values)
            num_layers = min(max(fitting, _FEWEST_LAYERS), _MOST_LAYERS)
        generator = torch.Generator(device).manual_seed(1)
        sizes = (case.batch_size, case.num_kv_heads, case.num_tokens, case.head_dim)
        contiguous = torch.empty(num_layers, 2, *sizes, dtype=case.queries, device=device)
        contiguous.normal_(generator=generator)
        shared = contiguous[..., : case.shared_tokens, :]
        shared.copy_(shared[:, :, :1].clone().expand(shared.shape))
        queries = torch.empty(
            (case.batch_size * case.num_queries, case.num_q_heads, case.head_dim),
            dtype=case.queries,
            device=device,
        ).normal_(generator=generator)
        tables, num_blocks = _tables(case)
        ordered = np.arange(tables.size, dtype=np.int32).reshape(tables.shape) % num_blocks
        layout = KVLayout(
            num_layers,
            case.num_kv_heads,
            case.block_size,
            case.head_dim,
            case.slots,
            case.order,
            scaled=case.is_scaled,
        )
        pool = layout.allocate(num_blocks, device)
        _fill(pool, contiguous, tables)
        return cls(
            case,
            pool,
            tables,
            _metadata(case, tables, device),
            _metadata(case, ordered, device),
            queries,
            contiguous,
        )

    @property
    def num_layers(self) -> int:
        """Of the pool."""
        return self.pool.layout.num_layers

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.case.head_dim**-0.5)


def _tables(case: Case) -> tuple[npt.NDArray[np.int32], int]:
    """Tables of blocks at random, and the number of blocks."""
    width = -(-case.num_tokens // case.block_size)
    shared, rest = divmod(case.shared_tokens, case.block_size)
    if rest:
        raise ValueError(
            f"shared_tokens={case.shared_tokens}: expected a multiple of {case.block_size}"
        )
    num_blocks = shared + case.batch_size * (width - shared)
    order = np.random.default_rng(2).permutation(num_blocks).astype(np.int32)
    own = order[shared:].reshape(case.batch_size, width - shared)
    prefix = np.broadcast_to(order[:shared], (case.batch_size, shared))
    return np.ascontiguousarray(np.concatenate([prefix, own], axis=1)), num_blocks


def _metadata(case: Case, tables: npt.NDArray[np.int32], device: torch.device) -> AttentionMetadata:
    computed = [case.num_tokens - case.num_queries] * case.batch_size
    new = [case.num_queries] * case.batch_size
    return AttentionMetadata.for_step(tables, computed, new, case.block_size, device)


def _fill(pool: KVPool, contiguous: torch.Tensor, tables: npt.NDArray[np.int32]) -> None:
    """Write sequence by sequence: coding takes several times the memory of what is coded."""
    block_size, num_tokens = pool.layout.block_size, contiguous.shape[-2]
    positions = torch.arange(num_tokens, device=pool.device)
    for row, table in enumerate(torch.tensor(tables, dtype=torch.int64, device=pool.device)):
        slots = table[positions // block_size] * block_size + positions % block_size
        for layer in range(pool.layout.num_layers):
            keys, values = contiguous[layer, :, row].transpose(1, 2)
            write_kv(pool, layer, keys, values, slots)
