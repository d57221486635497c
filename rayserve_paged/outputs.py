"""What a reader of requests gets: chunks of a stream, whole outputs, the ledger in figures."""

import dataclasses
from collections.abc import Mapping

from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """What became of one of the parallel samples of a request.

    Args:
        sibling: Which of the samples drawn it is, from 0; of a beam search its rank.
        token_ids: Output tokens. Where an end id or stop id ended the output it is the last of
            them; where a stop string did, the token that completed it is.
        text: Text of the output, cut before the stop string that ended it; special tokens have
            none.
        finish_reason: Why it ended.
        tpot_s: Mean seconds from one token to the next; None with fewer than two tokens, and of a
            beam search, whose tokens come all at once.
        logprobs: One for each of `token_ids` where asked for, else None.
        cumulative_logprob: Sum of the log-probabilities of `token_ids`, where these were asked
            for, the samples were ranked by it or a beam search found them, else None.
        error: Reason, where finish_reason is ERROR.
    """

    sibling: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    tpot_s: float | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    error: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A cached prefix that is kept.

    Args:
        pin_id: Its name, to unpin it.
        num_tokens: Tokens that each replica keeps of it; 0 where it was not cached.
    """

    pin_id: str
    num_tokens: Mapping[ReplicaId, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one request.

    The first sample's `token_ids`, `text`, `finish_reason`, `tpot_s`, `logprobs` and
    `cumulative_logprob` are also found here: all there is to know where one sample was asked for.

    Args:
        request_id: As given by the user, or as drawn.
        prompt: Text of the prompt (a chat's after its template), None where ids were given.
        prompt_token_ids: The prompt as the model read it.
        samples: `n` samples, in the order of their draws; the hypotheses of a beam search, the best
            first. Of `best_of` samples that are more than
            `n`, those with the highest `cumulative_logprob`, the highest first; one that failed or
            was cancelled comes behind all that were not.
        prompt_logprobs: Where asked for, one for each of `prompt_token_ids`, of which the first is
            None, since nothing comes before it; else None, as where the request ended before its
            first output token.
        num_cached_tokens: Prompt tokens that came from the prefix cache; their KV was not computed.
        replica: Who served it, None where it reached none.
        ttft_s: Seconds from submission to the first token, None where there was none.
        error: Why it failed: the reason of the first of all samples drawn that did. None where
            none failed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    samples: tuple[SampleOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    num_cached_tokens: int
    replica: str | None
    ttft_s: float | None
    error: str | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output tokens of the first sample."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.samples[0].finish_reason

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds from one token of the first sample to the next."""
        return self.samples[0].tpot_s

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the first sample, where asked for."""
        return self.samples[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the first sample's tokens, where known."""
        return self.samples[0].cumulative_logprob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """What is new of one sample of a stream. The chunks of a sample together are its output.

    Args:
        request_id: As given by the user, or as drawn.
        sibling: Which of the request's parallel samples, from 0.
        text: New text: never a part of a character, nor what may become a stop string.
        token_ids: New output tokens; their text may follow in a later chunk.
        logprobs: One for each new token where asked for, else empty.
        finish_reason: Why the sample ended, on its last chunk.
        output: The whole output, on the last chunk of all.
        prompt_logprobs: Of the prompt tokens but the first, where asked for; on one chunk.
    """

    request_id: str
    sibling: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    output: RequestOutput | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DeploymentAccounting:
    """The ledgers of all replicas, each taken at the end of one of its steps.

    Args:
        replicas: The figures of each replica's pools, by replica id.
    """

    replicas: Mapping[ReplicaId, Accounting]

    @property
    def unique_live_tokens(self) -> int:
        """Slots that hold a token of a sequence, each counted once, over all replicas."""
        return sum(ledger.unique_live_tokens for ledger in self.replicas.values())

    @property
    def allocated_slots(self) -> int:
        """Slots of the blocks that sequences hold, over all replicas."""
        return sum(ledger.allocated_slots for ledger in self.replicas.values())

    @property
    def internal_fragmentation_slots(self) -> int:
        """Allocated slots that hold no token, over all replicas."""
        return sum(ledger.internal_fragmentation_slots for ledger in self.replicas.values())

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and that later requests may find, over all replicas."""
        return sum(ledger.num_cached_blocks for ledger in self.replicas.values())

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that pins hold, over all replicas."""
        return sum(ledger.num_pinned_blocks for ledger in self.replicas.values())

    @property
    def prefix_sharing_saved_slots(self) -> int:
        """Slots that sequences would hold more without sharing, over all replicas."""
        return sum(ledger.prefix_sharing_saved_slots for ledger in self.replicas.values())
