"""A request as its consumer owns it, what it is checked against at the door, and how it ends."""

import dataclasses
import enum

from rayserve_paged.core.attachments import Attachment, check_attachments
from rayserve_paged.core.attention_window import (
    ONE_FULL_GROUP,
    AttentionWindow,
    longest_held,
    num_blocks_held,
)
from rayserve_paged.core.beam_params import most_blocks, most_tokens
from rayserve_paged.core.block_identity import NO_SCOPE, Adapter, RequestScope
from rayserve_paged.core.delivered import DeliveredSample, check_delivered
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.field_checks import check_integer, check_number, check_token_ids
from rayserve_paged.core.ids import Attempt, ConsumerId, RequestId
from rayserve_paged.core.retention import RetentionRange, check_retention
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.tenant_quota import TenantQuota
from rayserve_paged.core.token_ids import TokenIds

MAX_PRIORITY = 2**31 - 1
MAX_DEADLINE_S = 1e9
MAX_WINDOW = 2**31 - 1


class FinishReason(enum.StrEnum):
    """Why a stream ended. Every request ends in exactly one of these."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's limit."""
    CANCELLED = "cancelled"
    """The consumer asked, or its lease ran out."""
    DEADLINE = "deadline"
    """The time that the consumer gave it was over; what it had until then is kept."""
    ERROR = "error"
    """The request failed; the stream item carries the error."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a replica can hold, against which a request is checked at the door.

    Args:
        vocab_size: Ids run from 0 to vocab_size - 1; padding rows of a matrix do not count.
        max_model_len: Prompt and output tokens that the model's positions allow.
        num_blocks: Blocks of the smallest rank's pool.
        block_size: Slots per block.
        eos_token_ids: Ids that end a sequence.
        max_num_seqs: Sequences that run at once, and so the samples of one request at most.
        adapters: Those that are loaded; None where any may be asked for, as with a model whose
            adapters have no weights.
        takes_attachments: Whether content may stand behind tokens of a prompt.
        layer_groups: What the layers of each group attend to. The groups have equal numbers of
            layers, and each block holds the layers of one.
        max_pinned_blocks: Blocks of the pool that pinned prefixes may hold.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    adapters: tuple[Adapter, ...] | None = ()
    takes_attachments: bool = False
    layer_groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP
    max_pinned_blocks: int = 0

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that a request may need: the pool's, without those that may be pinned."""
        return self.num_blocks - self.max_pinned_blocks

    @property
    def num_slots(self) -> int:
        """KV slots of the pool."""
        return self.num_blocks * self.block_size

    @property
    def num_usable_slots(self) -> int:
        """KV slots that a request may need."""
        return self.num_usable_blocks * self.block_size

    @property
    def served_len(self) -> int:
        """The limit to advertise: the model's, or the pool's where that is smaller."""
        return longest_held(
            self.layer_groups, self.num_usable_blocks, self.block_size, self.max_model_len
        )


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
        scope: Whose KV it is, with which adapter it is computed, and what its tokens attend to.
            Blocks are shared only between requests of equal scope.
        attachments: Content behind tokens of the prompt, in their order.
        tenant: Who is charged under weighted-fair queueing, and by the quota; None for the salt, or
            nobody.
        quota: What its tenant may use; None for no limits.
        deadline_s: Seconds from this submission within which it is of use; what is not done then
            is given up. Counted by the replica that takes it, since no two machines share a clock:
            who submits it again gives the time that is left. None for no limit.
        retention: Ranges of its tokens whose blocks are to stay cached for longer or shorter than
            others, in their order.
        delivered: What the consumer has from attempts before: each sample that has not finished,
            in their order. Empty for a first attempt, of which all samples are wanted.
        num_deaths: Attempts in a row that died with their replica before they delivered anything
            new; from one on the request is a suspect.
    """

    request_id: RequestId
    consumer_id: ConsumerId
    attempt: Attempt
    prompt_token_ids: TokenIds
    params: SamplingParams
    priority: int = 0
    scope: RequestScope = NO_SCOPE
    attachments: tuple[Attachment, ...] = ()
    tenant: str | None = None
    quota: TenantQuota | None = None
    deadline_s: float | None = None
    retention: tuple[RetentionRange, ...] = ()
    delivered: tuple[DeliveredSample, ...] = ()
    num_deaths: int = 0

    @property
    def is_tried_long(self) -> bool:
        """Whether, being suspect, it is shown to be harmless by its end alone: it may have ended
        replicas after its first token, or it searches, and its reader has none before the end.
        """
        return self.has_tokens or self.params.beam_width is not None

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ended the replica of its last attempt."""
        return self.num_deaths > 0

    @property
    def has_tokens(self) -> bool:
        """Whether output tokens of it were delivered before."""
        return any(sample.token_ids for sample in self.delivered)

    @property
    def num_rows(self) -> int:
        """Sequences that run at once for what is wanted of it."""
        if self.delivered and self.params.beam_width is None:
            return len(self.delivered)
        return self.params.num_rows

    @property
    def num_promised_tokens(self) -> int:
        """Tokens to be computed for it at most: its prompt once, and the output of each row."""
        return len(self.prompt_token_ids) + self.num_rows * (self.params.max_tokens or 0)

    def end_ids(self, limits: ModelLimits) -> frozenset[int]:
        """Return the ids that end its outputs."""
        eos = () if self.params.ignore_eos else limits.eos_token_ids
        return frozenset((*eos, *self.params.stop_token_ids))

    def windows(self, layer_groups: tuple[AttentionWindow, ...]) -> tuple[AttentionWindow, ...]:
        """Return what each layer group attends to for this request."""
        return self.scope.windows(layer_groups)

    def num_blocks_needed(self, limits: ModelLimits) -> int:
        """Return the blocks that one of its samples, or all of its beams, need at once, at their
        full length.

        Args:
            limits: Of the replica; `params.max_tokens` is set.
        """
        assert self.params.max_tokens is not None
        # The last token sampled needs no slot.
        num_tokens = len(self.prompt_token_ids) + self.params.max_tokens - 1
        windows = self.windows(limits.layer_groups)
        alone = num_blocks_held(windows, num_tokens, limits.block_size)
        width, max_tokens = self.params.beam_width, self.params.max_tokens
        if width is None or max_tokens == 1:
            return alone
        if any(window.size is not None for window in windows):
            # Beams that gave way come back without counting on each other (`BeamGroup.leave`).
            return width * alone
        num_prompt = len(self.prompt_token_ids)
        sharing = most_blocks(num_prompt, max_tokens, width, limits.block_size)
        return sharing * len(limits.layer_groups)

    def num_tenant_blocks(self, limits: ModelLimits) -> int:
        """Return the blocks that count as its tenant's: what all its samples need, at their full
        length, but no more than its replica has. 0 for nobody's.

        Args:
            limits: Of the replica; `params.max_tokens` is set.
        """
        if self.tenant is None:
            return 0
        num_alike = 1 if self.params.beam_width is not None else self.num_rows
        return min(num_alike * self.num_blocks_needed(limits), limits.num_usable_blocks)


