"""Rules for the steps, readers, pins and lives of a replica, and what must hold at any time."""

import dataclasses
import functools
import random
from collections import Counter
from typing import get_args

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replica_checks import Tracked, check_figures, check_reports
from replica_driver import R0, TIMEOUTS, ReplicaDriver, make_limits, make_request
from replica_workload import IDENTITIES, STORIES

from rayserve_paged.core.attention_window import FULL_ATTENTION, ONE_FULL_GROUP, AttentionWindow
from rayserve_paged.core.config import QueuePolicy
from rayserve_paged.core.ids import PinId
from rayserve_paged.core.outbox import LEASES_TO_REMEMBER
from rayserve_paged.core.replica_messages import (
    AnswerPoll,
    FenceReplica,
    PinAnswered,
    PinPrefix,
    ResetCache,
    StepFailed,
    UnpinPrefix,
)

POLICIES: tuple[QueuePolicy, ...] = get_args(QueuePolicy)
LEASE_S = TIMEOUTS.consumer_lease_s
CONSUMERS = ("c0", "c1")
LAYER_GROUPS = (
    ONE_FULL_GROUP,
    (AttentionWindow(3),),
    (FULL_ATTENTION, AttentionWindow(4, 1)),
    (AttentionWindow(2), FULL_ATTENTION, AttentionWindow(6)),
)


class RunningReplica(RuleBasedStateMachine):
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

    def live(self) -> list[Tracked]:
        latest = {tracked.request.request_id: tracked for tracked in self.tracked}
        sequences = self.driver.replica.sequences
        return [latest[name] for name in dict.fromkeys(s.request.request_id for s in sequences)]

    # --- readers --------------------------------------------------------------------------

    @rule(
        consumer=st.sampled_from(CONSUMERS), fate=st.sampled_from(["read", "read", "late", "lost"])
    )
    def poll(self, consumer: str, fate: str) -> None:
        self.seen[consumer] = self.driver.now
        poll = self.driver.reader(consumer).consumer.poll(
            R0, self.driver.incarnation, self.driver.now
        )
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

    @rule(
        story=st.sampled_from(STORIES),
        num_tokens=st.integers(1, 12),
        name=st.booleans(),
        identity=st.sampled_from(["plain", "plain", *IDENTITIES]),
        attention=st.sampled_from([*[(None, 0)] * 3, (2, 1), (3, 0), (7, 2)]),
    )
    def pin(
        self,
        story: list[int],
        num_tokens: int,
        name: bool,
        identity: str,
        attention: tuple[int | None, int],
    ) -> None:
        pins = self.driver.replica.pins
        before = pins.num_blocks
        like = make_request(
            story[:num_tokens],
            window=attention[0],
            num_sink_tokens=attention[1],
            **IDENTITIES[identity],
        )
        event = PinPrefix(PinId(str(name)), like.prompt_token_ids, like.scope, like.attachments)
        commands = self.driver.send(event)
        (answer,) = [command for command in commands if isinstance(command, PinAnswered)]
        table = pins.tables.get(PinId(str(name)))
        assert answer.num_tokens == (0 if table is None else table.num_slots)
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
            tracked.check_so_far()

    @invariant()
    def work_is_never_left_without_a_step(self) -> None:
        if self.tracked and self.driver.replica.sequences:
            assert self.driver.plan is not None

    @invariant()
    def all_figures_add_up(self) -> None:
        if self.tracked:
            check_figures(self.driver, self.limits)

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
            tracked.check_end(driver.now)
        pool = driver.replica.kv.pool
        assert pool.num_held == 0
        assert driver.replica.accounting().allocated_slots == 0
        check_reports(driver, self.assigned)
        self.tracked = [t for t in self.tracked if t.is_open and not (t.abandoned or t.fenced)]

    def teardown(self) -> None:
        if self.tracked:
            self.drain()
