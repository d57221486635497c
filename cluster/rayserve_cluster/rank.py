"""Starts one rank of a replica, and the replica itself on rank 0: the same in every shell."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed import Store

from rayserve_cluster.cache_size import (
    available_memory,
    choose_num_blocks,
    default_pool_bytes,
    max_useful_blocks,
)
from rayserve_cluster.executor import RankZeroExecutor
from rayserve_cluster.model_runner import FindSharedPrefixes, ModelRunner
from rayserve_cluster.step_loop import ReplicaHost
from rayserve_cluster.tp_group import TpGroup
from rayserve_kernels.attention import AttentionBackend, TorchBackend
from rayserve_kernels.layout import KVLayout
from rayserve_kernels.native_build import BuildError, available_widths
from rayserve_kernels.native_cpu import native_of_width, native_or_torch
from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.config import CpuAttention, DeploymentConfig, ModelConfig
from rayserve_paged.core.controller_messages import LoseReplica
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.event_log import LoggedStart, Record, ReplicaStart
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term
from rayserve_paged.core.replay import new_replica
from rayserve_paged.core.replica_messages import RegisterReplica, ReplicaReport
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.load_config import user_cache_dir
from rayserve_paged.model.build import TORCH_DTYPES, build_model
from rayserve_paged.model.grammar_compiler import grammar_vocabulary
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import deal_heads
from rayserve_paged.model.row_grammar import GrammarMatchers
from rayserve_paged.model.spec import ModelSpec
from rayserve_paged.model.tokenizer import load_tokenizer

_FIRST_TERM = Term(0)

_HEARTBEATS_PER_TIMEOUT = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """One rank, loaded and connected; followers then call `executor.follow(group, runner)`.

    Args:
        group: Its ends of the group, connected.
        runner: Its shard and its pool.
        limits: Of the replica, with the smallest rank's blocks.
        scope: Of the replica's KV.
    """

    group: TpGroup
    runner: ModelRunner
    limits: ModelLimits
    scope: BlockScope


def start_rank(
    config: DeploymentConfig,
    group: TpGroup,
    store: Store | None,
    name: str,
    *,
    num_ranks_here: int = 1,
) -> Rank:
    """Load this rank's shard, meet the other ranks, agree on a pool and allocate it. Blocks.

    Args:
        config: Of the deployment.
        group: This rank's, not yet connected.
        store: Where the ranks meet; None for a group of one.
        name: Of this meeting, fresh for each incarnation.
        num_ranks_here: Ranks that share this device's memory.

    Raises:
        InvalidInputError: The model, its width or the cache is not accepted.
        GroupBrokenError: The other ranks did not come, or the group was aborted.
    """
    device = group.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = resolve_model(config.model.model, user_cache_dir())
    max_model_len = _max_model_len(config, source.spec.max_model_len)
    backend = _backend(device, config.model.cpu_attention)
    model = build_model(source, config.model.dtype, group, backend, device, config.model.kv_dtype)
    layout = model.kv_layout(config.cache.block_size)
    windows = tuple(group.window for group in source.spec.layer_groups)
    available_bytes = available_memory(device) // num_ranks_here
    on_gpu = device.type == "cuda"
    if on_gpu:
        _check_gpu(device, config.model, layout)
    # Graphs of steps with collectives have not been tried on any GPU.
    with_graphs = on_gpu and group.world_size == 1
    num_blocks = choose_num_blocks(
        config.cache,
        block_bytes=layout.block_bytes,
        available_bytes=available_bytes - with_graphs * layout.block_bytes,
        default_bytes=default_pool_bytes(available_bytes, on_gpu=on_gpu),
        max_useful_blocks=max_useful_blocks(
            config.cache,
            windows,
            max_num_seqs=config.batch.max_num_seqs,
            max_model_len=max_model_len,
        ),
    )
    if store is not None:
        group.connect(store, name, config.timeouts.start_timeout_s)
    _check_agreement(group, backend.numerics)
    num_blocks = group.smallest(num_blocks)
    spec = source.spec

    def load_vocabulary() -> list[bytes]:
        return grammar_vocabulary(load_tokenizer(source), spec.vocab_size, spec.eos_token_ids)

    runner = ModelRunner(
        model,
        # Graphs have a block for padding, which the replica does not know of.
        layout.allocate(num_blocks + with_graphs, device),
        max_num_seqs=config.batch.max_num_seqs,
        max_model_len=max_model_len,
        matchers=GrammarMatchers(load_vocabulary, spec.eos_token_ids) if group.rank == 0 else None,
        find_shared_prefixes=_find_shared_prefixes(config, source.spec, group, backend, layout),
        with_graphs=with_graphs,
    )
    limits = ModelLimits(
        vocab_size=source.spec.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        eos_token_ids=source.spec.eos_token_ids,
        max_num_seqs=config.batch.max_num_seqs,
        adapters=source.spec.adapters,
        takes_attachments=source.spec.takes_attachments,
        layer_groups=windows,
        max_pinned_blocks=int(num_blocks * config.cache.max_pinned_share),
    )
    return Rank(group, runner, limits, _scope(config, source.spec, layout, backend))


def host_replica(
    config: DeploymentConfig,
    rank: Rank,
    replica_id: ReplicaId,
    incarnation: Incarnation,
    on_report: Callable[[ReplicaReport | RegisterReplica | LoseReplica], object],
    record: Record | None = None,
    term: Term = _FIRST_TERM,
) -> ReplicaHost:
    """Put a replica's state machine into its step loop, on rank 0; the caller starts the loop.

    Args:
        config: Of the deployment.
        rank: Rank 0.
        replica_id: The replica.
        incarnation: Its life.
        on_report: As `ReplicaHost`.
        record: As `ReplicaHost`; called first with what the replica is made of.
        term: Of the controller that starts it.
    """
    start = ReplicaStart(
        replica_id=replica_id,
        incarnation=incarnation,
        limits=rank.limits,
        scope=rank.scope,
        batch=config.batch,
        timeouts=config.timeouts,
        partial_reuse=config.cache.partial_reuse,
        term=term,
    )
    if record is not None:
        record(LoggedStart(replica_id, start))
    return ReplicaHost(
        new_replica(start),
        RankZeroExecutor(rank.group, rank.runner),
        on_report,
        heartbeat_s=rank.group.timeout_s / _HEARTBEATS_PER_TIMEOUT,
        record=record,
    )


def _backend(device: torch.device, cpu_attention: CpuAttention | None) -> AttentionBackend:
    if device.type != "cpu":
        # Here, so that a CPU does without Triton.
        from rayserve_kernels.gpu.backend import TritonBackend

        return TritonBackend.for_device(device)
    if cpu_attention == "torch":
        return TorchBackend()
    if cpu_attention is None:
        return native_or_torch(user_cache_dir())
    widths = available_widths()
    if cpu_attention not in widths:
        accepted = f"torch, or what this processor has: {', '.join(widths)}"
        raise InvalidInputError("model.cpu_attention", cpu_attention, accepted)
    try:
        return native_of_width(user_cache_dir(), cpu_attention)
    except (BuildError, OSError) as error:
        accepted = f"torch where it cannot be built ({error})"
        raise InvalidInputError("model.cpu_attention", cpu_attention, accepted) from error


def _find_shared_prefixes(
    config: DeploymentConfig,
    spec: ModelSpec,
    group: TpGroup,
    backend: AttentionBackend,
    layout: KVLayout,
) -> FindSharedPrefixes | None:
    if group.device.type == "cpu" or not (layout.dtype.is_floating_point or layout.scaled):
        return None
    from rayserve_kernels.gpu.backend import TritonBackend

    assert isinstance(backend, TritonBackend)
    shares = deal_heads(spec.num_heads, spec.num_kv_heads, group.world_size)
    return partial(
        backend.find_shared_prefixes,
        layout,
        len(shares[group.rank].query_heads),
        TORCH_DTYPES[config.model.dtype],
        device=group.device,
    )


def _check_gpu(device: torch.device, model: ModelConfig, layout: KVLayout) -> None:
    """Refuse a cache that the kernels of a GPU do not read, before the first step does."""
    from rayserve_kernels.gpu.configs import LaunchTable, check_support, gpu_family, width_of

    if not (layout.scaled or layout.dtype.is_floating_point):
        return
    gpu = gpu_family(device)
    try:
        check_support(gpu, layout.dtype)
        width = width_of(TORCH_DTYPES[model.dtype], layout.dtype)
    except ValueError as error:
        raise InvalidInputError("model.kv_dtype", layout.coding, str(error)) from error
    try:
        LaunchTable.read().look_up(gpu, layout.head_dim, width, "decode")
    except ValueError as error:
        raise InvalidInputError("model.model", model.model, str(error)) from error


def _check_agreement(group: TpGroup, numerics: str) -> None:
    """One scope speaks for the blocks of all ranks, so all must compute alike."""
    digest = zlib.crc32(numerics.encode())
    bounds = group.smallest(digest), -group.smallest(-digest)
    if bounds != (digest, digest):
        if group.device.type == "cuda":
            accepted = f"GPUs of one family in a replica (this rank's computes by {numerics})"
            raise InvalidInputError("parallel", "GPUs that differ", accepted)
        accepted = f"one that every rank of the replica has (this one computes by {numerics})"
        raise InvalidInputError("model.cpu_attention", None, accepted)


def _scope(
    config: DeploymentConfig, spec: ModelSpec, layout: KVLayout, backend: AttentionBackend
) -> BlockScope:
    return BlockScope(
        model_fingerprint=spec.fingerprint,
        dtype=config.model.dtype,
        kv_dtype=layout.coding,
        numerics=backend.numerics,
        # Rotary parameters are part of the model's fingerprint, and so are its layers' windows;
        # that of a request is part of its own scope.
        positions="from 0, kept behind a window",
        block_size=layout.block_size,
    )


def _max_model_len(config: DeploymentConfig, most: int) -> int:
    asked = config.model.max_model_len
    if asked is None:
        return most
    if asked > most:
        raise InvalidInputError("model.max_model_len", asked, f"at most {most}, the model's own")
    return asked
