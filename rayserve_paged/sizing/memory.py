"""What a replica's memory holds: weights, the KV pool, sequences."""

from __future__ import annotations

import dataclasses

from rayserve_cluster.cache_size import choose_num_blocks, default_pool_bytes, max_useful_blocks
from rayserve_kernels.layout import SCALED_DTYPES, KVLayout
from rayserve_paged.core.attention_window import ONE_FULL_GROUP, num_blocks_held
from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.model.build import TORCH_DTYPES
from rayserve_paged.model.parallel import deal, deal_heads, working_widths
from rayserve_paged.sim.hardware import GPUS_PER_NODE, GpuSpec, ModelShape

_WEIGHT_DTYPES = ("bf16", "fp16")


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the memory of one replica holds, by the rank that holds most.

    Args:
        shape: The model; its KV vectors are those of the cache's dtype.
        gpu: Of each rank.
        layout: Of the rank's blocks.
        num_ranks: Tensor parallelism.
        rank_weight_bytes: Weights on the rank.
        available_bytes: What the weights leave free on it.
        replica_kv_bytes_per_token: KV of one token on all ranks together; a KV head that two ranks
            hold counts twice.
        limits: Of the replica.
    """

    shape: ModelShape
    gpu: GpuSpec
    layout: KVLayout
    num_ranks: int
    rank_weight_bytes: int
    available_bytes: int
    replica_kv_bytes_per_token: float
    limits: ModelLimits

    @property
    def pool_bytes(self) -> int:
        """Bytes of the rank's KV pool."""
        return self.limits.num_blocks * self.layout.block_bytes

    @property
    def rank_kv_bytes_per_token(self) -> float:
        """KV of one token on the rank; a share of its block's, padding included."""
        return self.layout.block_bytes / self.layout.block_size

    def num_that_fit(self, num_tokens: int) -> int:
        """Return how many sequences of this length the pool holds at once, whatever runs."""
        limits = self.limits
        each = num_blocks_held(limits.layer_groups, num_tokens, limits.block_size)
        return limits.num_usable_blocks // each

    def num_at_once(self, num_tokens: int) -> int:
        """Return how many sequences of this length run at once: what fits, and has a row."""
        return min(self.num_that_fit(num_tokens), self.limits.max_num_seqs)


def plan_memory(
    shape: ModelShape, gpu: GpuSpec, config: DeploymentConfig, longest: int
) -> MemoryPlan:
    """Return what a replica's memory holds, by the rules that a rank sizes its pool with.

    The memory of the GPU is its data sheet's in decimal units. A driver tells some percent more,
    which the context of CUDA takes.

    Args:
        shape: The model, in 16 bits.
        gpu: Of each rank.
        config: Of the deployment.
        longest: Tokens of the longest request that has to fit.

    Raises:
        InvalidInputError: The model does not fit, at this width or at any; a width, dtype or size
            of the pool that is not accepted; a request that is too long.
    """
    model, width = config.model, config.parallel.tensor_parallel_size
    if model.dtype not in _WEIGHT_DTYPES:
        accepted = f"{' or '.join(_WEIGHT_DTYPES)}: the GPUs' rates are those of 16 bits"
        raise InvalidInputError("model.dtype", model.dtype, accepted)
    deal_heads(shape.num_heads, shape.num_kv_heads, width)
    if width > GPUS_PER_NODE:
        accepted = f"at most {GPUS_PER_NODE}: the ranks of a replica share a node"
        raise InvalidInputError("parallel.tensor_parallel_size", width, accepted)
    shape = _with_kv_dtype(shape, _layout(shape, config, width))
    served = min(shape.max_model_len, model.max_model_len or shape.max_model_len)
    if longest > served:
        accepted = f"at most {served} tokens of prompt and output, as {shape.name} has"
        raise InvalidInputError("longest request", longest, accepted)
    if not _fits(shape, gpu, config, width, longest):
        raise _does_not_fit(shape, gpu, config, longest)
    return _plan(shape, gpu, config, width)


def rank_weight_bytes(shape: ModelShape, num_ranks: int) -> int:
    """Return the bytes of all matrices on the rank that holds most of them.

    Args:
        shape: The model.
        num_ranks: A width at which its heads can be dealt.
    """
    heads = deal_heads(shape.num_heads, shape.num_kv_heads, num_ranks)
    columns = deal(shape.intermediate_size, num_ranks)
    rows = deal(shape.vocab_size, num_ranks)
    num_vocabulary = 1 if shape.tied_embeddings else 2
    most = max(
        shape.num_layers
        * (
            2 * shape.head_dim * (len(share.query_heads) + len(share.kv_heads))
            + 3 * len(own_columns)
        )
        + num_vocabulary * len(own_rows)
        for share, own_columns, own_rows in zip(heads, columns, rows, strict=True)
    )
    return most * shape.hidden_size * shape.dtype_bytes


