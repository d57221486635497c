"""What the ranks of a replica are told to compute in one step, and what they report of it.

All messages are frozen, and the arrays inside are never written after the message was made.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.ids import Row, StepId
from rayserve_paged.core.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowStart:
    """A sequence takes a row of the batch, on every rank, or the row's table is given anew.

    Args:
        row: The row; whatever it held before is gone.
        num_computed: Tokens whose KV is already in `block_ids`.
        block_ids: int32 [num_places * num_layer_groups], the block table so far: for each place,
            head first, one block of each layer group. Where a window has left a place behind, any
            id stands there, and it is never read.
        params: For rank 0, which samples; its seed is set.
        num_prompt_tokens: Tokens before the first output; draws depend on the output position.
        sibling: Which of the request's parallel samples this is; draws depend on it.
        history: int32 [num_known], all tokens known so far, for rank 0 alone; None where the
            parameters need no history.
        adapter: Weights laid over the model's own.
        attachments: Content behind tokens of the prompt, in their order.
        window: What its tokens attend to in layers that have no smaller window.
    """

    row: Row
    num_computed: int
    block_ids: IntArray
    params: SamplingParams
    num_prompt_tokens: int
    sibling: int = 0
    history: IntArray | None = None
    adapter: Adapter | None = None
    attachments: tuple[Attachment, ...] = ()
    window: AttentionWindow = FULL_ATTENTION


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """Prompt tokens whose log-probabilities a step yields.

    Args:
        indices: int32 [num_scored], ascending, indices into the plan's `token_ids` of the tokens
            before them, whose logits score them.
        targets: int32 [num_scored], the tokens.
    """

    indices: IntArray
    targets: IntArray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What every rank computes in one step; carries differences only.

    A rank applies `starts`, then the appended blocks, then the copies (all sources are read
    before any target is written), then computes, for each scheduled row i, `num_tokens[i]` tokens
    at positions `num_computed[i]`, `num_computed[i] + 1`, ...

    A plan of several steps repeats the last part: each scheduled row samples once per step, and
    the token sampled in one is computed in the next. It equals as many plans of one step.

    Args:
        step_id: Counts the plans of the incarnation.
        starts: Rows that begin or resume in this step.
        append_rows: int32 [num_appends], row that each appended block belongs to.
        append_blocks: int32 [num_appends], the blocks, in table order for each row: for each
            place one of each layer group.
        copies: int32 [num_copies, 3], (source block, target block, number of leading slots).
        rows: int32 [num_scheduled], scheduled rows.
        num_computed: int32 [num_scheduled], tokens of each row in the cache before the step.
        num_tokens: int32 [num_scheduled], tokens of each row to compute, at least 1.
        token_ids: int32 [sum(num_tokens)], the tokens to compute, row after row.
        late: int32 [num_late], indices into `token_ids` of tokens that were not known when the
            plan was made: each is what its row sampled in the plan before.
        sample_indices: int32 [num_samples], indices into `rows`, ascending: rows whose last
            token yields new ones. A row that is about to be forked is named once for itself, and
            once for each sibling that is to be born.
        sample_siblings: int32 [num_samples], for which sibling each sample is drawn.
        num_steps: Steps to run, at least 1.
        scored: Prompt tokens whose log-probabilities are wanted; None for none.
    """

    step_id: StepId
    starts: tuple[RowStart, ...]
    append_rows: IntArray
    append_blocks: IntArray
    copies: IntArray
    rows: IntArray
    num_computed: IntArray
    num_tokens: IntArray
    token_ids: IntArray
    late: IntArray
    sample_indices: IntArray
    sample_siblings: IntArray
    num_steps: int
    scored: ScoredTokens | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, in float.

    Args:
        logprob: Of the token that stands there; NaN for one of a prompt where the logits hold NaN
            or infinity.
        top: (token id, log-probability) of the most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What rank 0 reports of a finished plan.

    Args:
        step_id: Of the plan.
        token_ids: int32 [num_steps_run, num_samples], in plan order. A plan of several steps may
            be interrupted after any of them.
        logprobs: For the samples that asked for them: index -> log-probabilities. For a beam `top`
            lists its candidates (`beam_search.num_candidates`), and its token id means nothing.
            Plans of several steps have none.
        errors: For the samples that raised in the last step run, which is the last for all:
            index -> reason. Their token id means nothing.
        prompt_logprobs: One for each token of `StepPlan.scored`, in its order.
    """

    step_id: StepId
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
