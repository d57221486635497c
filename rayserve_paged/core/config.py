"""The configuration of a deployment: frozen pydantic models, units in names."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    FiniteFloat,
    model_validator,
)

Dtype = Literal["fp32", "bf16", "fp16"]
KvDtype = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
CpuAttention = Literal["avx512_bf16", "avx512", "avx2", "portable", "torch"]
QueuePolicy = Literal[
    "fcfs", "priority", "weighted-fair", "shortest-remaining", "longest-prefix-first"
]

PlacementPolicy = Literal["round-robin", "least-loaded", "prefix-aware"]


def _from_json(value: object) -> object:
    """Read what comes as text, as from the environment."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"a JSON object of numbers by name ({error})") from error


_Weight = Annotated[FiniteFloat, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(_Section):
    """Which model, in which precision."""

    model: str = Field(min_length=1)
    """A Hugging Face directory, a GGUF file, `smollm2` or `fingerprint`."""
    dtype: Dtype = "fp32"
    """Of weights and activations."""
    kv_dtype: KvDtype | None = None
    """Of the KV cache; None for `dtype`. "int8" and "fp8" (e4m3) have a scale for each slot and KV
    head."""
    cpu_attention: CpuAttention | None = None
    """Instruction set of the native attention of ranks on CPUs, or "torch" to do without; None for
    the widest that the processor has. Blocks are shared, and replicas serve together, only where
    results agree bit for bit: name one that every node has where their processors differ."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Lower limit on prompt and output tokens than the model's own; None for the model's."""


class CacheConfig(_Section):
    """The block pool of each rank."""

    block_size: int = Field(default=16, ge=1, le=1024)
    num_blocks: int | None = Field(default=None, ge=1)
    """Blocks of each pool; None to derive them from `memory`."""
    memory: ByteSize | None = None
    """Bytes of KV cache per rank, such as "512MiB"; None for a default by device."""

    partial_reuse: bool = False
    """Copy the common slots of a cached block where a prompt diverges inside it, and keep the last,
    partly filled blocks of finished sequences for that."""

    max_pinned_share: float = Field(default=0.0, ge=0, le=0.9)
    """Share of each pool that pinned prefixes may hold. The longest request is that much shorter,
    so that it can run whatever is pinned."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.num_blocks is not None and self.memory is not None:
            raise ValueError("give num_blocks or memory, not both")
        return self


class BatchConfig(_Section):
    """Bounds on one step, and who is in it."""

    max_num_seqs: int = Field(default=64, ge=1, le=65536)
    """Sequences that run at once."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Token budget of one step; a longer prompt is computed in chunks."""
    pipeline_depth: int = Field(default=1, ge=1, le=2)
    """Steps in flight: at 2 the next is planned while one runs."""
    max_decode_steps: int = Field(default=1, ge=1, le=1024)
    """Steps that one plan may run where nothing can come in between."""
    max_prefix_wait_steps: int = Field(default=64, ge=0)
    """A request whose next prompt block a running one is computing waits for it, so many steps at
    most; 0 to compute it twice instead."""
    policy: QueuePolicy = "priority"
    """Which waiting request starts first; see docs/scheduling.md."""
    oldest_every: int | None = Field(default=None, ge=1)
    """One in so many starts is that of the request which has waited longest; None for the
    policy's own bound (`policy.OLDEST_EVERY`)."""
    max_num_waiting: int | None = Field(default=None, ge=0)
    """Sequences that a replica may have been given beyond `max_num_seqs`; a further request is
    refused. None for no limit."""
    max_pending_tokens: int | None = Field(default=None, ge=1)
    """Prompt and output tokens that a replica's unfinished requests may come to; a further request
    is refused. None for no limit."""
    tenant_weights: Annotated[Mapping[str, _Weight], BeforeValidator(_from_json)] = {}
    """Shares of tenants under "weighted-fair"; 1 for those that are not named."""


class ParallelConfig(_Section):
    """How many ranks and replicas."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    num_replicas: int = Field(default=1, ge=1)


class TimeoutConfig(_Section):
    """Leases and limits, in seconds."""

    consumer_lease_s: float = Field(default=10.0, gt=0)
    """A consumer that does not poll for this long loses its requests."""
    poll_timeout_s: float = Field(default=2.0, gt=0)
    """A poll with nothing to say is answered after this long."""
    rank_liveness_s: float = Field(default=3.0, gt=0)
    """A rank that does not answer the controller for this long is dead."""
    deployment_lease_s: float = Field(default=30.0, gt=0)
    """A deployment whose owner does not renew for this long is taken down; a rank that its
    controller does not reach for this long ends itself."""
    farewell_s: float = Field(default=10.0, ge=0)
    """A deployment whose last owner has left waits this long for another before it ends."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """A replica whose step loop has not moved for this long is stuck, and is given up; no step may
    take as long."""
    collective_timeout_s: float = Field(default=60.0, gt=0)
    """A collective that takes this long is broken; idle groups are kept alive more often."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """A deployment that is not ready after this long failed to start."""


class RecoveryConfig(_Section):
    """What is done about replicas that die, and about requests that lose theirs."""

    restart: bool = True
    """Start lost replicas again."""
    restart_delay_s: float = Field(default=1.0, ge=0)
    """Pause before the second start in a row; doubles with each further one. The first is at
    once."""
    max_restart_delay_s: float = Field(default=60.0, ge=0)
    """Longest pause before a start."""
    lasting_life_s: float = Field(default=60.0, gt=0)
    """A replica that lived this long counts as well: its next start is a first one."""
    patience_s: float = Field(default=300.0, gt=0)
    """A request that no replica can take for this long fails."""
    resubmit_s: float = Field(default=2.0, gt=0)
    """A submission that has led to nothing for this long is repeated; doubles with each time, up
    to eight times as long."""
    poison_deaths: int = Field(default=2, ge=1)
    """A request fails once it was on trial for so many deaths of its replicas in a row."""
    grace_s: float = Field(default=5.0, ge=0)
    """A controller that was started anew waits for its replicas this long at most before it
    places anything."""


class DeploymentConfig(_Section):
    """All of one deployment."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    batch: BatchConfig = BatchConfig()
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementPolicy = "prefix-aware"
    """Which replica takes a request; see docs/scheduling.md."""
    timeouts: TimeoutConfig = TimeoutConfig()
    event_log_dir: str | None = Field(default=None, min_length=1)
    """A folder for the event logs of the controller and of every replica, which `rayserve-paged
    replay` replays; on a cluster of several nodes it is one on each. None for no log."""
    recovery: RecoveryConfig = RecoveryConfig()
    keep_alive: bool = False
    """Outlive the owner's lease; ended by `rayserve-paged down` alone."""