def _layout(shape: ModelShape, config: DeploymentConfig, num_ranks: int) -> KVLayout:
    dtype = TORCH_DTYPES[config.model.kv_dtype or config.model.dtype]
    shares = deal_heads(shape.num_heads, shape.num_kv_heads, num_ranks)
    return KVLayout(
        num_layers=shape.num_layers,
        num_kv_heads=max(len(share.kv_heads) for share in shares),
        block_size=config.cache.block_size,
        head_dim=shape.head_dim,
        dtype=dtype,
        scaled=dtype in SCALED_DTYPES,
    )


def _with_kv_dtype(shape: ModelShape, layout: KVLayout) -> ModelShape:
    vectors = layout.num_kv_heads * layout.block_size
    return dataclasses.replace(shape, kv_vector_bytes=-(-layout.run_bytes // vectors))


def _available_bytes(shape: ModelShape, gpu: GpuSpec, num_ranks: int) -> int:
    return gpu.memory_bytes - rank_weight_bytes(shape, num_ranks)


def _plan(shape: ModelShape, gpu: GpuSpec, config: DeploymentConfig, width: int) -> MemoryPlan:
    layout, available_bytes = (
        _layout(shape, config, width),
        _available_bytes(shape, gpu, width),
    )
    batch, cache = config.batch, config.cache
    max_model_len = config.model.max_model_len or shape.max_model_len
    num_blocks = choose_num_blocks(
        cache,
        block_bytes=layout.block_bytes,
        available_bytes=available_bytes,
        default_bytes=default_pool_bytes(available_bytes, on_gpu=True),
        max_useful_blocks=max_useful_blocks(
            cache, ONE_FULL_GROUP, max_num_seqs=batch.max_num_seqs, max_model_len=max_model_len
        ),
    )
    limits = ModelLimits(
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        eos_token_ids=(),
        max_num_seqs=batch.max_num_seqs,
        max_pinned_blocks=int(num_blocks * cache.max_pinned_share),
    )
    shares = deal_heads(shape.num_heads, shape.num_kv_heads, width)
    num_held_heads = sum(len(share.kv_heads) for share in shares)
    per_token = layout.block_bytes / layout.block_size / layout.num_kv_heads * num_held_heads
    return MemoryPlan(
        shape=shape,
        gpu=gpu,
        layout=layout,
        num_ranks=width,
        rank_weight_bytes=rank_weight_bytes(shape, width),
        available_bytes=available_bytes,
        replica_kv_bytes_per_token=per_token,
        limits=limits,
    )


def _fits(
    shape: ModelShape, gpu: GpuSpec, config: DeploymentConfig, width: int, longest: int
) -> bool:
    """Tell whether a pool of the default size holds the longest request.

    A size that the user asks for does not matter here, and is refused for itself.
    """
    default_bytes = default_pool_bytes(_available_bytes(shape, gpu, width), on_gpu=True)
    layout = _layout(shape, config, width)
    num_blocks = int(default_bytes // layout.block_bytes * (1 - config.cache.max_pinned_share))
    return num_blocks >= num_blocks_held(ONE_FULL_GROUP, longest, layout.block_size)


def _does_not_fit(
    shape: ModelShape, gpu: GpuSpec, config: DeploymentConfig, longest: int
) -> InvalidInputError:
    width = config.parallel.tensor_parallel_size
    widths = working_widths(shape.num_heads, shape.num_kv_heads)
    wider = (
        wide
        for wide in widths
        if width < wide <= GPUS_PER_NODE and _fits(shape, gpu, config, wide, longest)
    )
    has = f"{gpu.name} has {_gb(gpu.memory_bytes)}, and {shape.name}"
    needs = f"{_needs(shape, config, width, longest)} on each of {width}"
    smallest = next(wider, None)
    if smallest is None:
        most = max(wide for wide in widths if wide <= GPUS_PER_NODE)
        fits = f"a GPU with more memory or a smaller model: {has} needs {needs}"
        if most != width:
            fits += f", still {_needs(shape, config, most, longest)} on each of {most}"
        return InvalidInputError("gpu", gpu.name, fits)
    fits = f"{has} needs {needs}, {_needs(shape, config, smallest, longest)} on each of {smallest}"
    return InvalidInputError("parallel.tensor_parallel_size", width, f"at least {smallest}: {fits}")


def _needs(shape: ModelShape, config: DeploymentConfig, width: int, longest: int) -> str:
    layout = _layout(shape, config, width)
    kv_bytes = num_blocks_held(ONE_FULL_GROUP, longest, layout.block_size) * layout.block_bytes
    weights = _gb(rank_weight_bytes(shape, width))
    return f"{weights} for weights and {_gb(kv_bytes)} for the KV of {longest:,} tokens"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
