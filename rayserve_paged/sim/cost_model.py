"""How long a step takes, from first principles: a roofline over what a rank computes and moves."""

import dataclasses
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.sim.hardware import GPUS_PER_NODE, GpuSpec, ModelShape
from rayserve_paged.sim.links import LinkSpec

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

TOKEN_BYTES: Final = 4
"""Of a sampled token's id, which goes to the host."""

_RDMA: Final = LinkSpec(latency_s=5e-6, bytes_per_s=50e9)


class CostModel(Protocol):
    """Says how long the steps of a plan take."""

    @property
    def max_active(self) -> int:
        """Replicas of a machine up to which a step takes longer the more of them run one; 1 where
        they share nothing.
        """
        ...

    def step_seconds(
        self,
        num_computed: IntArray,
        num_tokens: IntArray,
        num_samples: int,
        num_steps: int,
        num_active: int = 1,
    ) -> FloatArray:
        """Return how long each step of a plan takes on the slowest rank.

        Args:
            num_computed: int32 [n], tokens of each row in the cache before the plan.
            num_tokens: int32 [n], tokens of each row that the first step computes; a later step
                computes one of each.
            num_samples: Tokens that a step samples.
            num_steps: Steps, at least 1.
            num_active: Replicas of the machine that run steps meanwhile, this one included.

        Returns:
            float64 [num_steps], in seconds. The first k of a longer plan are those of a plan of k
            steps, and each is that of a plan of one step with as many tokens in the cache.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class EvenCost:
    """Steps that all take the same time; a `CostModel`.

    Args:
        step_s: How long.
    """

    step_s: float

    @property
    def max_active(self) -> int:
        """As `CostModel.max_active`."""
        return 1

    def step_seconds(
        self,
        num_computed: IntArray,
        num_tokens: IntArray,
        num_samples: int,
        num_steps: int,
        num_active: int = 1,
    ) -> FloatArray:
        """As `CostModel.step_seconds`."""
        del num_computed, num_tokens, num_samples, num_active
        return np.full(num_steps, self.step_s)


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """What each step of a plan has to do, in counts.

    Args:
        num_tokens: int64 [num_steps], tokens computed.
        num_context_tokens: int64 [num_steps], tokens whose KV is read, each once per row.
        num_pairs: int64 [num_steps], (token computed, token that it attends to), itself included.
    """

    num_tokens: LongArray
    num_context_tokens: LongArray
    num_pairs: LongArray


def count_work(num_computed: IntArray, num_tokens: IntArray, num_steps: int) -> StepWork:
    """Count the work of a plan's steps; arguments as `CostModel.step_seconds`."""
    num_rows = len(num_tokens)
    first = int(np.add.reduce(num_tokens))
    reach = int(np.add.reduce(num_computed)) + first
    context = reach + num_rows * np.arange(num_steps)
    tokens = np.full(num_steps, num_rows)
    if first == num_rows:
        return StepWork(tokens, context, context)
    pairs = context.copy()
    tokens[0] = first
    counts = num_tokens.astype(np.int64)
    pairs[0] = (counts * num_computed + counts * (counts + 1) // 2).sum()
    return StepWork(tokens, context, pairs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Each part of a step takes the longer of its computing and its moving of bytes.

    The parts, one after the other: the matrices of the layers, whose weights are read once per
    step; attention, which reads the KV of every context token; the logits' matrix, for the tokens
    that sample; two all-reduces per layer; the sampled ids' way to the host; and what the step loop
    does between steps.

    Source: the roofline model (Williams, Waterman and Patterson, CACM 2009); all-reduce as a ring
    (Thakur, Rabenseifner and Gropp, IJHPCA 2005).

    Args:
        gpu: Of each rank.
        shape: The model.
        tensor_parallel_size: Ranks of the replica.
        compute_efficiency: Share of the peak rate that matrices and attention reach.
        memory_efficiency: Share of the memory's bandwidth that they reach.
        between_nodes: Link of each GPU to other nodes, used where the ranks are more than a node's.
        overhead_s: What a step takes beside the GPU's work: planning, launching.

    Raises:
        InvalidInputError: A width or a share that cannot be.
    """

    gpu: GpuSpec
    shape: ModelShape
    tensor_parallel_size: int
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    between_nodes: LinkSpec = _RDMA
    overhead_s: float = 3e-4
    _per: "_Rates" = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the numbers, and work out once what does not depend on a step."""
        width, heads = self.tensor_parallel_size, self.shape.num_heads
        if not 1 <= width <= heads:
            accepted = f"from 1 to the {heads} query heads of {self.shape.name}"
            raise InvalidInputError("tensor_parallel_size", width, accepted)
        for field in ("compute_efficiency", "memory_efficiency"):
            share = getattr(self, field)
            if not 0 < share <= 1:
                raise InvalidInputError(field, share, "a share above 0 and at most 1")
        if not self.overhead_s >= 0:
            raise InvalidInputError("overhead_s", self.overhead_s, "a number of seconds from 0")
        object.__setattr__(self, "_per", self._rates())

    @property
    def max_active(self) -> int:
        """As `CostModel.max_active`: each rank has a GPU of its own."""
        return 1

    def step_seconds(
        self,
        num_computed: IntArray,
        num_tokens: IntArray,
        num_samples: int,
        num_steps: int,
        num_active: int = 1,
    ) -> FloatArray:
        """As `CostModel.step_seconds`."""
        del num_active
        work = count_work(num_computed, num_tokens, num_steps)
        per = self._per
        if work.num_pairs is work.num_context_tokens:
            return self._decode_seconds(work, num_samples)
        layers = np.maximum(work.num_tokens * per.token_s, per.weights_s)
        attention = np.maximum(work.num_pairs * per.pair_s, work.num_context_tokens * per.context_s)
        reduced = per.reduce_s + work.num_tokens * per.reduce_token_s
        return np.asarray(layers + attention + reduced + self._fixed_s(num_samples), np.float64)

    def _decode_seconds(self, work: StepWork, num_samples: int) -> FloatArray:
        """Return the same for steps that compute one token of each row: but for attention, all of
        them are alike.
        """
        per, num_tokens = self._per, int(work.num_tokens[0])
        layers = max(num_tokens * per.token_s, per.weights_s)
        attention = work.num_context_tokens * max(per.pair_s, per.context_s)
        reduced = per.reduce_s + num_tokens * per.reduce_token_s
        return np.asarray(layers + attention + reduced + self._fixed_s(num_samples), np.float64)

    def _fixed_s(self, num_samples: int) -> float:
        """Return what a step takes beside its tokens' way through the layers."""
        fixed = self.overhead_s + self.gpu.host_link.transfer_s(TOKEN_BYTES * num_samples)
        if num_samples:
            fixed += max(num_samples * self._per.sample_s, self._per.head_s)
        return fixed

    def _rates(self) -> "_Rates":
        shape, width = self.shape, self.tensor_parallel_size
        flops_per_s = self.gpu.flops * self.compute_efficiency * width
        bytes_per_s = self.gpu.memory_bytes_per_s * self.memory_efficiency
        num_weights = shape.num_layers * shape.num_layer_weights
        # Two products, with keys and with values, of two operations per element each.
        pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        link = self.gpu.peer_link if width <= GPUS_PER_NODE else self.between_nodes
        num_hops = 2 * shape.num_layers * 2 * (width - 1)
        token_bytes = shape.hidden_size * shape.dtype_bytes
        return _Rates(
            token_s=2 * num_weights / flops_per_s,
            weights_s=num_weights * shape.dtype_bytes / width / bytes_per_s,
            pair_s=pair_flops / flops_per_s,
            context_s=shape.kv_bytes_per_token(width) / bytes_per_s,
            sample_s=2 * shape.num_head_weights / flops_per_s,
            head_s=shape.num_head_weights * shape.dtype_bytes / width / bytes_per_s,
            reduce_s=num_hops * link.latency_s,
            reduce_token_s=num_hops * token_bytes / width / link.bytes_per_s,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Rates:
    """What each part of a step takes.

    Args:
        token_s: The layers' matrices, to compute each token.
        weights_s: The same, to read the weights once.
        pair_s: Attention, to compute each pair of tokens.
        context_s: Attention, to read the KV of each context token.
        sample_s: The logits of each sample, to compute.
        head_s: The same, to read the matrix once.
        reduce_s: All all-reduces, however little they carry.
        reduce_token_s: What each token adds to them.
    """

    token_s: float
    weights_s: float
    pair_s: float
    context_s: float
    sample_s: float
    head_s: float
    reduce_s: float
    reduce_token_s: float
