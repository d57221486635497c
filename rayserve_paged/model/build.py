"""Builds the model of one rank from its source."""

from collections.abc import Callable
from typing import Protocol, assert_never

import torch

from rayserve_kernels.attention import AttentionBackend
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_paged.core.config import Dtype, KvDtype
from rayserve_paged.model.fingerprint import FingerprintModel
from rayserve_paged.model.parallel import Collectives
from rayserve_paged.model.spec import (
    DirectorySource,
    FingerprintSource,
    ModelSource,
    ModelSpec,
    check_kv_dtype,
)
from rayserve_paged.model.step_batch import StepBatch

TORCH_DTYPES: dict[Dtype | KvDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


class StepModel(Protocol):
    """One rank's part of a model, over a pool that somebody else owns."""

    spec: ModelSpec

    def kv_layout(self, block_size: int) -> KVLayout:
        """Layout of the pool that `forward` needs on this rank."""
        ...

    def forward(
        self,
        batch: StepBatch,
        pool: KVPool,
        take_scored: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Compute a step; every rank of the group calls it with the same batch.

        Args:
            batch: The step.
            pool: Of `kv_layout`; the tokens' keys and values are written into it.
            take_scored: Called on rank 0 with the logits of each of `batch.scored_slices`, fp32
                [n, vocab_size], in their order; needed there where `batch.scored_rows` is set.

        Returns:
            fp32 [num_logits, vocab_size] on rank 0, None elsewhere.
        """
        ...


def build_model(
    source: ModelSource,
    dtype: Dtype,
    collectives: Collectives,
    backend: AttentionBackend,
    device: torch.device | str = "cpu",
    kv_dtype: KvDtype | None = None,
) -> StepModel:
    """Build this rank's part of a model.

    Args:
        source: From `loader.resolve_model`.
        dtype: Of weights and activations; the fingerprint model has its own.
        collectives: The ranks of the tensor-parallel group.
        backend: Writes to and attends over the pool.
        device: Where weights and activations live.
        kv_dtype: Of the pool; None for `dtype`.

    Raises:
        InvalidInputError: The heads cannot be dealt over so many ranks, a weight is missing, or the
            model has a dtype of its own for its pool.
    """
    check_kv_dtype(source, kv_dtype)
    match source:
        case FingerprintSource():
            return FingerprintModel(source.config, collectives, backend)
        case DirectorySource():
            # Here, so that the fingerprint model does without transformers.
            from rayserve_paged.model.transformer import ShardedTransformer

            return ShardedTransformer(
                source,
                TORCH_DTYPES[dtype],
                collectives,
                backend,
                torch.device(device),
                TORCH_DTYPES[kv_dtype or dtype],
            )
        case _:
            assert_never(source)
