"""Rules for the steps, blocks and pins of a batcher, and what must hold at any time.

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
from ledger_pins import PIN_IDS, FollowedPins
from ledger_requests import END_ID, SCOPES, STORIES, LedgerReplica, Tracked, TrackedRequests
from replica_driver import R0, TIMEOUTS, make_limits, make_scope
from slot_memory import SlotMemory

from rayserve_paged.core import invariants
from rayserve_paged.core.attention_window import (
    FULL_ATTENTION,
    ONE_FULL_GROUP,
    AttentionWindow,
)
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.config import BatchConfig, QueuePolicy
from rayserve_paged.core.ids import Incarnation, PinId, RequestId
from rayserve_paged.core.step_messages import StepPlan

POLICIES: tuple[QueuePolicy, ...] = get_args(QueuePolicy)
VOCAB_SIZE = 23
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


class RunningBatcher(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.flights: deque[InFlight] = deque()
        self.num_submitted = 0
        # What was done, and what that brought about.
        self.operations: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.requests = TrackedRequests(self.events)

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
        self.pins = FollowedPins(self.replica, self.oracle)

    @property
    def tracked(self) -> dict[RequestId, Tracked]:
        """Requests that have not ended."""
        return self.requests.by_id

    # --- operations -----------------------------------------------------------------------

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
        done = self.pins.pin_or_unpin(name, story[:num_tokens], scope)
        if done is not None:
            self.operations[done] += 1

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
        self.pins.check()

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