def admit(request: Request, limits: ModelLimits) -> Request:
    """Check a request against what can be held, and clamp its max_tokens.

    Args:
        request: As the consumer submitted it.
        limits: Of the replicas that may take it.

    Returns:
        The request with `max_tokens` set to the number of tokens that it may have.

    Raises:
        InvalidInputError: Empty prompt, an id outside the vocabulary, prompt over the limit, more
            tokens than its tenant has for a minute, a quota without a tenant, a
            priority or a salt of another type, an adapter that is not loaded, attachments that
            the model does not take or the prompt does not hold, a window below 1, sinks without
            a window, ranges of retention that overlap or lie outside the prompt, delivered
            tokens that no attempt before can have delivered.
        CapacityError: It can never fit into the pool.
    """
    num_prompt = len(request.prompt_token_ids)
    params = request.params
    check_terms(request.priority, request.scope, request.tenant, request.deadline_s, request.quota)
    _check_loaded(request.scope.adapter, limits.adapters)
    check_attachments(request.attachments, num_prompt, supported=limits.takes_attachments)
    check_retention(request.retention, num_prompt)
    request.prompt_token_ids.check(limits.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", [i for i, _bias in params.biases], limits.vocab_size)
    allowed = params.allowed_token_ids
    if allowed is not None:
        check_token_ids("allowed_token_ids", allowed, limits.vocab_size)
        if params.min_tokens > 1 and request.end_ids(limits).issuperset(allowed):
            accepted = f"an id that does not end the output before min_tokens={params.min_tokens}"
            raise InvalidInputError("allowed_token_ids", allowed, accepted)
    if num_prompt == 0:
        raise InvalidInputError("prompt_token_ids", [], "at least one token")
    if params.num_rows > limits.max_num_seqs:
        field = "n" if params.best_of is None else "best_of"
        field = field if params.beam_width is None else "beam_width"
        accepted = f"at most {limits.max_num_seqs}, the sequences that run at once"
        raise InvalidInputError(field, params.num_rows, accepted)
    if params.beam_width is not None and params.n > limits.vocab_size:
        accepted = f"at most {limits.vocab_size} with beam_width, the size of the vocabulary"
        raise InvalidInputError("n", params.n, accepted)
    if num_prompt >= limits.max_model_len:
        raise InvalidInputError(
            "prompt",
            f"{num_prompt} tokens",
            f"at most {limits.max_model_len - 1} tokens, since the model's limit of "
            f"{limits.max_model_len} includes at least one output token",
        )
    left = limits.max_model_len - num_prompt
    asked_for = _fitting_tokens(request, limits) if params.max_tokens is None else params.max_tokens
    max_tokens = min(asked_for, left)
    _check_minute(request, max_tokens)
    if max_tokens != params.max_tokens or params.min_tokens > max_tokens:
        params = dataclasses.replace(
            params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens)
        )
        request = dataclasses.replace(request, params=params)
    check_delivered(request.delivered, params, request.end_ids(limits), limits.vocab_size)
    needed, usable = request.num_blocks_needed(limits), limits.num_usable_blocks
    if needed > usable:
        raise CapacityError(
            num_prompt,
            max_tokens,
            needed,
            usable,
            limits.block_size,
            params.beam_width or 1,
            limits.max_pinned_blocks,
        )
    return request


