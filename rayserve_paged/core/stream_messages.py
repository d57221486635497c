"""What a consumer reads of its requests: new tokens, ends, and the deliveries that carry them."""

from __future__ import annotations

import dataclasses

from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import IntArray, TokenLogprobs


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
        fenced: Why nothing follows these items: the incarnation has ended. None while it lives.
    """

    replica_id: ReplicaId
    incarnation: Incarnation
    sequence: int
    items: tuple[StreamItem | TokenRun, ...]
    fenced: str | None = None
