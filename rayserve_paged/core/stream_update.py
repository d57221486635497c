"""What a consumer hands to whoever reads its streams."""

from typing import NamedTuple

from rayserve_paged.core.controller_messages import SubmitRequest, WithdrawRequest
from rayserve_paged.core.errors import PoisonedRequestError
from rayserve_paged.core.ids import ReplicaId, RequestId
from rayserve_paged.core.open_request import OpenRequest, Stream
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs


class StreamUpdate(NamedTuple):
    """What is new of one request, each token exactly once. One is made for each stream of each
    delivery, hence a tuple.

    Args:
        request_id: The request.
        sibling: Which of its parallel samples.
        replica_id: Who serves it; None where it was given to none.
        token_ids: New output tokens.
        logprobs: One for each of them where asked for, else empty.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        finish: Set once, on the last update of the sibling.
        error: Reason, where finish is ERROR or CANCELLED.
        prompt_logprobs: Of the prompt tokens but the first, where asked for; with one sibling.
        cause: The same as `error`, to be raised, where the request was refused or given up.
    """

    request_id: RequestId
    sibling: int
    replica_id: ReplicaId | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    error: str | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cause: BaseException | None = None


class Outgoing(NamedTuple):
    """What time brings about.

    Args:
        messages: To be sent to the controller.
        updates: Ends of requests that nobody serves.
    """

    messages: list[SubmitRequest | WithdrawRequest]
    updates: list[StreamUpdate]


def end_of(
    known: OpenRequest,
    sibling: int,
    stream: Stream,
    finish: FinishReason,
    error: BaseException | None,
) -> StreamUpdate:
    """Return the last update of a sample that ends here, and not where it was served."""
    reason = error.reason if isinstance(error, PoisonedRequestError) else error
    return StreamUpdate(
        known.opened.request_id,
        sibling,
        None if known.lost_at is None else known.lost_at[0],
        (),
        (),
        stream.num_cached_tokens,
        finish,
        None if reason is None else str(reason),
        cause=error,
    )
