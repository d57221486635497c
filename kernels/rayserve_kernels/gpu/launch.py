"""Launch the attention kernels for one layer of one step; nothing here waits for the device."""

import math
from typing import NamedTuple

import torch

from rayserve_kernels.gpu.cascade import attend_shared
from rayserve_kernels.gpu.configs import DECODE_QUERIES, LaunchConfig, LaunchTable, Width, width_of
from rayserve_kernels.gpu.paged_attention import decode, join_splits, prefill
from rayserve_kernels.gpu.prefix_groups import SharedPrefixes
from rayserve_kernels.gpu.tile import BatchArgs, PoolArgs, QueryArgs
from rayserve_kernels.layout import KVPool
from rayserve_kernels.metadata import AttentionMetadata


class LayerView(NamedTuple):
    """One layer of a pool: the views that `KVPool` gives, of any strides whose innermost is 1."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None

    @classmethod
    def of(cls, pool: KVPool, layer: int) -> "LayerView":
        """View a layer. Raises ValueError for one that does not exist."""
        return cls(
            pool.key_view(layer),
            pool.value_view(layer),
            pool.key_scale_view(layer),
            pool.value_scale_view(layer),
        )


class Shape(NamedTuple):
    """What the kernels are compiled for; see `paged_attention.decode`."""

    HEAD_DIM: int
    PADDED_DIM: int
    PART_DIM: int
    BLOCK_SIZE: int
    GROUP_SIZE: int
    PRECISION: str


class StepSize(NamedTuple):
    """Bounds by which grids are sized: what the host knows of a step, or what it can be at most.

    most_queries: Of a sequence that is decoded. has_prefill: Whether there may be others.
    """

    most_queries: int
    has_prefill: bool
    max_seq_len: int

    @classmethod
    def of(cls, metadata: AttentionMetadata, block_size: int) -> "StepSize":
        """Bound a step by what its metadata knows without asking the device."""
        most = metadata.block_tables.shape[1] * block_size
        max_seq_len = most if metadata.max_seq_len is None else metadata.max_seq_len
        if metadata.query_lens is None:
            num_tokens = metadata.num_tokens
            return cls(min(num_tokens, DECODE_QUERIES), num_tokens > DECODE_QUERIES, max_seq_len)
        is_decode = metadata.query_lens <= DECODE_QUERIES
        most_queries = int(metadata.query_lens[is_decode].max(initial=0))
        return cls(most_queries, not bool(is_decode.all()), max_seq_len)


def decode_config(
    table: LaunchTable, gpu: str, head_dim: int, width: Width, group_size: int
) -> LaunchConfig:
    """Look up how decodes are launched, whose split length callers need as well."""
    config = table.look_up(gpu, head_dim, width, "decode")
    if group_size <= config.block_m:
        return config
    return table.look_up(gpu, head_dim, width, "decode_wide")


def attend_layer(
    layer: LayerView,
    queries: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    gpu: str,
    table: LaunchTable,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from a step's queries over one layer.

    Args:
        layer: Read only.
        queries: [num_tokens, num_q_heads, head_dim], fp32, fp16 or bf16, innermost stride 1.
        metadata: Of this step.
        scale: Factor on the scores before the softmax.
        gpu: Family of the device, as the table names it.
        table: Launch configurations.
        soft_cap: As `AttentionBackend.attend`.
        alibi_slopes: As `AttentionBackend.attend`.

    Returns:
        [num_tokens, num_q_heads, head_dim], the queries' dtype. Rows past the last sequence's,
        which padding makes, hold anything.

    Raises:
        ValueError: Dtypes or a head_dim that no configuration is for, or prefixes that were found
            for another one.
    """
    outputs = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if not outputs.numel() or not metadata.seq_lens.numel():
        return outputs
    shape = _shape(layer, queries, gpu)
    width = width_of(queries.dtype, layer.keys.dtype)
    step = _Step(
        outputs,
        _query_args(queries, scale, soft_cap, alibi_slopes),
        _batch_args(metadata),
        _pool_args(layer),
        shape,
        StepSize.of(metadata, shape.BLOCK_SIZE),
        layer.values.shape[1],
    )
    if step.size.most_queries:
        config = decode_config(table, gpu, shape.HEAD_DIM, width, shape.GROUP_SIZE)
        shared_config = table.look_up(gpu, shape.HEAD_DIM, width, "shared")
        _decode(step, config, metadata.shared_prefixes, shared_config)
    if step.size.has_prefill:
        _prefill(step, table.look_up(gpu, shape.HEAD_DIM, width, "prefill"))
    return outputs


