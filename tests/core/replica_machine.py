"""Rules for a replica under any order of events, and the oracle without blocks beside it."""

import dataclasses
import functools
import math
import random
from collections import Counter
from typing import Any, get_args

import pytest
from beam_oracle import toy_beams
from fingerprint_rank import Expected, oracle, prompt_oracle, visible
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replica_driver import (
    R0,
    TIMEOUTS,
    ReplicaDriver,
    Stream,
    make_limits,
    make_request,
    prompt_keys,
)

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import FULL_ATTENTION, ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.config import QueuePolicy
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.ids import Attempt, BlockKey, PinId, RequestId
from rayserve_paged.core.outbox import LEASES_TO_REMEMBER
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    AssignRequest,
    CancelRequest,
    FenceReplica,
    PinAnswered,
    PinPrefix,
    ResetCache,
    StepFailed,
    UnpinPrefix,
)
from rayserve_paged.core.request import FinishReason, ModelLimits, Request, admit
from rayserve_paged.core.retention import RetentionRange

POLICIES: tuple[QueuePolicy, ...] = get_args(QueuePolicy)
LEASE_S = TIMEOUTS.consumer_lease_s
CONSUMERS = ("c0", "c1")
LAYER_GROUPS = (
    ONE_FULL_GROUP,
    (AttentionWindow(3),),
    (FULL_ATTENTION, AttentionWindow(4, 1)),
    (AttentionWindow(2), FULL_ATTENTION, AttentionWindow(6)),
)
# Prompts are cut from these, so that they share prefixes of every length.
ENDINGS: tuple[tuple[float, bool | str], ...] = (
    (1.0, False),
    (0.0, True),
    (2.0, "never"),
    (-1.0, False),
)
# What a search may choose from.
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"stop_token_ids": tuple(range(1, 12))},
    {"min_tokens": 3, "stop_token_ids": (5, 6, 7)},
    {"allowed_token_ids": tuple(range(3, 11)), "stop_token_ids": (3, 4, 5)},
    {"ignore_eos": True},
)
STORIES = (
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
    [3, 1, 4, 1, 7, 7, 7, 7, 7, 7, 7, 7],
    [3, 1, 4, 1, 5, 9, 2, 7, 7, 7, 7, 7],
)


# Cut off where the prompt ends.
RETENTIONS: tuple[tuple[RetentionRange, ...], ...] = (
    (RetentionRange(priority=80),),
    (RetentionRange(priority=10),),
    (RetentionRange(priority=5, duration_s=0.1),),
    (RetentionRange(0, 4, 90, 2.5), RetentionRange(4, 6, 60, 0.1), RetentionRange(6, 12, 20)),
    (RetentionRange(1, 3, 0), RetentionRange(5, None, 100, 0.1)),
)

# What tells equal tokens apart.
IDENTITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tenant": {"tenant_salt": "tenant"},
    "adapter": {"adapter": Adapter("a", "1")},
    "reloaded adapter": {"adapter": Adapter("a", "2")},
    "image": {"attachments": (Attachment(bytes(16), 0, 1),)},
    "another image": {"attachments": (Attachment(bytes(15) + b"1", 0, 1),)},
}


