"""Every message between the parts: what the state machines take in, and what they ask for.

Shells carry these between machines and processes without looking inside. All are frozen; the
arrays inside are never written after the message was made.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter, BlockScope
from rayserve_paged.core.errors import PinLimitError
from rayserve_paged.core.ids import (
    Attempt,
    BlockKey,
    ConsumerId,
    Incarnation,
    PinId,
    ReplicaId,
    RequestId,
    Row,
    StepId,
)
from rayserve_paged.core.request import FinishReason, ModelLimits, Request, SamplingParams

IntArray = npt.NDArray[np.int32]

# --- one step -------------------------------------------------------------------------------


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
        window: Of the request.
        num_sink_tokens: Of the request.
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
    window: int | None = None
    num_sink_tokens: int = 0


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
            token yields new ones. A row that is about to be forked is named once per sibling.
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


# --- what a consumer reads ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class StreamName:
    """Which stream a token belongs to.

    Args:
        request_id: The request.
        attempt: A consumer drops what comes of an attempt that it did not accept.
        sibling: Which of the request's parallel samples.
    """

    request_id: RequestId
    attempt: Attempt
    sibling: int


@dataclasses.dataclass(frozen=True, slots=True)
class StreamItem:
    """What is new of one stream: its first token, its end, or a token with log-probabilities; all
    of a hypothesis at once.

    Args:
        name: The stream.
        index: Output index of the first token here; a consumer drops what it already has.
        token_ids: New output tokens; may be empty on the last item.
        logprobs: One for each token where asked for, and of a beam search, else empty.
        num_cached_tokens: Prompt tokens taken from the prefix cache at first admission.
        finish: Set on the last item.
        error: Reason, where finish is ERROR or CANCELLED.
        prompt_logprobs: Of the prompt tokens but the first, where asked for, with the first output
            token of the first sibling that has one; else empty.
    """

    name: StreamName
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    error: str | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """Further tokens for each of many streams, from one plan.

    Args:
        names: [n] streams.
        indices: int32 [n], output index of the first token of each.
        token_ids: int32 [num_steps, n].
    """

    names: tuple[StreamName, ...]
    indices: IntArray
    token_ids: IntArray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """The answer to one poll.

    Args:
        replica_id: Who answers.
        incarnation: In which life.
        sequence: Grows with each delivery that holds items; acknowledged by the next poll.
        items: In the order in which they came about.
    """

    replica_id: ReplicaId
    incarnation: Incarnation
    sequence: int
    items: tuple[StreamItem | TokenRun, ...]


# --- into a replica -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class AssignRequest:
    """The controller placed a request here. Idempotent by (request_id, attempt).

    Args:
        request: Checked and clamped (`request.admit`).
        prompt_keys: Keys of the full blocks of the prompt, hashed once at placement.
    """

    request: Request
    prompt_keys: tuple[BlockKey, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CancelRequest:
    """Its consumer wants no more of a request, or of one of its samples. Unknown ids are ignored.

    Args:
        request_id: The request.
        attempt: Which submission of it.
        sibling: The sample; None for all.
    """

    request_id: RequestId
    attempt: Attempt
    sibling: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PollTokens:
    """A consumer asks for the new tokens of all its requests; renews its lease.

    Args:
        consumer_id: Who asks; it has at most one poll pending.
        poll_id: Names the answer.
        ack: Highest delivery sequence received from this incarnation, 0 for none.
    """

    consumer_id: ConsumerId
    poll_id: int
    ack: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepFinished:
    """The executor ran the plan."""

    result: StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class StepFailed:
    """The executor could not run the plan; the tensor group cannot be trusted any more."""

    step_id: StepId
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class FenceReplica:
    """The incarnation ends: every request of it fails with this reason."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ResetCache:
    """Nothing that was computed before is to be found by prefix matching any more.

    Running requests go on over the blocks that they have, and nothing of what they compute there
    is found either.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class PinPrefix:
    """Keep the cached blocks of a prefix until they are unpinned. Idempotent by `pin_id`.

    Args:
        pin_id: Names the pin.
        token_ids: The prefix; its full blocks that are computed now are kept, in the scope of
            requests without adapter, attachments and salt.
    """

    pin_id: PinId
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class UnpinPrefix:
    """Let go of a pin. Unknown names are ignored."""

    pin_id: PinId


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; leases and reports are looked at."""


