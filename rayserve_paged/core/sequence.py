"""One sequence as its replica keeps it: known tokens, key chain, block table."""

import copy
import enum
from collections.abc import Sequence

from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.block_identity import extend_chain, hash_block, token_payload
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockKey, ConsumerId, Row, StepId
from rayserve_paged.core.partial_index import BlockContent
from rayserve_paged.core.prompt_scores import PromptScores
from rayserve_paged.core.request import FinishReason, ModelLimits, Request
from rayserve_paged.core.retention import RetentionPlan
from rayserve_paged.core.stream_messages import StreamName


class Phase(enum.Enum):
    """Where a sequence is. It holds blocks while RUNNING, and at no other time."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class SequenceState:
    """The state of one request on one replica.

        prompt tokens | output tokens
        0 ........................... num_known
        0 ... num_computed                        KV is in the blocks
        0 .. num_sealed x P                       blocks are keyed and immutable

    Args:
        request: Checked and clamped; `params.max_tokens` and `params.seed` are set.
        prompt_keys: Keys of the prompt's full blocks.
        root: Parent key of the first block.
        arrival: Order of arrival on this replica.
        eos_token_ids: Ids that end it, unless `ignore_eos`.
        block_size: Slots per block.
        num_siblings: Parallel samples of the request. This sequence is the first; the others
            are forked from it when the prompt is computed.
        layer_groups: What the layers of each group of the model attend to at most.
        sibling: Which sample it is, where it is not the first or goes on after another attempt.
        delivered: Output tokens that its consumer has from attempts before.

    With a `beam_width` it is one beam of `beam`, the search that all beams of the request share;
    the first one begins it.
    """

    __slots__ = (
        "arrival",
        "beam",
        "finish",
        "keys",
        "max_known",
        "min_known",
        "name",
        "num_cached_tokens",
        "num_delivered",
        "num_preemptions",
        "num_prompt",
        "num_sealed",
        "num_unborn",
        "phase",
        "priority",
        "request",
        "retention",
        "root",
        "row",
        "scores",
        "sibling",
        "stop_ids",
        "table",
        "tokens",
        "waits_since",
        "windows",
        "withdrawn",
    )

    def __init__(
        self,
        request: Request,
        prompt_keys: tuple[BlockKey, ...],
        root: BlockKey,
        arrival: int,
        eos_token_ids: tuple[int, ...],
        block_size: int,
        num_siblings: int = 1,
        layer_groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP,
        sibling: int = 0,
        delivered: Sequence[int] = (),
    ) -> None:
        params = request.params
        assert params.max_tokens is not None, "requests are clamped at the door"
        self.request = request
        self.sibling = sibling
        self.name = StreamName(request.request_id, request.attempt, sibling)
        self.num_unborn = num_siblings - 1
        # Siblings that were cancelled before they were born, this one perhaps among them.
        self.withdrawn: frozenset[int] = frozenset()
        self.arrival = arrival
        # The request's own, unless the queue's policy does not look at it or time has raised it.
        self.priority = request.priority
        self.root = root
        self.keys = list(prompt_keys)
        self.tokens = request.prompt_token_ids.unpacked()
        self.num_prompt = len(self.tokens)
        self.tokens.extend(delivered)
        self.num_delivered = len(delivered)
        self.max_known = self.num_prompt + params.max_tokens
        self.min_known = self.num_prompt + params.min_tokens
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        self.windows = request.windows(layer_groups)
        self.retention: RetentionPlan | None = None
        if request.retention:
            self.retention = RetentionPlan(request.retention, block_size)
        self.table = BlockTable(block_size, (), self.windows)
        if delivered:
            self.extend_keys()
        self.phase = Phase.WAITING
        self.row: Row | None = None
        self.num_sealed = 0
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None
        self.finish: FinishReason | None = None
        # Step before which it first waited for a prefix that another sequence computes.
        self.waits_since: StepId | None = None
        # Of the sequence that computes the prompt alone, where they were asked for.
        self.scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            self.scores = PromptScores(self.num_prompt)
        self.beam: BeamGroup | None = None
        if params.beam_width is not None:
            # Its streams are told of at the end; beams are forked as the search goes.
            self.num_unborn = 0
            self.beam = BeamGroup(self)

    @property
    def consumer_id(self) -> ConsumerId:
        """Who reads the stream."""
        return self.request.consumer_id

    @property
    def tenant(self) -> str:
        """Who is charged for it; empty where nobody is named."""
        return self.request.tenant or self.request.scope.tenant_salt or ""

    @property
    def num_known(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_matchable(self) -> int:
        """Known tokens of which all but the last may be taken from the prefix cache.

        What is taken has no logits, so tokens that are still to be scored are none of them.
        """
        if self.scores is None or self.scores.is_complete:
            return self.num_known
        return self.scores.num_done + 1

    @property
    def num_promised_outputs(self) -> int:
        """Output tokens that it, and what is to be forked from it, may still get."""
        num_samples = 1 + self.num_unborn - len(self.withdrawn)
        if self.beam is not None:
            num_samples = self.beam.rules.width
        return (self.max_known - len(self.tokens)) * num_samples

    @property
    def together(self) -> tuple["SequenceState", ...]:
        """Those that start, give way and end as one with this sequence, itself among them."""
        return (self,) if self.beam is None else self.beam.sequences

    @property
    def num_rows_beside(self) -> int:
        """Rows that must be free besides its own before it starts."""
        return self.num_unborn if self.beam is None else self.beam.rules.width - 1

    def order_key(self) -> tuple[int, int, int]:
        """Return what decides who goes first: priority, then arrival, then sibling."""
        return self.priority, self.arrival, self.sibling

    def fork(
        self, sibling: int, table: BlockTable, num_known: int | None = None
    ) -> "SequenceState":
        """Return a sibling on a table of its own.

        Args:
            sibling: Its number.
            table: The blocks of its tokens.
            num_known: Tokens that it takes over; the prompt's where None.
        """
        child = copy.copy(self)
        child.sibling = sibling
        child.name = StreamName(self.request.request_id, self.request.attempt, sibling)
        child.num_unborn = 0
        child.withdrawn = frozenset()
        child.keys = list(self.keys)
        child.tokens = self.tokens[: self.num_prompt if num_known is None else num_known]
        child.table = table
        child.row = None
        child.num_preemptions = 0
        return child

    def key(self, block_index: int) -> BlockKey:
        """Return the key of a full block of known tokens, extending the chain where needed."""
        if block_index >= len(self.keys):
            block_size = self.table.block_size
            start = len(self.keys) * block_size
            parent = self.keys[-1] if self.keys else self.root
            tokens = self.tokens[start : (block_index + 1) * block_size]
            # The prompt's last block, which outputs may fill, can hold attached content.
            attachments = self.request.attachments
            if attachments or len(tokens) > block_size:
                self.keys += extend_chain(parent, tokens, block_size, attachments, start)
            else:
                self.keys.append(hash_block(parent, token_payload(tokens)))
        return self.keys[block_index]

    def extend_keys(self) -> None:
        """Extend the chain over all blocks that it may find cached: all but the last token."""
        num_full = (self.num_known - 1) // self.table.block_size
        if num_full > len(self.keys):
            self.key(num_full - 1)

    def content(self, block_index: int, end: int) -> BlockContent:
        """Return what a block holds of the known tokens before `end`, for partial reuse.

        It ends before the first token with attached content: the same token stands for something
        else there in another sequence, and only a whole block's key tells which.
        """
        start = block_index * self.table.block_size
        end = min(end, start + self.table.block_size)
        for attachment in self.request.attachments:
            if attachment.offset + attachment.num_tokens > start:
                end = min(end, max(start, attachment.offset))
                break
        parent = self.key(block_index - 1) if block_index else self.root
        return BlockContent(parent, self.tokens[start:end])

    @property
    def ended_before(self) -> FinishReason | None:
        """Why what was delivered of it ends it already; None where it goes on."""
        return self.finish_reason(self.tokens[-1]) if self.num_outputs else None

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """Return why the sequence ends with this token, which it already knows; None if not."""
        num_known = len(self.tokens)
        if num_known >= self.min_known and token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_known >= self.max_known else None


def begin(
    request: Request,
    prompt_keys: tuple[BlockKey, ...],
    root: BlockKey,
    arrival: int,
    limits: ModelLimits,
) -> list[SequenceState]:
    """Return the sequences that an attempt at a request begins with.

    Its samples share one until the prompt is computed. Where some have outputs from attempts
    before, each goes on by itself, as after a preemption.

    Args:
        request: As `SequenceState`; likewise all others.
        prompt_keys: Of the prompt's full blocks.
        root: Parent key of the first block.
        arrival: Order of arrival on this replica.
        limits: Of the replica.
    """
    num_siblings = request.params.num_siblings

    def make(sibling: int, num_siblings: int, delivered: tuple[int, ...]) -> SequenceState:
        return SequenceState(
            request,
            prompt_keys,
            root,
            arrival,
            limits.eos_token_ids,
            limits.block_size,
            num_siblings,
            limits.layer_groups,
            sibling,
            delivered,
        )

    if request.has_tokens:
        return [make(one.sibling, 1, one.token_ids) for one in request.delivered]
    leader = make(0, num_siblings, ())
    if request.delivered:
        ended = set(range(num_siblings)).difference(one.sibling for one in request.delivered)
        if leader.beam is not None:
            leader.beam.withdrawn |= ended
        else:
            leader.withdrawn = frozenset(ended)
    return [leader]
