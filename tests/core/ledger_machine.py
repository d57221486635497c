"""Rules for a batcher and its blocks under any order of operations, beside plain lists of tokens.

The oracle knows, for each sample, the list of its tokens up to its end, and nothing of blocks. A
slot must hold the history that its token ends; a key must name a block whose slots hold the
histories that were hashed into it.
"""

import argparse
import dataclasses
import hashlib
import random
from collections import Counter, deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replica_driver import R0, TIMEOUTS, make_limits, make_request, make_scope
from slot_memory import Histories, Sample, SlotMemory

from rayserve_paged.core import invariants
from rayserve_paged.core.block_identity import Adapter, RequestScope
from rayserve_paged.core.config import BatchConfig
from rayserve_paged.core.ids import BlockId, BlockKey, Incarnation, RequestId
from rayserve_paged.core.messages import StepPlan, TokenRun
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.step_commit import Committed, Progress

VOCAB_SIZE = 23
END_ID = 0
# Prompts are cut from these, so that they share prefixes of every length.
STORIES = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3),
    (3, 1, 4, 1, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7),
    (3, 1, 4, 1, 5, 9, 2, 6, 2, 7, 1, 8, 2, 8, 1, 8),
)
# What tells equal tokens apart.
SCOPES = (
    RequestScope(),
    RequestScope(""),
    RequestScope("other"),
    RequestScope(None, Adapter("a", "1")),
    RequestScope(None, Adapter("a", "2")),
)
REPLAY = (
    "replay it: python tests/core/ledger_machine.py --seed {seed} --operations {num_operations}"
)


@dataclasses.dataclass(eq=False)
class Tracked:
    """A request: its samples, and those of its sequences that live."""

    samples: list[Sample]
    root: int
    sequences: dict[int, SequenceState]
    num_prompt: int
    started: bool = False


