"""Linear and embedding modules of which each rank holds a part (Megatron-LM, section 3)."""

import torch
from torch import nn

from rayserve_paged.model.parallel import Collectives


class ColumnLinear(nn.Module):
    """A linear layer split by output features; each rank computes its own, nothing is exchanged.

    Args:
        weight: [out_features of this rank, in_features].
        bias: [out_features of this rank], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features of this rank]."""
        return nn.functional.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer split by input features; the ranks' partial sums are added.

    The bias joins after the sum, so that it counts once whatever the number of ranks.

    Args:
        weight: [out_features, in_features of this rank].
        bias: [out_features], the whole of it on every rank, or None.
        collectives: The ranks that hold the other parts.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, collectives: Collectives
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._collectives = collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features of this rank] -> [..., out_features], equal on every rank."""
        y = nn.functional.linear(x, self.weight)
        self._collectives.all_reduce(y)
        return y if self.bias is None else y + self.bias


class ShardedExperts(nn.Module):
    """Experts that every rank holds, each of them split by the columns between its two halves.

    So the ranks have equal work whatever the router chooses; their partial sums are added once for
    all experts.

    Args:
        experts: Of transformers, with this rank's columns.
        collectives: The ranks that hold the other columns.
    """

    def __init__(self, experts: nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.experts = experts
        self._collectives = collectives

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Add up what a token's experts say of it.

        Args:
            hidden_states: [num_tokens, hidden_size].
            top_k_index: int64 [num_tokens, top_k], the experts of each token.
            top_k_weights: [num_tokens, top_k], their weights.

        Returns:
            [num_tokens, hidden_size], equal on every rank.
        """
        y: torch.Tensor = self.experts(hidden_states, top_k_index, top_k_weights)
        self._collectives.all_reduce(y)
        return y


class VocabEmbedding(nn.Module):
    """An embedding split by vocabulary rows: a rank adds zeros for tokens that it does not hold.

    Args:
        weight: [rows of this rank, hidden_size].
        rows: Token ids of those rows.
        collectives: The ranks that hold the other rows.
        scale: Factor on the embeddings, rounded to their dtype; None for none.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        rows: range,
        collectives: Collectives,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._rows = rows
        self._collectives = collectives
        self._scale = None if scale is None else weight.new_tensor(scale)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., hidden_size], equal on every rank."""
        x = self._look_up(token_ids)
        return x if self._scale is None else x * self._scale

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._collectives.world_size == 1:
            return nn.functional.embedding(token_ids, self.weight)
        held = (token_ids >= self._rows.start) & (token_ids < self._rows.stop)
        x = self.weight.new_zeros(*token_ids.shape, self.weight.shape[1])
        x[held] = self.weight[token_ids[held] - self._rows.start]
        self._collectives.all_reduce(x)
        return x
