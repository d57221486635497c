"""Log-probabilities of prompt tokens, from the logits that a model gives slice by slice."""

from collections.abc import Sequence

import numpy as np
import torch

from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.model.sampler import token_logprobs
from rayserve_paged.model.token_filters import Scratch

_UNKNOWN = TokenLogprobs(float("nan"), ())


class PromptScorer:
    """Takes the logits of one step's scored tokens, in their order.

    Args:
        targets: The token that each of them scores.
        counts: How many most likely tokens to report with each.
        vocab_size: Of the model.
    """

    def __init__(self, targets: Sequence[int], counts: Sequence[int], vocab_size: int) -> None:
        assert len(targets) == len(counts)
        self._targets = targets
        self._counts = counts
        self._scratch = Scratch(vocab_size)
        self._scores: list[TokenLogprobs] = []

    def take(self, logits: torch.Tensor) -> None:
        """Score the next tokens.

        Args:
            logits: fp32 [n, vocab_size], on any device; not modified.
        """
        for values in logits.cpu().numpy().astype(np.float64):
            place = len(self._scores)
            # NaN is the maximum of whatever holds it.
            if not np.isfinite(values.max()):
                self._scores.append(_UNKNOWN)
                continue
            target, count = self._targets[place], self._counts[place]
            self._scores.append(token_logprobs(values, target, count, self._scratch))

    @property
    def scores(self) -> tuple[TokenLogprobs, ...]:
        """One for each target; all must have been taken."""
        assert len(self._scores) == len(self._targets), "a model gives logits for every scored row"
        return tuple(self._scores)
