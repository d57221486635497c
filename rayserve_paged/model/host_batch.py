"""What one step computes as the host makes it, before it is sent to a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayserve_kernels.host_metadata import HostMetadata
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_paged.model.step_batch import StepBatch

Longs = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """The arrays behind a `StepBatch`, whose fields explain them."""

    token_ids: Longs
    positions: Longs
    metadata: tuple[HostMetadata, ...]
    logits_rows: Longs
    salts: Longs | None = None
    scored_rows: Longs | None = None

    @property
    def is_plain_decode(self) -> bool:
        """Whether each sequence computes one token and wants its logits, and nothing else."""
        num_seqs = len(self.metadata[0].seq_lens)
        return (
            len(self.token_ids) == num_seqs == len(self.logits_rows)
            and self.salts is None
            and self.scored_rows is None
        )

    def arrays(self) -> list[npt.NDArray[Any]]:
        """What goes to the device, in order; of optional ones those that are there."""
        arrays: list[npt.NDArray[Any]] = [self.token_ids, self.positions, self.logits_rows]
        arrays += [array for array in (self.salts, self.scored_rows) if array is not None]
        for metadata in self.metadata:
            arrays += metadata.arrays()
        return arrays

    def step_batch(self, tensors: Sequence[torch.Tensor]) -> StepBatch:
        """Make the batch from what became of `arrays()` on the device, in their order."""
        rest = iter(tensors)
        token_ids, positions, logits_rows = next(rest), next(rest), next(rest)
        salts = None if self.salts is None else next(rest)
        scored_rows = None if self.scored_rows is None else next(rest)
        metadata = [
            AttentionMetadata.from_host(host, [next(rest) for _ in host.arrays()])
            for host in self.metadata
        ]
        return StepBatch(token_ids, positions, tuple(metadata), logits_rows, salts, scored_rows)

    def on(self, send: Callable[[Sequence[npt.NDArray[Any]]], Sequence[torch.Tensor]]) -> StepBatch:
        """Send the arrays and make the batch of what `send` returns for them."""
        return self.step_batch(send(self.arrays()))

    def padded(self, num_seqs: int, width: int, spare_block: int, block_size: int) -> HostBatch:
        """Add sequences to a plain decode: see `HostMetadata.padded`."""
        num_more = num_seqs - len(self.token_ids)
        zeros = np.zeros(num_more, np.int64)
        return HostBatch(
            token_ids=np.concatenate((self.token_ids, zeros)),
            positions=np.concatenate((self.positions, zeros)),
            metadata=tuple(
                metadata.padded(num_seqs, width, spare_block, block_size)
                for metadata in self.metadata
            ),
            logits_rows=np.arange(num_seqs),
        )
