"""What a replica takes in, and what it asks for.

Shells carry these between machines and processes without looking inside.
"""

from __future__ import annotations

import dataclasses

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import NO_SCOPE, BlockScope, RequestScope
from rayserve_paged.core.errors import PinLimitError
from rayserve_paged.core.ids import (
    Attempt,
    BlockKey,
    ConsumerId,
    Incarnation,
    PinId,
    ReplicaId,
    RequestId,
    StepId,
    Term,
)
from rayserve_paged.core.request import ModelLimits, Request
from rayserve_paged.core.step_messages import StepPlan, StepResult
from rayserve_paged.core.stream_messages import Delivery
from rayserve_paged.core.token_ids import TokenIds


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
        unwanted: Attempts that it delivered and that its consumer did not accept from here.
    """

    consumer_id: ConsumerId
    poll_id: int
    ack: int
    unwanted: tuple[tuple[RequestId, Attempt], ...] = ()


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
    """The incarnation ends for this reason; its requests go on elsewhere, as later attempts."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class AskInventory:
    """The controller wants to know anew what the replica has; answered by RegisterReplica.

    Args:
        number: Names the answer.
        with_keys: Whether to list all published keys as well.
    """

    number: int
    with_keys: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerMessage:
    """What a controller has to say to a replica, which ignores older terms than it has met.

    The first message of a new term is answered by RegisterReplica, since a controller that was
    started anew knows nothing.
    """

    term: Term
    event: AssignRequest | CancelRequest | FenceReplica | AskInventory


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
        token_ids: The prefix; its full blocks that are computed now are kept.
        scope: Of the requests that begin with it.
        attachments: Content behind its tokens, in their order.
    """

    pin_id: PinId
    token_ids: TokenIds
    scope: RequestScope = NO_SCOPE
    attachments: tuple[Attachment, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class UnpinPrefix:
    """Let go of a pin. Unknown names are ignored."""

    pin_id: PinId


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; leases and reports are looked at."""


ReplicaEvent = (
    ControllerMessage
    | AssignRequest
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
        prefilled: Requests that had their first token here since the last report: their prompts
            are computed.
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
    prefilled: tuple[tuple[RequestId, Attempt], ...]
    finished: tuple[tuple[RequestId, Attempt], ...]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_resumed_tokens: int
    fenced: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that a replica has and that has not ended, as its inventory lists it.

    Args:
        request_id: The request.
        attempt: Which attempt of it.
        consumer_id: Who reads it.
        num_rows: Sequences that run for it at once.
        num_tokens: Prompt and output tokens promised to it.
        max_tokens: Output tokens that each of its samples may have.
        is_prefilled: It has had its first token here.
        on_trial: It is suspected of having ended a replica, and has no token from here yet.
        is_tried_long: As `Request.is_tried_long`.
        tenant: Whose it is; None for nobody's.
        num_blocks: That count as its tenant's while it lives.
    """

    request_id: RequestId
    attempt: Attempt
    consumer_id: ConsumerId
    num_rows: int
    num_tokens: int
    max_tokens: int
    is_prefilled: bool
    on_trial: bool
    is_tried_long: bool = False
    tenant: str | None = None
    num_blocks: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """All that a controller needs to know of a replica that it has not followed.

    Args:
        number: Of the question; None where a new term was the reason.
        served: Its requests.
        keys: All published keys; None where they were not asked for.
        num_reports: Reports made before; the next one has this sequence number.
    """

    number: int | None
    served: tuple[ServedRequest, ...]
    keys: tuple[BlockKey, ...] | None
    num_reports: int


@dataclasses.dataclass(frozen=True, slots=True)
class RegisterReplica:
    """A replica is ready to take requests, or says anew what it has.

    Args:
        replica_id: The replica.
        incarnation: Its life.
        limits: What it can hold.
        scope: Identity of its KV.
        inventory: None for one that has just started and has nothing.
    """

    replica_id: ReplicaId
    incarnation: Incarnation
    limits: ModelLimits
    scope: BlockScope
    inventory: Inventory | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PinAnswered:
    """The answer to PinPrefix, at once.

    Args:
        pin_id: Of the pin.
        num_tokens: Tokens in the blocks that it holds; 0 where none is cached, and then the name
            is free.
        refused: Why it holds none; None where it was not refused.
    """

    pin_id: PinId
    num_tokens: int
    refused: PinLimitError | None


ReplicaCommand = RunStep | AnswerPoll | ReplicaReport | RegisterReplica | PinAnswered