class _Step(NamedTuple):
    """What every launch of a step needs."""

    outputs: torch.Tensor
    inputs: QueryArgs
    batch: BatchArgs
    pool: PoolArgs
    shape: Shape
    size: StepSize
    num_kv_heads: int

    @property
    def num_seqs(self) -> int:
        return self.batch.seq_lens.numel()

    @property
    def table_width(self) -> int:
        return self.batch.block_tables.shape[1]

    def options(self, config: LaunchConfig) -> dict[str, int | str]:
        """What the kernels are compiled for, and with what."""
        return {
            **self.shape._asdict(),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def _prefill(step: _Step, config: LaunchConfig) -> None:
    """Attend from the sequences of many queries."""
    num_tokens, num_q_heads, _ = step.outputs.shape
    num_tiles = num_tokens * step.shape.GROUP_SIZE // config.block_m + step.num_seqs
    prefill[(num_tiles, step.num_kv_heads)](
        step.outputs,
        step.inputs,
        step.batch,
        step.pool,
        step.table_width,
        step.num_seqs,
        DECODE_QUERIES,
        num_q_heads,
        **step.options(config),
    )


def _decode(
    step: _Step,
    config: LaunchConfig,
    shared: SharedPrefixes | None,
    shared_config: LaunchConfig,
) -> None:
    """Attend from the sequences of few queries, and once for all to the prefixes they share."""
    split_tokens = config.split_tokens
    assert split_tokens is not None
    most_queries, num_q_heads = step.size.most_queries, step.outputs.shape[1]
    num_splits = max(1, -(-step.size.max_seq_len // split_tokens))
    partials, log_sums = step.outputs, None
    if num_splits > 1:
        entries = (step.num_seqs, most_queries, num_q_heads, num_splits)
        log_sums = partials.new_empty(entries, dtype=torch.float32)
        partials = log_sums.new_empty((*entries, step.shape.HEAD_DIM))
    num_tiles = -(-most_queries * step.shape.GROUP_SIZE // config.block_m)
    decode[(step.num_seqs * num_tiles, step.num_kv_heads, num_splits)](
        partials,
        log_sums,
        None if shared is None else shared.first_split,
        step.inputs,
        step.batch,
        step.pool,
        step.table_width,
        num_tiles,
        most_queries,
        num_q_heads,
        **step.options(config),
        SPLIT_TOKENS=split_tokens,
        IS_WHOLE=log_sums is None,
    )
    if log_sums is None:
        return
    if shared is not None:
        _attend_shared(step, shared_config, shared, split_tokens, partials, log_sums)
    join_splits[(step.num_seqs * most_queries, num_q_heads)](
        step.outputs,
        partials,
        log_sums,
        step.batch.query_start,
        step.batch.seq_lens,
        most_queries,
        num_splits,
        HEAD_DIM=step.shape.HEAD_DIM,
        PADDED_DIM=step.shape.PADDED_DIM,
        SPLIT_TOKENS=split_tokens,
        num_warps=1,
    )


def _attend_shared(
    step: _Step,
    config: LaunchConfig,
    shared: SharedPrefixes,
    split_tokens: int,
    partials: torch.Tensor,
    log_sums: torch.Tensor,
) -> None:
    """Attend from the members of each group to what they share."""
    if shared.split_tokens != split_tokens or split_tokens % config.block_n:
        raise ValueError(
            f"shared_prefixes have split_tokens={shared.split_tokens}: expected {split_tokens}, "
            f"a multiple of {config.block_n}"
        )
    num_groups = shared.group_splits.numel()
    num_rows = shared.query_seq.numel() * step.shape.GROUP_SIZE
    num_tiles = num_rows // config.block_m + num_groups
    attend_shared[(num_tiles, step.num_kv_heads, shared.max_splits)](
        partials,
        log_sums,
        shared.group_start,
        shared.group_splits,
        shared.query_seq,
        shared.query_index,
        step.inputs,
        step.batch,
        step.pool,
        step.table_width,
        num_groups,
        step.size.most_queries,
        step.outputs.shape[1],
        log_sums.shape[-1],
        **step.options(config),
        SPLIT_TOKENS=split_tokens,
    )


def _shape(layer: LayerView, queries: torch.Tensor, gpu: str) -> Shape:
    _, num_kv_heads, block_size, head_dim = layer.values.shape
    return Shape(
        HEAD_DIM=head_dim,
        # A product of matrices takes 16 columns at least.
        PADDED_DIM=max(16, 1 << (head_dim - 1).bit_length()),
        PART_DIM=layer.keys.shape[-1],
        BLOCK_SIZE=block_size,
        GROUP_SIZE=queries.shape[1] // num_kv_heads,
        # NVIDIA's tensor cores reach the precision of fp32 in three products of TF32, if there are
        # registers for both halves of a query.
        PRECISION="tf32x3" if gpu.startswith("sm") and head_dim <= 128 else "ieee",
    )


def _query_args(
    queries: torch.Tensor, scale: float, soft_cap: float | None, slopes: torch.Tensor | None
) -> QueryArgs:
    log2_e = math.log2(math.e)
    factor = scale * log2_e if soft_cap is None else scale / soft_cap
    cap = None if soft_cap is None else soft_cap * log2_e
    token, head, _ = queries.stride()
    return QueryArgs(queries, token, head, factor, cap, slopes)


def _batch_args(metadata: AttentionMetadata) -> BatchArgs:
    return BatchArgs(
        metadata.query_start,
        metadata.seq_lens,
        metadata.block_tables,
        metadata.windows,
        metadata.num_sinks,
    )


def _pool_args(layer: LayerView) -> PoolArgs:
    keys, values, key_scales, value_scales = layer
    scale_block, scale_head, scale_slot = (0, 0, 0) if key_scales is None else key_scales.stride()
    return PoolArgs(
        key_cache=keys,
        value_cache=values,
        key_scales=key_scales,
        value_scales=value_scales,
        key_block=keys.stride(0),
        key_head=keys.stride(1),
        key_slot=keys.stride(2),
        key_part=keys.stride(3) if keys.dim() == 5 else 0,
        value_block=values.stride(0),
        value_head=values.stride(1),
        value_slot=values.stride(2),
        scale_block=scale_block,
        scale_head=scale_head,
        scale_slot=scale_slot,
    )
