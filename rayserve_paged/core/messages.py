"""Every message between the parts: what the state machines take in, and what they ask for.

Shells carry these between machines and processes without looking inside. All are frozen; the
arrays inside are never written after the message was made.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.block_identity import BlockScope
from rayserve_paged.core.ids import (
    Attempt,
    BlockKey,
    ConsumerId,
    Incarnation,
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
    """A sequence takes a row of the batch, on every rank.

    Args:
        row: The row; whatever it held before is gone.
        num_computed: Tokens whose KV is already in `block_ids` (a prefix hit).
        block_ids: int32 [num_blocks], the block table so far.
        params: For rank 0, which samples; its seed is set.
        num_prompt_tokens: Tokens before the first output; draws depend on the output position.
    """

    row: Row
    num_computed: int
    block_ids: IntArray
    params: SamplingParams
    num_prompt_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What every rank computes in one step; carries differences only.

    A rank applies `starts`, then the appended blocks, then computes, for each scheduled row i,
    `num_tokens[i]` tokens at positions `num_computed[i]`, `num_computed[i] + 1`, ...

    Args:
        step_id: Counts the steps of the incarnation.
        starts: Rows that begin or resume in this step.
        append_rows: int32 [num_appends], row that each appended block belongs to.
        append_blocks: int32 [num_appends], the blocks, in table order for each row.
        rows: int32 [num_scheduled], scheduled rows.
        num_computed: int32 [num_scheduled], tokens of each row in the cache before the step.
        num_tokens: int32 [num_scheduled], tokens of each row to compute, at least 1.
        samples: bool [num_scheduled], whether the row's last token yields a new one.
        token_ids: int32 [sum(num_tokens)], the tokens to compute, row after row.
    """

    step_id: StepId
    starts: tuple[RowStart, ...]
    append_rows: IntArray
    append_blocks: IntArray
    rows: IntArray
    num_computed: IntArray
    num_tokens: IntArray
    samples: npt.NDArray[np.bool_]
    token_ids: IntArray


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, in float.

    Args:
        logprob: Of the chosen token.
        top: (token id, log-probability) of the most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What rank 0 reports of a finished step.

    Args:
        step_id: Of the plan.
        token_ids: int32 [num_samples], one per row with `samples` set, in plan order.
        logprobs: For the rows that asked for them: index into `token_ids` -> log-probabilities.
        errors: For the rows whose sampling raised: index into `token_ids` -> reason. Their
            entry in `token_ids` means nothing.
    """

    step_id: StepId
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


# --- what a consumer reads ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class StreamItem:
    """New tokens of one request since the last delivery.

    Args:
        request_id: The request.
        attempt: A consumer drops items of an attempt that it did not accept.
        index: Output index of the first token here; a consumer drops what it already has.
        token_ids: New output tokens; may be empty on the last item.
        logprobs: One for each token where asked for, else empty.
        num_cached_tokens: Prompt tokens taken from the prefix cache at first admission.
        finish: Set on the last item.
        error: Reason, where finish is ERROR or CANCELLED.
    """

    request_id: RequestId
    attempt: Attempt
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    error: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """The answer to one poll.

    Args:
        replica_id: Who answers.
        incarnation: In which life.
        sequence: Grows with each delivery that holds items; acknowledged by the next poll.
        items: At most one per request and delivery not yet acknowledged.
    """

    replica_id: ReplicaId
    incarnation: Incarnation
    sequence: int
    items: tuple[StreamItem, ...]


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
    """Its consumer wants no more of a request. Unknown ids are ignored."""

    request_id: RequestId
    attempt: Attempt


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
class Tick:
    """Time has passed; leases and reports are looked at."""


ReplicaEvent = (
    AssignRequest | CancelRequest | PollTokens | StepFinished | StepFailed | FenceReplica | Tick
)

# --- out of a replica -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RunStep:
    """Run this plan on all ranks, then report StepFinished or StepFailed."""

    plan: StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
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
    fenced: str | None


ReplicaCommand = RunStep | AnswerPoll | ReplicaReport

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
    """A consumer cancels a request, wherever it is."""

    request_id: RequestId
    attempt: Attempt


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
