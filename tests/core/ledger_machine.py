"""Rules for a batcher and its blocks under any order of operations, beside plain lists of tokens.

The oracle knows, for each sample, the list of its tokens up to its end, and nothing of blocks. A
slot must hold the history that its token ends; a key must name a block whose slots hold the
histories that were hashed into it.
"""

import dataclasses
import random
from collections import Counter, deque
from typing import get_args

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_keys import FollowedKeys
from ledger_oracle import LedgerOracle, Sample
from ledger_requests import (
    END_ID,
    ENDINGS,
    SCOPES,
    STORIES,
    LedgerReplica,
    Tracked,
    TrackedRequests,
)
from replica_driver import R0, TIMEOUTS, make_limits, make_request, make_scope
from slot_memory import SlotMemory

from rayserve_paged.core import invariants
from rayserve_paged.core.attention_window import (
    FULL_ATTENTION,
    ONE_FULL_GROUP,
    AttentionWindow,
)
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.config import BatchConfig, QueuePolicy
from rayserve_paged.core.errors import CapacityError, InvalidInputError, PinLimitError
from rayserve_paged.core.ids import BlockKey, Incarnation, PinId, RequestId
from rayserve_paged.core.request import FinishReason, Request, admit
from rayserve_paged.core.sequence import Phase, SequenceState
from rayserve_paged.core.step_messages import StepPlan

POLICIES: tuple[QueuePolicy, ...] = get_args(QueuePolicy)
VOCAB_SIZE = 23
PIN_IDS = (PinId("a"), PinId("b"))
LAYER_GROUPS = (
    ONE_FULL_GROUP,
    ONE_FULL_GROUP,
    (AttentionWindow(4),),
    (FULL_ATTENTION, AttentionWindow(3, 2)),
)