def _fitting_tokens(request: Request, limits: ModelLimits) -> int:
    """Return the most output tokens for which there are blocks, at least 1."""
    num_prompt, width = len(request.prompt_token_ids), request.params.beam_width or 1
    windows, block_size = request.windows(limits.layer_groups), limits.block_size
    usable, quota = limits.num_usable_blocks, request.quota
    if quota is not None and (share := quota.num_blocks(usable)) < usable:
        # Of this replica's blocks alone, which all live ones together have more of.
        usable = share if request.params.beam_width is not None else share // request.num_rows
    if width > 1 and all(window.size is None for window in windows):
        num_blocks = usable // len(windows)
        fitting = most_tokens(num_prompt, width, block_size, num_blocks)
    else:
        # Beams with a window do not count on sharing anything.
        longest = longest_held(windows, usable // width, block_size, limits.max_model_len)
        # The last token sampled needs no slot, hence the one beyond the pool.
        fitting = longest + 1 - num_prompt
    most = None if quota is None else quota.most_output_tokens(num_prompt, request.num_rows)
    return max(1, fitting if most is None else min(fitting, most))


def _check_minute(request: Request, max_tokens: int) -> None:
    """Check that a tenant may have so many tokens in one minute: if not, it never may."""
    if request.quota is None:
        return
    most = request.quota.most_output_tokens(len(request.prompt_token_ids), request.num_rows)
    if most is not None and max_tokens > most:
        raise InvalidInputError(
            "max_tokens",
            max_tokens,
            f"at most {most} after this prompt of {len(request.prompt_token_ids)} tokens"
            f"{f', in each of {request.num_rows} samples' if request.num_rows > 1 else ''}, since "
            f"tenant {request.tenant!r} has tokens_per_minute={request.quota.tokens_per_minute}",
        )


def check_terms(
    priority: object, scope: object, tenant: object, deadline_s: object, quota: object = None
) -> None:
    """Check of a request what depends neither on its prompt nor on its model.

    Raises:
        InvalidInputError: Naming the field.
    """
    accepted = f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
    check_integer("priority", priority, accepted, -MAX_PRIORITY, MAX_PRIORITY)
    if not isinstance(scope, RequestScope):
        raise InvalidInputError("scope", scope, "a RequestScope")
    salt: object = scope.tenant_salt
    if not isinstance(salt, str | None):
        raise InvalidInputError("tenant_salt", salt, "a string, or None")
    adapter: object = scope.adapter
    if not isinstance(adapter, Adapter | None):
        raise InvalidInputError("adapter", adapter, "an Adapter, or None")
    if scope.window is not None:
        _check_window(scope.window)
    if tenant is not None and not (isinstance(tenant, str) and tenant):
        raise InvalidInputError("tenant", tenant, "a non-empty string, or None")
    if not isinstance(quota, TenantQuota | None):
        raise InvalidInputError("quota", quota, "a TenantQuota, or None")
    if quota is not None and tenant is None:
        raise InvalidInputError("quota", quota, "None for a request without a tenant")
    if deadline_s is not None:
        accepted = f"a number of seconds above 0 and up to {MAX_DEADLINE_S:g}, or None"
        if check_number("deadline_s", deadline_s, accepted, 0.0, MAX_DEADLINE_S) == 0.0:
            raise InvalidInputError("deadline_s", deadline_s, accepted)


def _check_window(window: object) -> None:
    if not isinstance(window, AttentionWindow):
        raise InvalidInputError("scope.window", window, "an AttentionWindow, or None")
    accepted = f"an integer from 1 to {MAX_WINDOW}, or None"
    if window.size is not None:
        check_integer("window", window.size, accepted, 1, MAX_WINDOW)
    accepted = f"an integer from 0 to {MAX_WINDOW}"
    check_integer("num_sink_tokens", window.num_sink_tokens, accepted, 0, MAX_WINDOW)
    if window.size is None and window.num_sink_tokens:
        accepted = "0 where there is no window, since every token is attended to"
        raise InvalidInputError("num_sink_tokens", window.num_sink_tokens, accepted)


def _check_loaded(adapter: Adapter | None, loaded: tuple[Adapter, ...] | None) -> None:
    if adapter is not None and loaded is not None and adapter not in loaded:
        names = ", ".join(f"{one.adapter_id!r} of version {one.version!r}" for one in loaded)
        accepted = f"None, or one that is loaded ({names or 'there is none'})"
        raise InvalidInputError("adapter", adapter, accepted)
