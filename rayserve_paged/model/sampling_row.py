"""Whose logits a row of the batch holds, and what its request's parameters change in them."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.model.row_grammar import RowGrammar
from rayserve_paged.model.token_counts import TokenCounts

Ids = npt.NDArray[np.int64]

_NO_IDS: Ids = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """What one request's parameters change in its logits, in arrays that are made once.

    Args:
        bias_ids: int64 [num_biases], the biased tokens.
        biases: float64 [num_biases].
        allowed_ids: int64 [num_allowed], or None where all may be chosen.
        end_ids: int64 [num_ends], ids that would end the output before `min_tokens`.
        max_id: The largest of these ids; None where there are none.
    """

    bias_ids: Ids
    biases: npt.NDArray[np.float64]
    allowed_ids: Ids | None
    end_ids: Ids
    max_id: int | None

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> LogitEdits:
        """Make the arrays of a request.

        Args:
            params: Of the request.
            eos_token_ids: The model's end-of-sequence ids.
        """
        bias_ids = [token_id for token_id, _bias in params.biases]
        ends: tuple[int, ...] = ()
        if params.min_tokens > 1:
            ends = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        allowed = params.allowed_token_ids
        return cls(
            bias_ids=np.array(bias_ids, np.int64),
            biases=np.array([bias for _token_id, bias in params.biases]),
            allowed_ids=None if allowed is None else np.array(allowed, np.int64),
            end_ids=np.array(ends, np.int64),
            max_id=max((*bias_ids, *ends, *(allowed or ())), default=None),
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SamplingRow:
    """Whose logits a row holds.

    Args:
        params: Of the request; `seed` is set where `temperature` is above 0.
        output_position: Index of the token to choose among the output tokens, from 0.
        eos_token_ids: The model's end-of-sequence ids.
        sibling: Which of the request's parallel samples the choice is for.
        counts: Of the sequence's tokens up to this position, where `params` has penalties.
        grammar: Where the output is in it, where `params` has one.
        edits: `LogitEdits.of(params, eos_token_ids)`, where it was made before.
        logit_edits: The same, made here where it is not given.
    """

    params: SamplingParams
    output_position: int
    eos_token_ids: tuple[int, ...] = ()
    sibling: int = 0
    counts: TokenCounts | None = None
    grammar: RowGrammar | None = None
    edits: dataclasses.InitVar[LogitEdits | None] = None
    logit_edits: LogitEdits = dataclasses.field(init=False)

    def __post_init__(self, edits: LogitEdits | None) -> None:
        """Make the edits where they are not given."""
        if edits is None:
            edits = LogitEdits.of(self.params, self.eos_token_ids)
        object.__setattr__(self, "logit_edits", edits)

    @property
    def num_end_ids(self) -> int:
        """Ids that end the output."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return len({*eos, *self.params.stop_token_ids})

    @property
    def withheld_ids(self) -> Ids:
        """Ids that would end the output and may not be chosen yet."""
        withheld = self.output_position + 1 < self.params.min_tokens
        return self.logit_edits.end_ids if withheld else _NO_IDS

    @property
    def is_edited(self) -> bool:
        """Whether the token is chosen from other logits than the model's."""
        edits = self.logit_edits
        return (
            edits.allowed_ids is not None
            or len(edits.bias_ids) > 0
            or len(self.withheld_ids) > 0
            or self.params.needs_history
        )

    def refusal(self, vocab_size: int) -> str | None:
        """Return why no token can be chosen for this row; None where one can."""
        if self.params.temperature > 0 and self.params.seed is None:
            return "a random choice needs a seed"
        if self.logit_edits.max_id is not None and self.logit_edits.max_id >= vocab_size:
            return f"id {self.logit_edits.max_id} is outside the vocabulary of {vocab_size}"
        if self.params.has_penalties:
            if self.counts is None:
                return "penalties need the tokens so far"
            if self.counts.num_outputs != self.output_position:
                return (
                    f"penalties know {self.counts.num_outputs} output tokens "
                    f"at output position {self.output_position}"
                )
        return self._grammar_refusal()

    def _grammar_refusal(self) -> str | None:
        if self.params.grammar is None:
            return None
        if self.grammar is None:
            return "a grammar needs the tokens so far"
        if self.grammar.num_outputs != self.output_position:
            return (
                f"the grammar knows {self.grammar.num_outputs} output tokens "
                f"at output position {self.output_position}"
            )
        return None
