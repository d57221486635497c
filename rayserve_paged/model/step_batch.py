"""What one step computes, flattened over its sequences."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rayserve_kernels.gpu.prefix_groups import SharedPrefixes
    from rayserve_kernels.metadata import AttentionMetadata


_SLICE_ELEMENTS = 1 << 21


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The tokens of one step, sequence after sequence, without padding.

    Args:
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens], place of each token in its sequence, from 0.
        metadata: Where each sequence's keys and values lie in the pool, and which of them its
            tokens see; one for each layer group.
        logits_rows: int64 [num_logits], indices into `token_ids` whose logits are wanted.
        salts: int64 [num_tokens], what `RowContent.salts` makes of each token's adapter and
            content; None where no token has either, as with every model that takes none.
        scored_rows: int64 [num_scored], indices into `token_ids` whose logits score the token after
            them; None for none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: tuple[AttentionMetadata, ...]
    logits_rows: torch.Tensor
    salts: torch.Tensor | None = None
    scored_rows: torch.Tensor | None = None

    def with_shared_prefixes(self, prefixes: Sequence[SharedPrefixes | None]) -> StepBatch:
        """The same step, with what each layer group's sequences share where it is not None."""
        if not any(prefixes):
            return self
        metadata = tuple(
            dataclasses.replace(of_group, shared_prefixes=shared)
            for of_group, shared in zip(self.metadata, prefixes, strict=True)
        )
        return dataclasses.replace(self, metadata=metadata)

    def scored_slices(self, vocab_size: int) -> tuple[torch.Tensor, ...]:
        """Deal `scored_rows`, in order, into slices whose logits are held at once.

        Args:
            vocab_size: Of the model; a slice has about 2 million logits, 8 MiB, at least one row.
        """
        if self.scored_rows is None:
            return ()
        num_rows = max(1, _SLICE_ELEMENTS // vocab_size)
        slices: tuple[torch.Tensor, ...] = self.scored_rows.split(num_rows)
        return slices