@dataclasses.dataclass(eq=False)
class InFlight:
    """A plan, and what its rows must be."""

    plan: StepPlan
    samples: dict[int, Sample]
    roots: dict[int, int]


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tracked: dict[RequestId, Tracked] = {}
        self.flights: deque[InFlight] = deque()
        self.num_submitted = 0
        # What was done, and what that brought about.
        self.operations: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    @initialize(
        num_blocks=st.sampled_from([8, 6, 5, 10, 16, 24, 3]),
        block_size=st.sampled_from([2, 1, 3, 4]),
        max_num_seqs=st.sampled_from([4, 3, 2, 1, 8]),
        max_num_batched_tokens=st.sampled_from([64, 7, 3, 2, 1]),
        pipeline_depth=st.sampled_from([2, 1]),
        max_decode_steps=st.sampled_from([1, 4]),
        max_prefix_wait_steps=st.sampled_from([64, 2, 0]),
        partial_reuse=st.booleans(),
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
    ) -> None:
        self.limits = make_limits(
            num_blocks, block_size, VOCAB_SIZE, eos_token_ids=(END_ID,), max_num_seqs=max_num_seqs
        )
        self.scope = make_scope(block_size)
        batch = BatchConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pipeline_depth=pipeline_depth,
            max_decode_steps=max_decode_steps,
            max_prefix_wait_steps=max_prefix_wait_steps,
        )
        self.max_decode_steps = max_decode_steps
        # It only holds the batcher: its own events are another machine's.
        self.replica = Replica(
            R0,
            Incarnation(0),
            self.limits,
            self.scope,
            batch,
            TIMEOUTS,
            partial_reuse=partial_reuse,
        )
        self.batcher, self.kv = self.replica.batcher, self.replica.kv
        self.histories = Histories(VOCAB_SIZE)
        self.memory = SlotMemory(self.kv.pool, block_size, self.histories)
        draw = random.Random(0)
        self.memory.interrupt = lambda: draw.random() < 0.2
        # What each key stands for, and which can be matched, as the changes tell.
        self.content: dict[BlockKey, list[int]] = {}
        for scope in SCOPES:
            self.content[self.scope.root(scope)] = [self.histories.root(scope)]
        self.matchable: set[BlockKey] = set()
        self.queried = self.hits = self.resumed = 0

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
        num_prompt = min(num_prompt, limits.num_slots)
        max_tokens = min(max_tokens, limits.num_slots - num_prompt + 1)
        request = make_request(
            story[:num_prompt],
            max_tokens,
            request_id=f"q{self.num_submitted}",
            priority=priority,
            tenant_salt=scope.tenant_salt,
            adapter=scope.adapter,
            temperature=0.0 if greedy else 1.0,
            seed=self.num_submitted,
            n=num_samples,
        )
        root = self.histories.root(scope)
        samples = [
            self.foresee(
                list(story[:num_prompt]),
                max_tokens,
                None if greedy else self.num_submitted,
                root,
                sibling,
            )
            for sibling in range(num_samples)
        ]
        chains = [self.note_keys(sample, scope) for sample in samples]
        if failure is not None and failure[1] < num_samples:
            output_index, sibling = failure
            if output_index < len(samples[sibling].tokens) - num_prompt:
                samples[sibling].failing_draw = output_index
                if output_index == 0:
                    # Samples that are not forked yet fail together.
                    for sample in samples:
                        sample.failing_draw = 0
        sequence = SequenceState(
            request,
            tuple(chains[0][: num_prompt // limits.block_size]),
            self.scope.root(scope),
            self.num_submitted,
            limits.eos_token_ids,
            limits.block_size,
            num_samples,
        )
        self.num_submitted += 1
        self.tracked[request.request_id] = Tracked(samples, root, {0: sequence}, num_prompt)
        self.batcher.add(sequence)
        self.operations["submit"] += 1

    def foresee(
        self, tokens: list[int], max_tokens: int, seed: int | None, root: int, sibling: int
    ) -> Sample:
        """Write down all that a sample will be."""
        num_prompt = len(tokens)
        history, passed = root, []
        for token_id in tokens:
            history = self.histories.after(history, token_id)
            passed.append(history)
        for _ in range(max_tokens):
            token_id = self.histories.draw(history, seed, sibling)
            tokens.append(token_id)
            history = self.histories.after(history, token_id)
            passed.append(history)
            if token_id == END_ID:
                break
        return Sample(seed, sibling, num_prompt, tokens, passed)

    def note_keys(self, sample: Sample, scope: RequestScope) -> list[BlockKey]:
        """Hash a sample's blocks, and write down what each key stands for."""
        size, key, chain = self.limits.block_size, self.scope.root(scope), []
        for end in range(size, len(sample.tokens) + 1, size):
            payload = b"".join(t.to_bytes(4, "little") for t in sample.tokens[end - size : end])
            key = BlockKey(hashlib.sha256(key + payload).digest())
            content = sample.histories[end - size : end]
            assert self.content.setdefault(key, content) == content, "one key for two contents"
            chain.append(key)
        return chain

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
        evicted = self.follow_changes()
        if plan is None:
            assert self.flights or not self.batcher.num_running + self.batcher.num_waiting, (
                "work is left and nothing can be planned"
            )
            return
        samples: dict[int, Sample] = {}
        roots: dict[int, int] = {}
        starts = {start.row: start for start in plan.starts}
        for sequence in self.batcher.running:
            tracked = self.tracked[sequence.request.request_id]
            assert sequence.row is not None
            samples[sequence.row] = tracked.samples[sequence.sibling]
            roots[sequence.row] = tracked.root
            gave_way = sequence.num_preemptions > running.get(
                id(sequence), sequence.num_preemptions
            )
            if sequence.row in starts and (gave_way or id(sequence) in waiting):
                self.check_start(sequence, tracked, starts[sequence.row].num_computed, evicted)
        self.flights.append(InFlight(plan, samples, roots))
        self.events["copied"] += len(plan.copies)
        self.operations["chunk" if (plan.num_tokens > 1).any() else "append"] += 1

    def check_start(
        self, sequence: SequenceState, tracked: Tracked, num_found: int, evicted: set[BlockKey]
    ) -> None:
        """Compare what a sequence starts on with the longest run that may be matched."""
        size, num_known = self.limits.block_size, sequence.num_known
        depth = 0
        while (depth + 1) * size < num_known and sequence.key(depth) in self.matchable | evicted:
            depth += 1
        if self.kv.partials is None:
            assert num_found <= depth * size, "more was matched than had been computed"
        assert num_found < num_known, "nothing is left to compute"
        if not evicted:
            num_partial = num_found - depth * size
            assert 0 <= num_partial < size, "less was matched than could have been"
            self.events["partly matched"] += num_partial > 0
        if sequence.num_preemptions or sequence.sibling:
            self.events["resumed"] += 1
            self.resumed += num_found
        else:
            self.queried += tracked.num_prompt
            self.hits += num_found
            self.events["started"] += 1
        self.events["hit tokens"] += num_found

    @precondition(lambda self: self.flights)
    @rule()
    def commit(self) -> None:
        """Finish the oldest step in flight."""
        flight = self.flights.popleft()
        result = self.memory.run(flight.plan, flight.samples, flight.roots)
        committed = self.batcher.commit(result)
        for child in committed.born:
            self.tracked[child.request.request_id].sequences[child.sibling] = child
        self.operations["fork" if committed.born else "commit"] += 1
        self.hear(committed)

    def hear(self, committed: Committed) -> None:
        for news in committed.news:
            if isinstance(news, Progress):
                sequence, output_index, token_id, _logprobs, finish, _error = news
                request_id, sibling = sequence.request.request_id, sequence.sibling
                self.hear_one(request_id, sibling, output_index, token_id)
                if finish is not None:
                    self.hear_the_end(request_id, sequence, finish)
            else:
                run: TokenRun = news[1]
                told = zip(run.names, run.indices.tolist(), run.token_ids.T.tolist(), strict=True)
                for name, first, token_ids in told:
                    for output_index, token_id in enumerate(token_ids, first):
                        self.hear_one(name.request_id, name.sibling, output_index, token_id)

    def hear_one(
        self, request_id: RequestId, sibling: int, output_index: int, token_id: int | None
    ) -> None:
        sample = self.tracked[request_id].samples[sibling]
        assert output_index == sample.num_told, "a token is told twice or left out"
        assert not sample.ended, "a token is told after the end"
        if token_id is not None:
            assert token_id == sample.tokens[sample.num_prompt + output_index]
            sample.num_told += 1

    def hear_the_end(
        self, request_id: RequestId, sequence: SequenceState, finish: FinishReason
    ) -> None:
        tracked = self.tracked[request_id]
        sample = tracked.samples[sequence.sibling]
        if finish is FinishReason.ERROR:
            assert sample.num_told == sample.failing_draw
            self.events["failed"] += 1
        else:
            assert sample.num_told == len(sample.tokens) - sample.num_prompt
            stopped = sample.tokens[-1] == END_ID
            assert finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            self.events["finished"] += 1
        self.forget(request_id, sequence)

    def forget(self, request_id: RequestId, sequence: SequenceState) -> None:
        tracked = self.tracked[request_id]
        unborn = range(1, sequence.num_unborn + 1)
        for sibling in (sequence.sibling, *unborn):
            tracked.samples[sibling].ended = True
        del tracked.sequences[sequence.sibling]
        if not tracked.sequences:
            assert all(sample.ended for sample in tracked.samples)
            del self.tracked[request_id]

    @precondition(lambda self: self.tracked)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        request_id = list(self.tracked)[pick % len(self.tracked)]
        for sequence in list(self.tracked[request_id].sequences.values()):
            # Twice, since two may want it gone.
            for _ in range(2):
                self.batcher.end(sequence, FinishReason.CANCELLED)
            assert sequence.finish is FinishReason.CANCELLED
            self.forget(request_id, sequence)
        self.operations["cancel"] += 1

    @rule(pick=st.integers(0, 99))
    def preempt(self, pick: int) -> None:
        """Take the blocks of any sequence that no step in flight writes."""
        busy = {row for flight in self.flights for row in flight.plan.rows.tolist()}
        idle = [s for s in self.batcher.running if s.row not in busy]
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

    # --- what must hold -------------------------------------------------------------------

    def follow_changes(self) -> set[BlockKey]:
        """Keep up with the keys that can be matched; return those that were lost just now."""
        published, evicted = self.kv.index.take_changes()
        assert not self.matchable & set(published)
        assert set(evicted) <= self.matchable
        self.matchable = (self.matchable | set(published)) - set(evicted)
        self.events["evicted"] += len(evicted)
        self.events["sealed"] += len(published)
        return set(evicted)

    @invariant()
    def the_ledger_agrees_with_its_holders(self) -> None:
        invariants.check(self.replica)

    @invariant()
    def a_key_names_a_block_that_holds_what_was_hashed(self) -> None:
        self.follow_changes()
        num_keys = 0
        for key, block_id in self.kv.index.items():
            assert key in self.matchable
            assert self.memory.block(BlockId(block_id)) == self.content[key]
            num_keys += 1
        assert num_keys == len(self.matchable)

    @invariant()
    def slots_that_can_be_copied_hold_what_is_said_of_them(self) -> None:
        if self.kv.partials is None:
            return
        for block_id, content in self.kv.partials.items():
            history = self.content[content.parent][-1]
            for offset, token_id in enumerate(content.token_ids):
                history = self.histories.after(history, token_id)
                assert self.memory.block(block_id)[offset] == history

    def check(self) -> None:
        self.the_ledger_agrees_with_its_holders()
        self.a_key_names_a_block_that_holds_what_was_hashed()
        self.slots_that_can_be_copied_hold_what_is_said_of_them()

    def drain(self) -> None:
        """Run to the end of all that was submitted."""
        for _ in range(10000):
            self.plan()
            if not self.flights:
                break
            self.commit()
            self.check()
        assert not self.tracked, "a request never ends"
        assert not self.batcher.running
        assert not self.batcher.retiring
        assert self.kv.pool.num_held == 0
        assert self.kv.pool.num_available == self.limits.num_blocks
        assert self.batcher.num_queried_tokens == self.queried
        assert self.batcher.num_hit_tokens == self.hits
        assert self.batcher.num_resumed_tokens == self.resumed

    def teardown(self) -> None:
        if self.num_submitted:
            self.drain()


def walk(seed: int, num_operations: int) -> LedgerMachine:
    """Walk further than Hypothesis does, by the same rules; raises where anything is broken."""
    draw = random.Random(seed)
    machine = LedgerMachine()
    machine.start(
        num_blocks=draw.choice([3, 5, 8, 12, 16, 24]),
        block_size=draw.choice([1, 2, 3, 4]),
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_num_batched_tokens=draw.choice([1, 2, 5, 16, 64]),
        pipeline_depth=draw.choice([1, 2]),
        max_decode_steps=draw.choice([1, 1, 4]),
        max_prefix_wait_steps=draw.choice([64, 2, 0]),
        partial_reuse=draw.random() < 0.5,
    )

    def submit() -> None:
        if len(machine.tracked) > 12:
            return
        machine.submit(
            draw.choice(STORIES),
            draw.randint(1, 16),
            draw.randint(1, 16),
            draw.choice(SCOPES),
            draw.choice([0, 0, -1, 2]),
            draw.choice([1, 1, 2, 3, 4]),
            draw.random() < 0.5,
            draw.choice([*[None] * 12, (0, 0), (1, 0), (2, 1), (0, 2)]),
        )

    def commit() -> None:
        if machine.flights:
            machine.commit()

    def cancel() -> None:
        if machine.tracked:
            machine.cancel(draw.randint(0, 99))

    def preempt() -> None:
        machine.preempt(draw.randint(0, 99))

    def evict() -> None:
        machine.evict(draw.randint(1, 24))

    operations = [submit, machine.plan, commit, cancel, preempt, evict]
    num_done = 0
    while num_done < num_operations:
        draw.choices(operations, [5, 20, 20, 1, 2, 1])[0]()
        if machine.operations.total() > num_done:
            machine.check()
            num_done = machine.operations.total()
    machine.drain()
    return machine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replay one walk.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--operations", type=int, default=1000)
    options = parser.parse_args()
    done = walk(options.seed, options.operations)
    print(f"nothing broke: {dict(done.operations)}, which brought {dict(done.events)}")
