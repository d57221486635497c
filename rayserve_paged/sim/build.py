"""Describes a simulated cluster by names: a GPU type, a model shape, a profile."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from rayserve_paged.core.config import BatchConfig, PlacementPolicy, TimeoutConfig
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.cost_model import CostModel, RooflineCost
from rayserve_paged.sim.hardware import (
    GPUS,
    GPUS_PER_NODE,
    MODEL_SHAPES,
    ModelShape,
    num_blocks_that_fit,
)
from rayserve_paged.sim.network import NetworkSpec
from rayserve_paged.sim.profile import Profile, read_profile
from rayserve_paged.sim.profiled_cost import ProfiledCost

_T = TypeVar("_T")
_TIMEOUTS = TimeoutConfig()


def describe_cluster(
    *,
    num_replicas: int,
    gpu: str,
    tensor_parallel_size: int,
    model_shape: str | ModelShape,
    block_size: int,
    batch: BatchConfig,
    num_blocks: int | None = None,
    profile: Path | None = None,
    num_consumers: int = 1,
    placement: PlacementPolicy = "prefix-aware",
    timeouts: TimeoutConfig = _TIMEOUTS,
) -> ClusterSpec:
    """Return what a cluster of these consists of.

    Args:
        num_replicas: Replicas.
        gpu: One of `GPUS`.
        tensor_parallel_size: Ranks of a replica.
        model_shape: A name of `MODEL_SHAPES`, or another model's sizes.
        block_size: Slots per block.
        batch: Bounds on a step.
        num_blocks: Of each replica; None for what the GPU's memory holds.
        profile: Measured steps and messages; as many replicas as were measured at once share a
            machine. None for the roofline of the GPU and the shape.
        num_consumers: Processes that submit requests and read the streams.
        placement: How the replica of a request is chosen.
        timeouts: Leases.

    Raises:
        InvalidInputError: A name that is not known, a model that does not fit, a bad profile.
    """
    chosen = _named("gpu", gpu, GPUS)
    shape = model_shape
    if isinstance(shape, str):
        shape = _named("model_shape", shape, MODEL_SHAPES)
    if block_size < 1:
        raise InvalidInputError("block_size", block_size, "at least 1 slot")
    if num_blocks is not None and num_blocks < 1:
        raise InvalidInputError("num_blocks", num_blocks, "at least 1 block, or none for what fits")
    cost: CostModel = RooflineCost(
        gpu=chosen, shape=shape, tensor_parallel_size=tensor_parallel_size
    )
    network, ranks_per_node = NetworkSpec(), GPUS_PER_NODE
    step_ratios: tuple[float, ...] = ()
    if profile is not None:
        measured = read_profile(profile)
        cost = ProfiledCost(measured)
        network = network_of(measured)
        step_ratios = step_ratios_of(measured)
        ranks_per_node = ranks_per_machine(measured, tensor_parallel_size)
    if num_blocks is None:
        num_blocks = num_blocks_that_fit(chosen, shape, tensor_parallel_size, block_size)
    limits = ModelLimits(
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=(),
        max_num_seqs=batch.max_num_seqs,
    )
    return ClusterSpec(
        num_replicas=num_replicas,
        limits=limits,
        cost=cost,
        batch=batch,
        tensor_parallel_size=tensor_parallel_size,
        ranks_per_node=ranks_per_node,
        network=network,
        num_consumers=num_consumers,
        placement=placement,
        timeouts=timeouts,
        step_ratios=step_ratios,
    )


def network_of(profile: Profile) -> NetworkSpec:
    """Return a network whose messages take what a profile's did, on the way from a consumer through
    the controller to a replica and back; the default one where it has none.
    """
    default = NetworkSpec()
    messages = profile.messages
    if messages is None:
        return default
    # The way has three hops, which are alike in the network.
    latency_s = (messages.submit_s + messages.assign_s + messages.deliver_s) / 3
    return dataclasses.replace(
        default, between_nodes=dataclasses.replace(default.between_nodes, latency_s=latency_s)
    )


def step_ratios_of(profile: Profile) -> tuple[float, ...]:
    """Return how unevenly a profile's steps were served; empty where that was not measured."""
    return () if profile.served is None else tuple(profile.served.ratios)


def ranks_per_machine(profile: Profile, tensor_parallel_size: int) -> int:
    """Return the ranks that share a machine: as many replicas as ran at once where that was
    measured, else those that fit a node of GPUs.

    Raises:
        InvalidInputError: The profile is of another width.
    """
    if profile.tensor_parallel_size != tensor_parallel_size:
        accepted = f"{profile.tensor_parallel_size}, the width that was measured"
        raise InvalidInputError("tensor_parallel_size", tensor_parallel_size, accepted)
    num_replicas = profile.tables[-1].num_active
    return GPUS_PER_NODE if num_replicas == 1 else num_replicas * tensor_parallel_size


def _named(field: str, name: str, known: Mapping[str, _T]) -> _T:
    if name not in known:
        raise InvalidInputError(field, name, ", ".join(known))
    return known[name]