def most_blocks_at_once(request: Request, limits: ModelLimits) -> int:
    """Count, length by length, the blocks that computing one more token of a sample takes."""
    assert request.params.max_tokens is not None
    num_tokens = len(request.prompt_token_ids) + request.params.max_tokens - 1
    size = limits.block_size
    windows = request.windows(limits.layer_groups)

    def count(position: int) -> int:
        # The block before the token is kept whatever the window.
        kept = {(g, max(0, position - 1) // size) for g in range(len(windows))}
        for group, window in enumerate(windows):
            kept |= {(group, seen // size) for seen in visible(position + 1, window).tolist()}
            if window.size is not None:
                sinks = min(window.num_sink_tokens, position + 1)
                kept |= {(group, sink // size) for sink in range(sinks)}
        return len(kept)

    return max(count(position) for position in range(num_tokens))


@dataclasses.dataclass(eq=False)
class Tracked:
    """A request and what may become of it.

    Args:
        request: The request.
        samples: What each of its samples must give, and has given.
        poison: (output index, sibling) of the draw that raises; None for the sibling means all.
        due: When its deadline is, on the replica's clock.
        cancelled_siblings: Those that were cancelled alone.
        num_steps: Of its search; None where it has none.
    """

    request: Request
    samples: list[tuple[Expected, Stream]]
    poison: tuple[int, int | None] | None
    due: float = math.inf
    cancelled_siblings: set[int] = dataclasses.field(default_factory=set)
    num_steps: int | None = None
    cancelled: bool = False
    abandoned: bool = False
    lapsed: bool = False
    fenced: bool = False
    forgotten: bool = False

    @property
    def is_open(self) -> bool:
        return any(stream.finish is None for _expected, stream in self.samples)

    def failing_draw(self, sibling: int) -> int | None:
        """Output index at which a sample fails, where it does not end before."""
        if self.poison is None:
            return None
        draw, poisoned = self.poison
        # Samples that are not forked yet fail together.
        return draw if draw == 0 or poisoned is None or poisoned == sibling else None


def cut(ranges: tuple[RetentionRange, ...], num_prompt: int) -> tuple[RetentionRange, ...]:
    """Return what of some ranges a prompt of this length can have."""
    return tuple(
        dataclasses.replace(each, end=None if each.end is None else min(each.end, num_prompt))
        for each in ranges
        if each.start < num_prompt
    )


class ReplicaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.incarnation = 0
        self.num_submitted = 0
        self.tracked: list[Tracked] = []
        self.late: list[AnswerPoll] = []

    @initialize(
        num_blocks=st.sampled_from([8, 6, 5, 10, 12, 3, 1]),
        block_size=st.sampled_from([2, 1, 3, 4]),
        max_num_seqs=st.sampled_from([4, 3, 2, 1]),
        max_num_batched_tokens=st.sampled_from([64, 7, 3, 2, 1]),
        pipeline_depth=st.sampled_from([2, 1]),
        max_decode_steps=st.sampled_from([1, 8, 3]),
        max_prefix_wait_steps=st.sampled_from([64, 2, 0, 1]),
        partial_reuse=st.booleans(),
        interruptions=st.sampled_from([0.0, 0.3]),
        policy=st.sampled_from(POLICIES),
        oldest_every=st.sampled_from([None, 1, 2, 5]),
        layer_groups=st.sampled_from(LAYER_GROUPS),
        max_pinned_blocks=st.sampled_from([0, 0, 1, 2]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pipeline_depth: int,
        max_decode_steps: int,
        max_prefix_wait_steps: int,
        partial_reuse: bool,
        interruptions: float,
        policy: QueuePolicy,
        oldest_every: int | None,
        layer_groups: tuple[AttentionWindow, ...] = ONE_FULL_GROUP,
        max_pinned_blocks: int = 0,
    ) -> None:
        self.limits = make_limits(
            num_blocks,
            block_size,
            vocab_size=31,
            eos_token_ids=(0,),
            max_num_seqs=max_num_seqs,
            layer_groups=layer_groups,
        )
        self.limits = dataclasses.replace(
            self.limits, max_pinned_blocks=min(max_pinned_blocks, num_blocks - 1)
        )
        self.new_driver = functools.partial(
            ReplicaDriver,
            self.limits,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pipeline_depth=pipeline_depth,
            max_decode_steps=max_decode_steps,
            max_prefix_wait_steps=max_prefix_wait_steps,
            partial_reuse=partial_reuse,
            policy=policy,
            oldest_every=oldest_every,
        )
        draw = random.Random(0)
        self.interrupt = lambda: draw.random() < interruptions
        self.begin_life()

    def begin_life(self) -> None:
        self.driver = self.new_driver(incarnation=self.incarnation)
        self.driver.rank.interrupt = self.interrupt
        self.seen: dict[str, float] = dict.fromkeys(CONSUMERS, 0.0)
        self.assigned: Counter[tuple[str, int]] = Counter()
        self.late = []

    # --- requests -------------------------------------------------------------------------

    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.sampled_from([4, 5, 6, 7, 3, 8, 9, 2, 12, 1]),
        max_tokens=st.sampled_from([8, 10, 6, 3, 2, 1]),
        consumer=st.sampled_from(CONSUMERS),
        priorities=st.lists(st.sampled_from([0, 0, -1, 2]), min_size=1, max_size=4),
        identity=st.sampled_from(["plain", "plain", *IDENTITIES]),
        num_samples=st.sampled_from([1, 1, 2, 3, 4]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        poison=st.sampled_from([*[None] * 5, (0, None), (2, None), (0, 1), (1, 0), (2, 1)]),
        deadline_s=st.sampled_from([None, None, None, 0.1, 3.0, 100.0]),
        attention=st.sampled_from([*[(None, 0)] * 3, (1, 0), (2, 1), (3, 0), (4, 5), (7, 2)]),
        retention=st.sampled_from([(), (), *RETENTIONS]),
    )
    def submit(
        self,
        story: list[int],
        num_prompt: int,
        max_tokens: int,
        consumer: str,
        priorities: list[int],
        identity: str,
        num_samples: int,
        prompt_logprobs: int | None,
        poison: tuple[int, int | None] | None,
        deadline_s: float | None,
        attention: tuple[int | None, int] = (None, 0),
        retention: tuple[RetentionRange, ...] = (),
    ) -> None:
        for temperature, priority in enumerate(priorities):
            request = make_request(
                story[:num_prompt],
                max_tokens,
                request_id=f"q{self.num_submitted}",
                consumer_id=consumer,
                priority=priority,
                temperature=temperature,
                seed=self.num_submitted,
                n=num_samples,
                prompt_logprobs=prompt_logprobs,
                window=attention[0],
                num_sink_tokens=attention[1],
                retention=cut(retention, num_prompt),
            )
            request = dataclasses.replace(
                request, deadline_s=deadline_s, tenant=consumer, **IDENTITIES[identity]
            )
            self.num_submitted += 1
            if not self.is_admitted(request):
                return
            if poison is not None and poison[1] is not None and poison[1] >= num_samples:
                poison = None
            self.open(request, poison)

    def is_admitted(self, request: Request) -> bool:
        """Return whether a request can run here; check how it is refused where it cannot."""
        params, limits = request.params, self.limits
        assert params.max_tokens is not None
        width = params.beam_width or 1
        if max(params.n, width) > limits.max_num_seqs:
            with pytest.raises(InvalidInputError, match="sequences that run at once"):
                admit(request, limits)
            return False
        num_blocks = most_blocks_at_once(request, limits)
        if params.beam_width is not None and params.max_tokens > 1:
            windows = request.windows(limits.layer_groups)
            # Beams share what is full of the prompt, and it may be that nothing else is. With a
            # window they do not count even on that.
            num_tokens = len(request.prompt_token_ids) + params.max_tokens - 1
            shared = len(request.prompt_token_ids) // limits.block_size
            own = -(-num_tokens // limits.block_size) - shared
            sharing = (shared + width * own) * len(windows)
            full = all(window.size is None for window in windows)
            num_blocks = sharing if full else width * num_blocks
        if num_blocks > limits.num_usable_blocks:
            with pytest.raises(CapacityError) as refused:
                admit(request, limits)
            assert refused.value.num_blocks_needed == num_blocks
            return False
        return True

    @precondition(lambda self: self.tracked)
    @rule(
        pick=st.integers(0, 99),
        num_outputs=st.sampled_from([12, 5, 2, 1]),
        more=st.lists(st.integers(0, 30), min_size=1, max_size=3),
        max_tokens=st.sampled_from([3, 6, 1]),
    )
    def take_another_turn(
        self, pick: int, num_outputs: int, more: list[int], max_tokens: int
    ) -> None:
        """Ask on from an answer, whether all of it has been given or not."""
        tracked = self.tracked[pick % len(self.tracked)]
        expected, _stream = tracked.samples[pick % len(tracked.samples)]
        prompt = (*tracked.request.prompt_token_ids, *expected.token_ids[:num_outputs], *more)
        request = dataclasses.replace(
            tracked.request,
            request_id=RequestId(f"q{self.num_submitted}"),
            attempt=Attempt(0),
            prompt_token_ids=prompt,
            params=dataclasses.replace(
                tracked.request.params,
                max_tokens=max_tokens,
                min_tokens=min(tracked.request.params.min_tokens, max_tokens),
            ),
        )
        self.num_submitted += 1
        if self.is_admitted(request):
            # Poison goes by the seed, which the two share.
            self.open(request, tracked.poison)

    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.sampled_from([5, 4, 7, 3, 8, 1]),
        max_tokens=st.sampled_from([6, 9, 3, 2, 1]),
        consumer=st.sampled_from(CONSUMERS),
        priority=st.sampled_from([0, 0, -1, 2]),
        width=st.sampled_from([3, 2, 4, 1]),
        num_outputs=st.sampled_from([1, 2, 4]),
        ending=st.sampled_from(ENDINGS),
        poison=st.sampled_from([*[None] * 5, (0, None), (2, None)]),
        identity=st.sampled_from(["plain", "plain", *IDENTITIES]),
        prompt_logprobs=st.sampled_from([None, None, 0, 1]),
        deadline_s=st.sampled_from([None, None, None, 0.1, 3.0, 100.0]),
        attention=st.sampled_from([*[(None, 0)] * 3, (1, 0), (2, 1), (3, 0), (4, 5), (7, 2)]),
        choice=st.sampled_from(CHOICES),
    )
    def submit_a_search(
        self,
        story: list[int],
        num_prompt: int,
        max_tokens: int,
        consumer: str,
        priority: int,
        width: int,
        num_outputs: int,
        ending: tuple[float, bool | str],
        poison: tuple[int, int | None] | None,
        identity: str,
        prompt_logprobs: int | None,
        deadline_s: float | None,
        attention: tuple[int | None, int],
        choice: dict[str, Any],
    ) -> None:
        min_tokens = min(choice.get("min_tokens", 0), max_tokens)
        request = make_request(
            story[:num_prompt],
            max_tokens,
            request_id=f"q{self.num_submitted}",
            consumer_id=consumer,
            priority=priority,
            seed=self.num_submitted,
            n=min(num_outputs, width),
            beam_width=width,
            length_penalty=ending[0],
            early_stopping=ending[1],
            prompt_logprobs=prompt_logprobs,
            window=attention[0],
            num_sink_tokens=attention[1],
            **choice | {"min_tokens": min_tokens},
        )
        request = dataclasses.replace(
            request, deadline_s=deadline_s, tenant=consumer, **IDENTITIES[identity]
        )
        self.num_submitted += 1
        if self.is_admitted(request):
            self.open(request, poison)

    def open(self, request: Request, poison: tuple[int, int | None] | None) -> None:
        assert request.params.seed is not None
        if poison is not None:
            draw, sibling = poison
            of_one = () if sibling is None else (sibling,)
            self.driver.rank.poison.add((request.params.seed, draw, *of_one))
        self.seen[request.consumer_id] = self.driver.now
        self.assigned[request.request_id, request.attempt] += 1
        self.driver.submit(request)
        reader = self.driver.reader(request.consumer_id)
        num_steps = None
        if request.params.beam_width is None:
            expected = [oracle(request, self.limits, s) for s in range(request.params.n)]
        else:
            found, num_steps = toy_beams(request, self.limits)
            expected = [Expected(one.token_ids, one.finish) for one in found]
        streams = [reader.stream(request, sibling) for sibling in range(request.params.n)]
        samples = list(zip(expected, streams, strict=True))
        due = math.inf if request.deadline_s is None else self.driver.now + request.deadline_s
        self.tracked.append(Tracked(request, samples, poison, due, num_steps=num_steps))
        self.keep_answers("late")

    def live(self) -> list[Tracked]:
        latest = {tracked.request.request_id: tracked for tracked in self.tracked}
        sequences = self.driver.replica.sequences
        return [latest[name] for name in dict.fromkeys(s.request.request_id for s in sequences)]

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99), abandon=st.booleans())
    def cancel(self, pick: int, abandon: bool) -> None:
        live = self.live()
        tracked = live[pick % len(live)]
        tracked.cancelled = True
        if abandon:
            tracked.abandoned = True
            reader = self.driver.reader(tracked.request.consumer_id)
            reader.consumer.abandon(tracked.request.request_id)
        self.driver.cancel(tracked.request)
        self.keep_answers("late")

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99), sibling=st.integers(0, 4))
    def cancel_one_sample(self, pick: int, sibling: int) -> None:
        live = self.live()
        tracked = live[pick % len(live)]
        tracked.cancelled_siblings.add(sibling)
        request = tracked.request
        self.driver.send(CancelRequest(request.request_id, request.attempt, sibling))
        self.keep_answers("late")

    @precondition(lambda self: self.tracked)
    @rule(pick=st.integers(0, 99))
    def submit_under_a_name_that_was_used(self, pick: int) -> None:
        name = self.tracked[pick % len(self.tracked)].request.request_id
        last = [t for t in self.tracked if t.request.request_id == name][-1]
        if last in self.live() or (last.is_open and not last.abandoned):
            return
        # Another attempt, since items of this one may still be under way.
        attempt = Attempt(last.request.attempt + 1)
        request = dataclasses.replace(last.request, attempt=attempt)
        self.open(request, last.poison)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99))
    def assign_a_live_request_again(self, pick: int) -> None:
        live = self.live()
        request = live[pick % len(live)].request
        self.seen[request.consumer_id] = self.driver.now
        admitted = admit(request, self.limits)
        self.driver.send(AssignRequest(admitted, prompt_keys(admitted, self.driver.scope)))
        self.keep_answers("late")

    # --- readers --------------------------------------------------------------------------

    @rule(
        consumer=st.sampled_from(CONSUMERS), fate=st.sampled_from(["read", "read", "late", "lost"])
    )
    def poll(self, consumer: str, fate: str) -> None:
        self.seen[consumer] = self.driver.now
        poll = self.driver.reader(consumer).consumer.poll(R0, self.driver.incarnation)
        self.driver.send(poll)
        self.keep_answers(fate)

    def keep_answers(self, fate: str) -> None:
        """Read the answers that the last event brought, or lose them, or read them later."""
        for answer in self.driver.answers:
            self.seen[answer.consumer_id] = self.driver.now
        if fate == "read":
            self.driver.read_answers()
        elif fate == "late":
            self.late += self.driver.answers
        self.driver.answers = []

    @precondition(lambda self: self.late)
    @rule(pick=st.integers(0, 99))
    def read_a_late_answer(self, pick: int) -> None:
        self.driver.answers = [self.late.pop(pick % len(self.late))]
        self.driver.read_answers()

    @rule(seconds=st.sampled_from([0.01, 0.1, 2.5, 0.01, 0.1, 2.5, 0.1, LEASE_S, 11 * LEASE_S]))
    def let_time_pass(self, seconds: float) -> None:
        before = self.live()
        self.driver.tick(seconds)
        ended = [tracked for tracked in before if tracked not in self.live()]
        assert all(tracked.due > self.driver.now for tracked in self.live())
        for tracked in ended:
            lease_ends = self.seen[tracked.request.consumer_id] + LEASE_S
            tracked.lapsed = self.driver.now >= lease_ends
            in_time = tracked.lapsed or self.driver.now >= tracked.due
            assert in_time, "a request ended within its consumer's lease and its own deadline"
        for tracked in self.tracked:
            memory_ends = self.seen[tracked.request.consumer_id] + LEASE_S * LEASES_TO_REMEMBER
            if self.driver.now >= memory_ends:
                tracked.forgotten = True
        self.keep_answers("late")

    # --- steps ----------------------------------------------------------------------------

    @rule(
        fate=st.sampled_from(["read", "read", "late", "lost"]), count=st.sampled_from([4, 2, 1, 8])
    )
    def step(self, fate: str, count: int) -> None:
        for _ in range(count):
            self.driver.step()
            self.keep_answers(fate)

    @rule(story=st.sampled_from(STORIES), num_tokens=st.integers(1, 12), name=st.booleans())
    def pin(self, story: list[int], num_tokens: int, name: bool) -> None:
        pins = self.driver.replica.pins
        before = pins.num_blocks
        commands = self.driver.send(PinPrefix(PinId(str(name)), tuple(story[:num_tokens])))
        (answer,) = [command for command in commands if isinstance(command, PinAnswered)]
        if answer.refused is not None:
            assert before + answer.refused.num_blocks > self.limits.max_pinned_blocks
            assert pins.num_blocks == before
        self.keep_answers("late")

    @rule(name=st.booleans())
    def unpin(self, name: bool) -> None:
        self.driver.send(UnpinPrefix(PinId(str(name))))
        assert PinId(str(name)) not in self.driver.replica.pins.tables
        self.keep_answers("late")

    @rule(luck=st.integers(0, 9))
    def reset_the_cache(self, luck: int) -> None:
        if luck != 7:
            return
        self.driver.send(ResetCache())
        assert not len(self.driver.replica.kv.index)
        assert self.driver.replica.kv.pool.num_cached == 0
        self.keep_answers("late")

    @rule(luck=st.integers(0, 19), during_a_step=st.booleans())
    def end_the_incarnation(self, luck: int, during_a_step: bool) -> None:
        if luck != 13:
            return
        ended = self.live()
        plan = self.driver.plan
        if during_a_step and plan is not None:
            self.driver.send(StepFailed(plan.step_id, "a rank died"))
        else:
            self.driver.send(FenceReplica("lost"))
        for tracked in ended:
            tracked.fenced = True
        assert self.driver.reports[-1].fenced is not None
        self.drain()  # Steps that were in flight end all the same, and change nothing.
        self.incarnation += 1
        self.begin_life_of_same_readers()

    def begin_life_of_same_readers(self) -> None:
        readers = self.driver.readers
        self.begin_life()
        self.driver.readers = readers

    # --- what must hold -------------------------------------------------------------------

    @invariant()
    def every_stream_is_a_prefix_of_the_oracles(self) -> None:
        for tracked in self.tracked:
            for expected, stream in tracked.samples:
                num_tokens = len(stream.token_ids)
                assert stream.token_ids == expected.token_ids[:num_tokens]
            first = tracked.samples[0][1]
            scored = tracked.request.params.prompt_logprobs is not None and first.token_ids
            scores = prompt_oracle(tracked.request, self.limits.layer_groups) if scored else ()
            assert first.prompt_logprobs == scores

    @invariant()
    def work_is_never_left_without_a_step(self) -> None:
        if self.tracked and self.driver.replica.sequences:
            assert self.driver.plan is not None

    @invariant()
    def all_figures_add_up(self) -> None:
        if not self.tracked:
            return
        figures = self.driver.replica.accounting()
        waste = figures.internal_fragmentation_slots
        assert figures.allocated_slots == figures.unique_live_tokens + waste
        num_holders = self.limits.max_num_seqs * len(self.limits.layer_groups)
        assert 0 <= waste <= num_holders * (self.limits.block_size - 1)
        most = len(self.limits.layer_groups) * (self.limits.block_size - 1)
        wastes = figures.sequence_fragmentation_slots.values()
        assert all(0 <= own <= most for own in wastes)
        assert sum(wastes) >= waste
        assert figures.prefix_sharing_saved_slots >= 0
        assert figures.num_held_blocks <= self.limits.num_blocks
        if not figures.num_pinned_blocks and not self.driver.replica.batcher.in_flight:
            assert figures.allocated_slots == figures.num_held_blocks * self.limits.block_size

    def drain(self) -> None:
        """Run to the end, read everything, and compare."""
        driver = self.driver
        driver.run()
        for name in list(driver.replica.pins.tables):
            driver.send(UnpinPrefix(name))
        for consumer in CONSUMERS:
            driver.poll(consumer)
        driver.tick(1.0)
        for tracked in self.tracked:
            self.check_end(tracked)
        pool = driver.replica.kv.pool
        assert pool.num_held == 0
        assert driver.replica.accounting().allocated_slots == 0
        self.check_reports()
        self.tracked = [t for t in self.tracked if t.is_open and not t.abandoned]

    def check_end(self, tracked: Tracked) -> None:
        for sibling, (expected, stream) in enumerate(tracked.samples):
            draw = tracked.failing_draw(sibling)
            if stream.finish is None:
                assert tracked.abandoned or tracked.forgotten, "a stream that never ends"
            elif stream.finish is FinishReason.CANCELLED:
                alone = sibling in tracked.cancelled_siblings
                assert alone or tracked.cancelled or tracked.lapsed
            elif stream.finish is FinishReason.DEADLINE:
                assert self.driver.now >= tracked.due
            elif stream.finish is FinishReason.ERROR and not tracked.fenced:
                assert stream.error == f"draw {draw} is poisoned"
                assert len(stream.token_ids) == (draw if tracked.num_steps is None else 0)
            elif stream.finish is not FinishReason.ERROR:
                assert (stream.token_ids, stream.finish) == expected
                assert draw is None or (tracked.num_steps or len(stream.token_ids)) <= draw

    def check_reports(self) -> None:
        reports = self.driver.reports
        assert [report.sequence for report in reports] == list(range(len(reports)))
        finished = Counter(name for report in reports for name in report.finished)
        assert finished == self.assigned, "each request is reported finished once"
        known: set[BlockKey] = set()
        for report in reports:
            assert not known & set(report.published)
            known |= set(report.published)
            assert set(report.evicted) <= known
            known -= set(report.evicted)
        if self.driver.replica.fenced is None:
            assert known == {key for key, _block_id in self.driver.replica.kv.index.items()}

    def teardown(self) -> None:
        if self.tracked:
            self.drain()
