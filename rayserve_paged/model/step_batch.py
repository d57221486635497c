"""What one step computes, flattened over its sequences."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rayserve_kernels.attention import AttentionMetadata


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The tokens of one step, sequence after sequence, without padding.

    Args:
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens], place of each token in its sequence, from 0.
        metadata: Where each sequence's keys and values lie in the pool.
        logits_rows: int64 [num_logits], indices into `token_ids` whose logits are wanted.
        salts: int64 [num_tokens], what `RowContent.salts` makes of each token's adapter and
            content; None where no token has either, as with every model that takes none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits_rows: torch.Tensor
    salts: torch.Tensor | None = None