ReplicaEvent = (
    AssignRequest
    | CancelRequest
    | PollTokens
    | StepFinished
    | StepFailed
    | FenceReplica
    | ResetCache
    | PinPrefix
    | UnpinPrefix
    | Tick
)

# --- out of a replica -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RunStep:
    """Run this plan on all ranks, then report StepFinished or StepFailed."""

    plan: StepPlan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AnswerPoll:
    """Answer a pending poll."""

    consumer_id: ConsumerId
    poll_id: int
    delivery: Delivery


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What the controller learns of a replica: load, and keys that came and went.

    Args:
        replica_id: The replica.
        incarnation: Its life.
        sequence: Counts the reports of the incarnation, from 0.
        published: Keys that became matchable since the last report, in order.
        evicted: Keys that stopped being matchable since the last report.
        finished: Requests that ended since the last report.
        num_running: Sequences with a row.
        num_waiting: Sequences without one.
        num_free_blocks: FREE blocks.
        num_cached_blocks: CACHED blocks.
        num_queried_tokens: Prompt tokens of all requests that the incarnation has started, each
            counted once however long it waited and however often it resumed.
        num_hit_tokens: Those of them that the prefix cache held.
        num_resumed_tokens: Tokens that the cache held of sequences that resumed, each time.
        fenced: Set once, in the last report of an incarnation.
    """

    replica_id: ReplicaId
    incarnation: Incarnation
    sequence: int
    published: tuple[BlockKey, ...]
    evicted: tuple[BlockKey, ...]
    finished: tuple[tuple[RequestId, Attempt], ...]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_resumed_tokens: int
    fenced: str | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PinAnswered:
    """The answer to PinPrefix, at once.

    Args:
        pin_id: Of the pin.
        num_tokens: Tokens in the blocks that it holds.
        refused: Why it holds none; None where it was not refused.
    """

    pin_id: PinId
    num_tokens: int
    refused: PinLimitError | None


ReplicaCommand = RunStep | AnswerPoll | ReplicaReport | PinAnswered

# --- into the controller --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RegisterReplica:
    """A replica is ready to take requests."""

    replica_id: ReplicaId
    incarnation: Incarnation
    limits: ModelLimits
    scope: BlockScope


@dataclasses.dataclass(frozen=True, slots=True)
class LoseReplica:
    """A rank of this incarnation is dead or silent."""

    replica_id: ReplicaId
    incarnation: Incarnation
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A consumer hands in a request. Idempotent by (request_id, attempt)."""

    request: Request


@dataclasses.dataclass(frozen=True, slots=True)
class WithdrawRequest:
    """A consumer cancels a request, or one of its samples, wherever it is."""

    request_id: RequestId
    attempt: Attempt
    sibling: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RenewLease:
    """The owner of the deployment is alive."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndDeployment:
    """Take everything down."""

    reason: str


ControllerEvent = (
    RegisterReplica
    | LoseReplica
    | SubmitRequest
    | WithdrawRequest
    | ReplicaReport
    | RenewLease
    | EndDeployment
    | Tick
)

# --- out of the controller ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class SendToReplica:
    """Deliver an event to one incarnation of a replica."""

    replica_id: ReplicaId
    incarnation: Incarnation
    event: AssignRequest | CancelRequest | FenceReplica


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The answer to SubmitRequest: poll this replica for the stream."""

    request_id: RequestId
    attempt: Attempt
    replica_id: ReplicaId
    incarnation: Incarnation
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rejected:
    """The answer to SubmitRequest: why it was refused; `error` is a PagedError to raise."""

    request_id: RequestId
    attempt: Attempt
    error: Exception


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLost:
    """Tell these consumers that an incarnation is gone, with what it still owed them."""

    replica_id: ReplicaId
    incarnation: Incarnation
    reason: str
    consumers: tuple[ConsumerId, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StopReplica:
    """Kill the ranks of an incarnation and give back what they hold."""

    replica_id: ReplicaId
    incarnation: Incarnation
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class TakeDown:
    """End every replica, then the controller itself."""

    reason: str


ControllerCommand = SendToReplica | Placed | Rejected | ReplicaLost | StopReplica | TakeDown
