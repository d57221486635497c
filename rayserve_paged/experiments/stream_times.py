"""When the tokens of each request reached its reader, live or simulated, and what users see."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from rayserve_paged.core.ids import ReplicaId, RequestId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.stream_update import StreamUpdate


@dataclasses.dataclass(slots=True)
class RequestTimes:
    """One request.

    Args:
        arrival_s: When it was submitted.
        token_s: When each of its tokens came.
        num_cached_tokens: Of its prompt.
        replica_id: Who served it; None where it reached none.
        end_s: When it ended; None as long as it has not.
        finish: How it ended; None as long as it has not.
        error: Why it failed or was refused.
    """

    arrival_s: float
    token_s: list[float] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0
    replica_id: ReplicaId | None = None
    end_s: float | None = None
    finish: FinishReason | None = None
    error: str | None = None


class StreamTimes:
    """Takes down requests and the updates of their streams, each of one sample."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, RequestTimes] = {}

    def arrive(self, request_id: RequestId, now: float) -> None:
        """Take down that a request is submitted, in seconds of any clock."""
        self.requests[request_id] = RequestTimes(now)

    def watch(self, update: StreamUpdate, now: float) -> None:
        """Take down what is new of a request that has arrived."""
        request = self.requests[update.request_id]
        request.token_s += [now] * len(update.token_ids)
        request.num_cached_tokens = update.num_cached_tokens
        request.replica_id = update.replica_id
        if update.finish is not None:
            request.finish, request.error, request.end_s = update.finish, update.error, now

    def fail(self, request_id: RequestId, error: str, now: float) -> None:
        """Take down that a request was refused or lost."""
        request = self.requests[request_id]
        request.finish, request.error, request.end_s = FinishReason.ERROR, error, now


@dataclasses.dataclass(frozen=True, slots=True)
class UserFigures:
    """What the users of a run saw; times in seconds.

    Args:
        num_requests: In all.
        num_failed: That ended otherwise than by their length or a stop.
        ttft_mean_s: From submission to the first token, on average.
        ttft_p90_s: Its 90th percentile.
        itl_mean_s: From each token to the next, on average over all of them.
        itl_p90_s: Its 90th percentile.
        output_tokens_per_s: From the first arrival to the last token.
        token_hit_rate: Share of the prompts' tokens that came from a prefix cache.
    """

    num_requests: int
    num_failed: int
    ttft_mean_s: float
    ttft_p90_s: float
    itl_mean_s: float
    itl_p90_s: float
    output_tokens_per_s: float
    token_hit_rate: float


def user_figures(times: StreamTimes, num_prompt_tokens: int) -> UserFigures:
    """Return the figures of a run in which at least one request got two tokens.

    Args:
        times: Of its requests.
        num_prompt_tokens: Of all prompts together.
    """
    requests = list(times.requests.values())
    good = (FinishReason.LENGTH, FinishReason.STOP)
    ttft = np.array([r.token_s[0] - r.arrival_s for r in requests if r.token_s])
    gaps = np.concatenate([np.diff(r.token_s) for r in requests])
    span_s = max(r.token_s[-1] for r in requests if r.token_s) - min(r.arrival_s for r in requests)
    return UserFigures(
        num_requests=len(requests),
        num_failed=sum(r.finish not in good for r in requests),
        ttft_mean_s=float(ttft.mean()),
        ttft_p90_s=float(np.percentile(ttft, 90)),
        itl_mean_s=float(gaps.mean()),
        itl_p90_s=float(np.percentile(gaps, 90)),
        output_tokens_per_s=_num_tokens(requests) / span_s,
        token_hit_rate=sum(r.num_cached_tokens for r in requests) / num_prompt_tokens,
    )


def _num_tokens(requests: Iterable[RequestTimes]) -> int:
    return sum(len(request.token_s) for request in requests)