@dataclasses.dataclass(eq=False)
class InFlight:
    """A plan, and what its rows must be."""

    plan: StepPlan
    samples: dict[int, Sample]


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.flights: deque[InFlight] = deque()
        self.num_submitted = 0
        # What was done, and what that brought about.
        self.operations: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.requests = TrackedRequests(self.events)
        # Of each pin its keys, tokens and windows, and how many tokens it keeps.
        self.pinned: dict[PinId, tuple[list[BlockKey], int, tuple[AttentionWindow, ...], int]] = {}

    @initialize(
        num_blocks=st.sampled_from([8, 6, 5, 10, 16, 24, 3]),
        block_size=st.sampled_from([2, 1, 3, 4]),
        max_num_seqs=st.sampled_from([4, 3, 2, 1, 8]),
        max_num_batched_tokens=st.sampled_from([64, 7, 3, 2, 1]),
        pipeline_depth=st.sampled_from([2, 1]),
        max_decode_steps=st.sampled_from([1, 4]),
        max_prefix_wait_steps=st.sampled_from([64, 2, 0]),
        partial_reuse=st.booleans(),
        layer_groups=st.sampled_from(LAYER_GROUPS),
        policy=st.sampled_from(POLICIES),
        max_pinned_blocks=st.sampled_from([0, 2, 4]),
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
        layer_groups: tuple[AttentionWindow, ...],
        policy: QueuePolicy,
        max_pinned_blocks: int,
    ) -> None:
        limits = make_limits(
            num_blocks,
            block_size,
            VOCAB_SIZE,
            eos_token_ids=(END_ID,),
            max_num_seqs=max_num_seqs,
            layer_groups=layer_groups,
        )
        # What is left holds a token in each layer group.
        max_pinned_blocks = min(max_pinned_blocks, num_blocks - len(layer_groups))
        self.limits = dataclasses.replace(limits, max_pinned_blocks=max_pinned_blocks)
        self.scope = make_scope(block_size)
        batch = BatchConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pipeline_depth=pipeline_depth,
            max_decode_steps=max_decode_steps,
            max_prefix_wait_steps=max_prefix_wait_steps,
            policy=policy,
        )
        self.max_decode_steps = max_decode_steps
        self.replica = LedgerReplica(
            R0,
            Incarnation(0),
            self.limits,
            self.scope,
            batch,
            TIMEOUTS,
            partial_reuse=partial_reuse,
        )
        self.replica.live = self.requests.live
        self.batcher, self.kv = self.replica.batcher, self.replica.kv
        self.oracle = LedgerOracle(self.limits, self.scope, SCOPES)
        self.memory = SlotMemory(self.kv.pool, block_size, self.oracle.histories, len(layer_groups))
        draw = random.Random(0)
        self.memory.interrupt = lambda: draw.random() < 0.2
        self.keys = FollowedKeys(self.kv, self.memory, self.oracle, self.events)

    @property
    def tracked(self) -> dict[RequestId, Tracked]:
        """Requests that have not ended."""
        return self.requests.by_id

    # --- operations -----------------------------------------------------------------------

    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.integers(1, 16),
        max_tokens=st.integers(1, 16),
        scope=st.sampled_from(SCOPES),
        priority=st.sampled_from([0, 0, -1, 2]),
        num_samples=st.sampled_from([1, 1, 2, 3, 4]),
        greedy=st.booleans(),
        failure=st.sampled_from([None, None, None, (0, 0), (1, 0), (2, 1), (0, 2)]),
    )
    def submit(
        self,
        story: tuple[int, ...],
        num_prompt: int,
        max_tokens: int,
        scope: RequestScope,
        priority: int,
        num_samples: int,
        greedy: bool,
        failure: tuple[int, int] | None,
    ) -> None:
        limits = self.limits
        num_samples = min(num_samples, limits.max_num_seqs)
        most = limits.num_usable_blocks // len(limits.layer_groups) * limits.block_size
        num_prompt = min(num_prompt, most)
        max_tokens = min(max_tokens, most - num_prompt + 1)
        request = make_request(
            story[:num_prompt],
            max_tokens,
            request_id=f"q{self.num_submitted}",
            priority=priority,
            scope=scope,
            temperature=0.0 if greedy else 1.0,
            seed=self.num_submitted,
            n=num_samples,
        )
        seed = None if greedy else self.num_submitted
        samples = [
            self.oracle.sample(story[:num_prompt], max_tokens, scope, seed, sibling)
            for sibling in range(num_samples)
        ]
        if failure is not None and failure[1] < num_samples:
            output_index, sibling = failure
            if output_index < len(samples[sibling].tokens) - num_prompt:
                samples[sibling].failing_draw = output_index
                if output_index == 0:
                    # Samples that are not forked yet fail together.
                    for sample in samples:
                        sample.failing_draw = 0
        self.add(request, samples[0].keys, scope, samples)
        self.operations["submit"] += 1

    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.integers(1, 10),
        max_tokens=st.integers(1, 8),
        scope=st.sampled_from(SCOPES),
        priority=st.sampled_from([0, 0, -1, 2]),
        width=st.integers(1, 4),
        ending=st.sampled_from(ENDINGS),
    )
    def submit_a_search(
        self,
        story: tuple[int, ...],
        num_prompt: int,
        max_tokens: int,
        scope: RequestScope,
        priority: int,
        width: int,
        ending: tuple[float, bool | str],
    ) -> None:
        request = make_request(
            story[:num_prompt],
            max_tokens,
            request_id=f"q{self.num_submitted}",
            priority=priority,
            scope=scope,
            beam_width=width,
            length_penalty=ending[0],
            early_stopping=ending[1],
        )
        try:
            admit(request, self.limits)
        except (CapacityError, InvalidInputError):
            return
        prompt = story[:num_prompt]
        outputs = self.oracle.search(prompt, request.params, scope)
        keys = self.oracle.beam(prompt, num_prompt, scope).keys
        self.add(request, keys, scope, [], outputs)
        self.operations["submit"] += 1

    def add(
        self,
        request: Request,
        keys: list[BlockKey],
        scope: RequestScope,
        samples: list[Sample],
        outputs: list[tuple[int, ...]] | None = None,
    ) -> None:
        """Hand a request to the batcher."""
        limits, num_prompt = self.limits, len(request.prompt_token_ids)
        sequence = SequenceState(
            request,
            tuple(keys[: num_prompt // limits.block_size]),
            self.scope.root(scope),
            self.num_submitted,
            limits.eos_token_ids,
            limits.block_size,
            request.params.num_siblings,
            limits.layer_groups,
        )
        self.num_submitted += 1
        tracked = Tracked(samples, {0: sequence}, num_prompt, scope, outputs)
        self.tracked[request.request_id] = tracked
        self.batcher.add(sequence)

    @rule()
    def plan(self) -> None:
        """Plan a step: of prompts a chunk, of others one token or several."""
        if not self.batcher.can_plan:
            return
        # How often each that runs has given way; it may do so and start again in one plan.
        running = {id(s): s.num_preemptions for s in self.batcher.running}
        waiting = {id(s) for s in self.batcher.waiting}
        num_preemptions = self.batcher.num_preemptions
        plan = self.batcher.plan_step(self.max_decode_steps)
        self.events["preempted"] += self.batcher.num_preemptions - num_preemptions
        evicted = self.keys.follow_changes()
        if plan is None:
            assert self.flights or not self.batcher.num_running + self.batcher.num_waiting, (
                "work is left and nothing can be planned"
            )
            return
        samples: dict[int, Sample] = {}
        starts = {start.row: start for start in plan.starts}
        for sequence in self.batcher.running:
            tracked = self.tracked[sequence.request.request_id]
            assert sequence.row is not None
            if tracked.outputs is None:
                samples[sequence.row] = tracked.samples[sequence.sibling]
            else:
                tokens = sequence.tokens.tolist()
                beam = self.oracle.beam(tokens, tracked.num_prompt, tracked.scope)
                samples[sequence.row] = beam
            gave_way = sequence.num_preemptions > running.get(
                id(sequence), sequence.num_preemptions
            )
            if sequence.row in starts and (gave_way or id(sequence) in waiting):
                num_found = starts[sequence.row].num_computed
                # What was computed over a reset has no keys: others may have some of it.
                sure = not evicted and not (sequence.num_preemptions and self.operations["reset"])
                self.keys.check_start(
                    sequence, samples[sequence.row], num_found, evicted, is_exact=sure
                )
        self.flights.append(InFlight(plan, samples))
        self.events["copied"] += len(plan.copies)
        self.operations["chunk" if (plan.num_tokens > 1).any() else "append"] += 1

    @precondition(lambda self: self.flights)
    @rule()
    def commit(self) -> None:
        """Finish the oldest step in flight."""
        flight = self.flights.popleft()
        result = self.memory.run(flight.plan, flight.samples)
        before = self.num_trimmed()
        committed = self.batcher.commit(result)
        for name, num_blocks in self.num_trimmed().items():
            self.events["rolled out of a window"] += max(
                0, num_blocks - before.get(name, num_blocks)
            )
        kind = "beam step" if committed.beams else "fork" if committed.born else "commit"
        self.operations[kind] += 1
        self.requests.hear(committed)

    def num_trimmed(self) -> dict[int, int]:
        """Return for each running sequence how many of its blocks no token sees any more."""
        return {
            id(sequence): sum(group.num_trimmed for group in sequence.table.groups)
            for sequence in self.batcher.running
        }

    @precondition(lambda self: self.tracked)
    @rule(pick=st.integers(0, 99), one_sample=st.booleans())
    def cancel(self, pick: int, one_sample: bool) -> None:
        request_id = list(self.tracked)[pick % len(self.tracked)]
        tracked = self.tracked[request_id]
        sequences = list(tracked.sequences.values())
        if one_sample and tracked.outputs is None:
            sequences = [sequences[pick % len(sequences)]]
        for sequence in sequences:
            if sequence.phase is not Phase.ENDED:
                self.batcher.end(sequence, FinishReason.CANCELLED)
            if tracked.outputs is None:
                # Two may want it gone.
                self.batcher.end(sequence, FinishReason.CANCELLED)
                self.requests.forget(request_id, sequence)
            assert sequence.finish is FinishReason.CANCELLED
        if tracked.outputs is not None:
            del self.tracked[request_id]
        self.operations["cancel"] += 1

    @rule(pick=st.integers(0, 99))
    def preempt(self, pick: int) -> None:
        """Take the blocks of any sequence that no step in flight writes."""
        busy = {row for flight in self.flights for row in flight.plan.rows.tolist()}
        idle = [
            sequence
            for sequence in self.batcher.running
            if not any(each.row in busy for each in sequence.together)
        ]
        if idle:
            self.batcher.preempt(idle[pick % len(idle)])
            self.operations["preempt"] += 1

    @rule(num_blocks=st.integers(1, 24))
    def evict(self, num_blocks: int) -> None:
        """Have someone take blocks and give them back."""
        num_blocks = min(num_blocks, self.kv.pool.num_available)
        table = self.kv.open([])
        granted = self.kv.grow(table, num_blocks * self.limits.block_size)
        assert granted is not None
        assert len(granted) == num_blocks
        self.kv.close(table)
        self.operations["evict"] += 1

    @rule(
        name=st.sampled_from(PIN_IDS),
        story=st.sampled_from(STORIES),
        num_tokens=st.integers(1, 16),
        scope=st.sampled_from(SCOPES),
    )
    def pin(
        self, name: PinId, story: tuple[int, ...], num_tokens: int, scope: RequestScope
    ) -> None:
        """Keep what is computed of a prefix, or let go of what was kept under this name."""
        pins = self.replica.pins
        if name in pins.tables:
            pins.unpin(name)
            self.operations["unpin"] += 1
            return
        keys = self.oracle.beam(story[:num_tokens], num_tokens, scope).keys
        keys = keys[: num_tokens // self.limits.block_size]
        windows = scope.windows(self.limits.layer_groups)
        num_pinned, num_held = pins.num_blocks, self.kv.pool.num_held
        try:
            num_kept = pins.pin(name, keys, num_tokens, windows)
        except PinLimitError as error:
            num_new = error.num_blocks
        else:
            assert num_kept <= num_tokens
            assert (name in pins.tables) == (num_kept > 0)
            if num_kept:
                self.pinned[name] = (keys, num_tokens, windows, num_kept)
                self.operations["pin"] += 1
            return
        assert num_pinned + num_new > self.limits.max_pinned_blocks
        assert (pins.num_blocks, self.kv.pool.num_held) == (num_pinned, num_held)

    @rule()
    def reset(self) -> None:
        """Have nothing matched any more that was computed before, or is on the blocks held now."""
        self.replica.pins.clear()
        self.batcher.reset_cache()
        self.keys.follow_changes()
        assert not self.keys.matchable
        self.keys.stale_tables = [sequence.table for sequence in self.batcher.running]
        self.operations["reset"] += 1

    # --- what must hold -------------------------------------------------------------------

    @invariant()
    def the_ledger_agrees_with_its_holders(self) -> None:
        invariants.check(self.replica)

    @invariant()
    def a_key_names_a_block_that_holds_what_was_hashed(self) -> None:
        self.keys.check()

    @invariant()
    def what_is_pinned_is_found(self) -> None:
        for name in self.replica.pins.tables:
            keys, num_tokens, windows, num_kept = self.pinned[name]
            lengths = [len(self.kv.match(keys, num_tokens + more, windows)) for more in (0, 1)]
            assert max(lengths) * self.limits.block_size >= num_kept

    @invariant()
    def every_sequence_knows_its_tokens(self) -> None:
        for sequence in self.batcher.running:
            tracked = self.tracked[sequence.request.request_id]
            if tracked.outputs is not None:
                continue
            sample = tracked.samples[sequence.sibling]
            assert sequence.tokens.tolist() == sample.tokens[: sequence.num_known]

    @invariant()
    def slots_that_can_be_copied_hold_what_is_said_of_them(self) -> None:
        self.keys.check_partly_filled()

    def check(self) -> None:
        self.the_ledger_agrees_with_its_holders()
        self.a_key_names_a_block_that_holds_what_was_hashed()
        self.what_is_pinned_is_found()
        self.every_sequence_knows_its_tokens()
        self.slots_that_can_be_copied_hold_what_is_said_of_them()

    def drain(self) -> None:
        """Run to the end of all that was submitted, whatever is pinned."""
        for _ in range(10000):
            self.plan()
            if not self.flights:
                break
            self.commit()
            self.check()
        assert not self.tracked, "a request never ends"
        assert not self.batcher.running
        assert not self.batcher.retiring
        self.replica.pins.clear()
        assert self.kv.pool.num_held == 0
        assert self.kv.pool.num_available == self.limits.num_blocks
        assert self.batcher.num_queried_tokens == self.keys.num_queried
        assert self.batcher.num_hit_tokens == self.keys.num_hits
        assert self.batcher.num_resumed_tokens == self.keys.num_resumed

    def teardown(self) -> None:
        if self.num_submitted:
            self.drain()
