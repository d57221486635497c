"""What a reader of requests gets: chunks of a stream, whole outputs, the ledger in figures."""

import dataclasses
from collections.abc import Mapping

from rayserve_paged.core.accounting import Accounting
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.messages import TokenLogprobs
from rayserve_paged.core.request import FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one request.

    Args:
        request_id: As given by the user, or as drawn.
        prompt: Text of the prompt (a chat's after its template), None where ids were given.
        prompt_token_ids: The prompt as the model read it.
        token_ids: Output tokens. Where an end id or stop id ended the output it is the last of
            them; where a stop string did, the token that completed it is.
        text: Text of the output, cut before the stop string that ended it; special tokens have
            none.
        finish_reason: Why it ended.
        num_cached_tokens: Prompt tokens that came from the prefix cache; their KV was not computed.
        replica: Who served it, None where it reached none.
        ttft_s: Seconds from submission to the first token, None where there was none.
        tpot_s: Mean seconds from one token to the next, None with fewer than two tokens.
        logprobs: One for each of `token_ids` where asked for, else None.
        error: Reason, where finish_reason is ERROR.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    replica: str | None
    ttft_s: float | None
    tpot_s: float | None
    logprobs: tuple[TokenLogprobs, ...] | None
    error: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """What is new of one stream. The chunks together are the output.

    Args:
        request_id: As given by the user, or as drawn.
        text: New text: never a part of a character, nor what may become a stop string.
        token_ids: New output tokens; their text may follow in a later chunk.
        logprobs: One for each new token where asked for, else empty.
        output: The whole output, on the last chunk.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    output: RequestOutput | None


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
        """Slots of the held blocks, over all replicas."""
        return sum(ledger.allocated_slots for ledger in self.replicas.values())

    @property
    def internal_fragmentation_slots(self) -> int:
        """Allocated slots that hold no token, over all replicas."""
        return sum(ledger.internal_fragmentation_slots for ledger in self.replicas.values())

    @property
    def prefix_sharing_saved_slots(self) -> int:
        """Slots that sequences would hold more without sharing, over all replicas."""
        return sum(ledger.prefix_sharing_saved_slots for ledger in self.replicas.values())
