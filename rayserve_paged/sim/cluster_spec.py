"""What a simulated cluster consists of."""

import dataclasses
import math

from rayserve_paged.core.config import (
    BatchConfig,
    PlacementPolicy,
    RecoveryConfig,
    TimeoutConfig,
)
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.sim.cost_model import CostModel
from rayserve_paged.sim.network import NetworkSpec

_TIMEOUTS = TimeoutConfig()
_NETWORK = NetworkSpec()
_RECOVERY = RecoveryConfig()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What a simulated cluster consists of.

    Args:
        num_replicas: Replicas; they are named r0, r1, ...
        limits: What each replica can hold.
        cost: How long a replica's steps take.
        batch: Bounds on a step. A run of decode steps that nothing interrupts is one event up to
            `max_decode_steps`; what comes of it is the same.
        tensor_parallel_size: Ranks of a replica. Replicas fill the nodes one after the other, and
            one that is wider than a node takes whole ones.
        ranks_per_node: GPUs of a node.
        placement: How the replica of a request is chosen.
        timeouts: Leases.
        network: How fast messages travel.
        num_consumers: Processes that submit requests in turn and read the streams, each on a node
            of its own. A replica answers each of them on its own, so more take longer to simulate.
        load_interval_s: How often the state of the replicas is taken down.
        recovery: What is done about replicas that die, and requests that lose theirs.
        start_s: How long a replica takes to start again: processes, then loading of weights.
        step_ratios: Of the time that steps take to what `cost` says; one of them is drawn for each
            step. Empty where they take just that.
        partial_reuse: Whether leading slots of cached blocks are reused by copy.
        notice_s: After which the controller notices that a process is gone; one that hangs it
            notices after `timeouts.rank_liveness_s`.

    Raises:
        InvalidInputError: A number below 1, or no interval.
    """

    num_replicas: int
    limits: ModelLimits
    cost: CostModel
    batch: BatchConfig
    tensor_parallel_size: int = 1
    ranks_per_node: int = 8
    placement: PlacementPolicy = "prefix-aware"
    timeouts: TimeoutConfig = _TIMEOUTS
    network: NetworkSpec = _NETWORK
    num_consumers: int = 1
    load_interval_s: float = 1.0
    recovery: RecoveryConfig = _RECOVERY
    start_s: float = 30.0
    notice_s: float = 0.5
    partial_reuse: bool = False
    step_ratios: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        for field in ("num_replicas", "tensor_parallel_size", "ranks_per_node", "num_consumers"):
            if getattr(self, field) < 1:
                raise InvalidInputError(field, getattr(self, field), "at least 1")
        if not 0 < self.load_interval_s < math.inf:
            accepted = "a number of seconds above 0"
            raise InvalidInputError("load_interval_s", self.load_interval_s, accepted)
        if self.limits.max_num_seqs != self.batch.max_num_seqs:
            accepted = f"batch.max_num_seqs={self.batch.max_num_seqs}"
            raise InvalidInputError("limits.max_num_seqs", self.limits.max_num_seqs, accepted)
