"""A request as its consumer owns it: prompt ids, sampling parameters, limits, finish reasons."""

import dataclasses
import enum
from collections.abc import Sequence

from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.ids import Attempt, ConsumerId, RequestId

MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 2**31 - 1


class FinishReason(enum.StrEnum):
    """Why a stream ended. Every request ends in exactly one of these."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's limit."""
    CANCELLED = "cancelled"
    """The consumer asked, or its lease ran out."""
    ERROR = "error"
    """The request failed; the stream item carries the error."""


def _integer(field: str, value: object, accepted: str, low: int, high: int | None = None) -> int:
    # bool is an int to Python and never one to a user.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(field, value, accepted)
    if value < low or (high is not None and value > high):
        raise InvalidInputError(field, value, accepted)
    return value


def _number(field: str, value: object, accepted: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInputError(field, value, accepted)
    # Written so that NaN fails: every comparison with it is false.
    if not low <= value <= high:
        raise InvalidInputError(field, value, accepted)
    return float(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it stops.

    Args:
        max_tokens: Most output tokens; None for all that the model's limit and the pool leave.
            Clamped to what the model's limit leaves after the prompt.
        min_tokens: Fewest output tokens: no end id, stop id or stop string ends it earlier.
        temperature: 0 is greedy.
        top_p: Nucleus: smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: Most likely tokens kept; 0 or -1 keeps all.
        seed: Draws depend on (seed, position) alone; the consumer draws one where this is None.
        ignore_eos: Go on past the model's end-of-sequence ids.
        stop: Strings that end the text; none of them is part of the output.
        stop_token_ids: Ids that end the output (the id itself is part of token_ids).
        logprobs: Log-probabilities of this many most likely tokens with each output token;
            0 for the chosen token's alone, None for none.

    Raises:
        InvalidInputError: Naming the field, the value and what would be accepted.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every field and bring `stop` and `stop_token_ids` into tuples."""
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, "an integer of at least 1, or None", 1)
        _integer("min_tokens", self.min_tokens, "an integer of at least 0", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            accepted = f"at most max_tokens={self.max_tokens}"
            raise InvalidInputError("min_tokens", self.min_tokens, accepted)
        temperature = _number(
            "temperature",
            self.temperature,
            f"a number from 0 to {MAX_TEMPERATURE:g}",
            0.0,
            MAX_TEMPERATURE,
        )
        accepted = "a number above 0 and at most 1"
        top_p = _number("top_p", self.top_p, accepted, 0.0, 1.0)
        if top_p == 0.0:
            raise InvalidInputError("top_p", self.top_p, accepted)
        _integer("top_k", self.top_k, "an integer of at least 1, or 0 or -1 for all", -1)
        if self.seed is not None:
            _integer("seed", self.seed, f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInputError("ignore_eos", self.ignore_eos, "true or false")
        if self.logprobs is not None:
            accepted = f"an integer from 0 to {MAX_LOGPROBS}, or None"
            _integer("logprobs", self.logprobs, accepted, 0, MAX_LOGPROBS)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    accepted = f"a non-empty string, or at most {MAX_STOP_STRINGS} of them"
    if not isinstance(strings, Sequence) or len(strings) > MAX_STOP_STRINGS:
        raise InvalidInputError("stop", stop, accepted)
    if not all(isinstance(string, str) and string for string in strings):
        raise InvalidInputError("stop", stop, accepted)
    return tuple(strings)


def _stop_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidInputError("stop_token_ids", ids, "a list of token ids")
    return tuple(_integer("stop_token_ids", i, "token ids of at least 0", 0) for i in ids)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a replica can hold, against which a request is checked at the door.

    Args:
        vocab_size: Ids run from 0 to vocab_size - 1; padding rows of a matrix do not count.
        max_model_len: Prompt and output tokens that the model's positions allow.
        num_blocks: Blocks of the smallest rank's pool.
        block_size: Slots per block.
        eos_token_ids: Ids that end a sequence.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """KV slots of the pool."""
        return self.num_blocks * self.block_size

    @property
    def served_len(self) -> int:
        """The limit to advertise: the model's, or the pool's where that is smaller."""
        return min(self.max_model_len, self.num_slots)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt at a request, as submitted by its consumer.

    Args:
        request_id: Unique among the live requests of the deployment.
        consumer_id: Who reads the stream.
        attempt: Counts the submissions of this request, from 0.
        prompt_token_ids: At least one id, each inside the vocabulary.
        params: Its `seed` is set (the consumer draws one).
        priority: Lower is served first; equal ones by arrival.
        tenant_salt: Blocks are shared only between requests of equal salt.
    """

    request_id: RequestId
    consumer_id: ConsumerId
    attempt: Attempt
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    tenant_salt: str | None = None


def admit(request: Request, limits: ModelLimits) -> Request:
    """Check a request against what can be held, and clamp its max_tokens.

    Args:
        request: As the consumer submitted it.
        limits: Of the replicas that may take it.

    Returns:
        The request with `max_tokens` set to the number of tokens that it may have.

    Raises:
        InvalidInputError: Empty prompt, an id outside the vocabulary, prompt over the limit, a
            priority or a salt of another type.
        CapacityError: It can never fit into the pool.
    """
    num_prompt = len(request.prompt_token_ids)
    params = request.params
    accepted = f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
    _integer("priority", request.priority, accepted, -MAX_PRIORITY, MAX_PRIORITY)
    if not isinstance(request.tenant_salt, str | None):
        raise InvalidInputError("tenant_salt", request.tenant_salt, "a string, or None")
    check_token_ids("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    if num_prompt == 0:
        raise InvalidInputError("prompt_token_ids", [], "at least one token")
    if num_prompt >= limits.max_model_len:
        raise InvalidInputError(
            "prompt",
            f"{num_prompt} tokens",
            f"at most {limits.max_model_len - 1} tokens, since the model's limit of "
            f"{limits.max_model_len} includes at least one output token",
        )
    left = limits.max_model_len - num_prompt
    if params.max_tokens is None:
        # The last token sampled needs no slot, hence the one beyond the pool.
        max_tokens = max(1, min(left, limits.num_slots + 1 - num_prompt))
    else:
        max_tokens = min(params.max_tokens, left)
    num_blocks_needed = -(-(num_prompt + max_tokens - 1) // limits.block_size)
    if num_blocks_needed > limits.num_blocks:
        raise CapacityError(
            num_prompt, max_tokens, num_blocks_needed, limits.num_blocks, limits.block_size
        )
    params = dataclasses.replace(
        params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens)
    )
    return dataclasses.replace(request, params=params)


def check_token_ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    """Raise InvalidInputError for the first id that is not an integer in [0, vocab_size)."""
    accepted = f"integers from 0 to {vocab_size - 1}"
    for token_id in ids:
        _integer(field, token_id, accepted, 0, vocab_size - 1)
