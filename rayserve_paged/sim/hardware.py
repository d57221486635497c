"""GPU types and model shapes that a simulation can be of, and how many blocks fit.

Rates are the vendor's published peaks for one GPU of the SXM form (L40S: PCIe), dense: half of what
is printed for two-of-four sparsity. Sources: NVIDIA data sheets "A100 Tensor Core GPU" (80 GB),
"H100 Tensor Core GPU", "H200 Tensor Core GPU", "DGX B200" (an eighth of the system) and "L40S";
NVLink and PCIe bandwidths are those sheets' totals over two, for one direction. Latencies of links
are orders of magnitude and no published figures. Shapes are those of the models' published
configurations on Hugging Face.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.links import LinkSpec

GPUS_PER_NODE: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSpec:
    """What one GPU can do at best.

    Args:
        name: As the vendor calls it.
        flops: Dense bf16 tensor operations per second, a multiplication and an addition being two.
        memory_bytes_per_s: Bandwidth of its memory.
        memory_bytes: Size of its memory.
        peer_link: To the other GPUs of its node, one direction.
        host_link: To the memory of its node, one direction.
    """

    name: str
    flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    peer_link: LinkSpec
    host_link: LinkSpec


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder with grouped-query attention and a gated MLP.

    Args:
        name: Of the model.
        num_layers: Layers.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements of one head's key.
        intermediate_size: Width of the MLP.
        vocab_size: Token ids.
        max_model_len: Prompt and output tokens that the positions allow.
        tied_embeddings: Whether the head's weights are the embedding's.
        dtype_bytes: Of a weight, and of an element of the KV cache unless `kv_vector_bytes` is set.
        kv_vector_bytes: Of one head's key or value in the cache, its scale included; None for
            `head_dim` elements of `dtype_bytes`.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    tied_embeddings: bool = False
    dtype_bytes: int = 2
    kv_vector_bytes: int | None = None

    @property
    def num_layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_head_weights(self) -> int:
        """Weights of the matrix that gives the logits."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices."""
        num_embeddings = 1 if self.tied_embeddings else 2
        num_weights = (
            self.num_layers * self.num_layer_weights + num_embeddings * self.num_head_weights
        )
        return num_weights * self.dtype_bytes

    def kv_bytes_per_token(self, tensor_parallel_size: int) -> int:
        """Return the KV bytes of one token on the rank that holds most KV heads."""
        num_kv_heads = -(-self.num_kv_heads // tensor_parallel_size)
        vector_bytes = self.kv_vector_bytes or self.head_dim * self.dtype_bytes
        return 2 * self.num_layers * num_kv_heads * vector_bytes


_NVLINK_LATENCY_S = 1e-6
_PCIE_LATENCY_S = 5e-6


def _nvlink(bytes_per_s: float) -> LinkSpec:
    return LinkSpec(_NVLINK_LATENCY_S, bytes_per_s)


def _pcie(bytes_per_s: float) -> LinkSpec:
    return LinkSpec(_PCIE_LATENCY_S, bytes_per_s)


GPUS: Final[Mapping[str, GpuSpec]] = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("A100", 312e12, 2.039e12, 80 * 10**9, _nvlink(300e9), _pcie(32e9)),
        GpuSpec("H100", 989.5e12, 3.35e12, 80 * 10**9, _nvlink(450e9), _pcie(64e9)),
        GpuSpec("H200", 989.5e12, 4.8e12, 141 * 10**9, _nvlink(450e9), _pcie(64e9)),
        GpuSpec("B200", 2250e12, 8e12, 180 * 10**9, _nvlink(900e9), _pcie(64e9)),
        GpuSpec("L40S", 362e12, 864e9, 48 * 10**9, _pcie(32e9), _pcie(32e9)),
    )
}
"""GPU types by name."""

MODEL_SHAPES: Final[Mapping[str, ModelShape]] = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_embeddings=True),
        ModelShape("llama-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
        ModelShape("llama-70b", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        ModelShape("llama-405b", 126, 16384, 128, 8, 128, 53248, 128256, 131072),
    )
}
"""Model shapes by name."""


def num_blocks_that_fit(
    gpu: GpuSpec,
    shape: ModelShape,
    tensor_parallel_size: int,
    block_size: int,
    memory_share: float = 0.9,
) -> int:
    """Return how many KV blocks each rank of a replica can hold beside its weights.

    Args:
        gpu: Of each rank.
        shape: The model.
        tensor_parallel_size: Ranks; each holds its part of every matrix and of the KV heads.
        block_size: Slots per block.
        memory_share: Of the GPU's memory for weights and blocks; the rest is for activations.

    Raises:
        InvalidInputError: Not even one fits.
    """
    if not 0 < memory_share <= 1:
        raise InvalidInputError("memory_share", memory_share, "a share above 0 and at most 1")
    weights = shape.weight_bytes / tensor_parallel_size
    left = gpu.memory_bytes * memory_share - weights
    num_blocks = int(left // (block_size * shape.kv_bytes_per_token(tensor_parallel_size)))
    if num_blocks < 1:
        accepted = (
            f"a GPU with more than {weights / 1e9 / memory_share:,.0f} GB for {shape.name} "
            f"on {tensor_parallel_size} ranks, or more ranks"
        )
        raise InvalidInputError("gpu", gpu.name, accepted)
    return num_blocks
