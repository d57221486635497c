"""A replica under any order of events gives every reader the stream of an oracle without blocks."""

import dataclasses
import random
from collections import Counter

import pytest
from fingerprint_rank import Expected, oracle
from hypothesis import settings
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

from rayserve_paged.core.errors import CapacityError
from rayserve_paged.core.ids import Attempt, BlockKey
from rayserve_paged.core.messages import AnswerPoll, AssignRequest, FenceReplica, StepFailed
from rayserve_paged.core.outbox import LEASES_TO_REMEMBER
from rayserve_paged.core.request import FinishReason, Request, admit

LEASE_S = TIMEOUTS.consumer_lease_s
CONSUMERS = ("c0", "c1")
# Prompts are cut from these, so that they share prefixes of every length.
STORIES = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3, 1, 4, 1, 7, 7, 7, 7, 7, 7, 7, 7])


@dataclasses.dataclass(eq=False)
class Tracked:
    """A request and what may become of it."""

    request: Request
    expected: Expected
    stream: Stream
    poisoned_draw: int | None
    cancelled: bool = False
    abandoned: bool = False
    lapsed: bool = False
    fenced: bool = False
    forgotten: bool = False


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
    )
    def start(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.limits = make_limits(num_blocks, block_size, vocab_size=31, eos_token_ids=(0,))
        self.bounds = (max_num_seqs, max_num_batched_tokens)
        self.begin_life()

    def begin_life(self) -> None:
        self.driver = ReplicaDriver(self.limits, *self.bounds, incarnation=self.incarnation)
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
        salt=st.sampled_from([None, None, "tenant"]),
        poisoned_draw=st.sampled_from([None, None, None, None, 0, 2]),
    )
    def submit(
        self,
        story: list[int],
        num_prompt: int,
        max_tokens: int,
        consumer: str,
        priorities: list[int],
        salt: str | None,
        poisoned_draw: int | None,
    ) -> None:
        for temperature, priority in enumerate(priorities):
            request = make_request(
                story[:num_prompt],
                max_tokens,
                request_id=f"q{self.num_submitted}",
                consumer_id=consumer,
                priority=priority,
                tenant_salt=salt,
                temperature=temperature,
                seed=self.num_submitted,
            )
            self.num_submitted += 1
            num_blocks = -(-(num_prompt + max_tokens - 1) // self.limits.block_size)
            if num_blocks > self.limits.num_blocks:
                with pytest.raises(CapacityError) as refused:
                    admit(request, self.limits)
                assert refused.value.num_blocks_needed == num_blocks
                return
            self.open(request, poisoned_draw)

    def open(self, request: Request, poisoned_draw: int | None = None) -> None:
        assert request.params.seed is not None
        if poisoned_draw is not None:
            self.driver.rank.poison.add((request.params.seed, poisoned_draw))
        self.seen[request.consumer_id] = self.driver.now
        self.assigned[request.request_id, request.attempt] += 1
        stream = self.driver.submit(request)
        expected = oracle(request, self.limits)
        self.tracked.append(Tracked(request, expected, stream, poisoned_draw))
        self.keep_answers("late")

    def live(self) -> list[Tracked]:
        latest = {tracked.request.request_id: tracked for tracked in self.tracked}
        return [latest[s.request.request_id] for s in self.driver.replica.sequences]

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

    @precondition(lambda self: self.tracked)
    @rule(pick=st.integers(0, 99))
    def submit_under_a_name_that_was_used(self, pick: int) -> None:
        name = self.tracked[pick % len(self.tracked)].request.request_id
        last = [t for t in self.tracked if t.request.request_id == name][-1]
        if last in self.live() or not (last.stream.finish or last.abandoned):
            return
        # Another attempt, since items of this one may still be under way.
        attempt = Attempt(last.request.attempt + 1)
        request = dataclasses.replace(last.request, attempt=attempt)
        self.open(request, last.poisoned_draw)

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
        for tracked in ended:
            silent_s = self.driver.now - self.seen[tracked.request.consumer_id]
            assert silent_s >= LEASE_S, "a consumer lost its requests within its lease"
            tracked.lapsed = True
        for tracked in self.tracked:
            silent_s = self.driver.now - self.seen[tracked.request.consumer_id]
            if silent_s >= LEASE_S * LEASES_TO_REMEMBER:
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
        self.driver.step()  # The step that was in flight ends all the same, and changes nothing.
        self.drain()
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
            got, expected = tracked.stream.token_ids, tracked.expected.token_ids
            assert got == expected[: len(got)]

    @invariant()
    def work_is_never_left_without_a_step(self) -> None:
        if self.tracked and self.driver.replica.sequences:
            assert self.driver.plan is not None

    def drain(self) -> None:
        """Run to the end, read everything, and compare."""
        driver = self.driver
        driver.run()
        for consumer in CONSUMERS:
            driver.poll(consumer)
        driver.tick(1.0)
        for tracked in self.tracked:
            self.check_end(tracked)
        pool = driver.replica.kv.pool
        assert pool.num_held == 0
        assert driver.replica.accounting().allocated_slots == 0
        self.check_reports()
        self.tracked = [t for t in self.tracked if t.stream.finish is None and not t.abandoned]

    def check_end(self, tracked: Tracked) -> None:
        stream, expected = tracked.stream, tracked.expected
        if stream.finish is None:
            assert tracked.abandoned or tracked.forgotten, "a stream that never ends"
        elif stream.finish is FinishReason.CANCELLED:
            assert tracked.cancelled or tracked.lapsed
        elif stream.finish is FinishReason.ERROR:
            if tracked.fenced:
                return
            assert stream.error == f"draw {tracked.poisoned_draw} is poisoned"
            assert len(stream.token_ids) == tracked.poisoned_draw
        else:
            assert (stream.token_ids, stream.finish) == expected

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


def random_walk(seed: int, num_operations: int) -> ReplicaMachine:
    """Walk further than Hypothesis does, by the same rules."""
    draw = random.Random(seed)
    machine = ReplicaMachine()
    machine.start(
        num_blocks=draw.choice([4, 6, 8, 12, 20]),
        block_size=draw.choice([1, 2, 3, 4]),
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_num_batched_tokens=draw.choice([1, 2, 5, 16, 64]),
    )

    def submit() -> None:
        machine.submit(
            draw.choice(STORIES),
            draw.randint(1, 12),
            draw.randint(1, 12),
            draw.choice(CONSUMERS),
            draw.choices([0, 0, -1, 2], k=draw.randint(1, 4)),
            draw.choice([None, None, "tenant"]),
            draw.choice([None] * 6 + [0, 2]),
        )

    def submit_again() -> None:
        if machine.tracked:
            machine.submit_under_a_name_that_was_used(draw.randint(0, 999))

    def touch_a_live_one() -> None:
        if machine.live():
            pick = draw.randint(0, 99)
            if draw.random() < 0.5:
                machine.cancel(pick, draw.random() < 0.5)
            else:
                machine.assign_a_live_request_again(pick)

    def read() -> None:
        if machine.late and draw.random() < 0.5:
            machine.read_a_late_answer(draw.randint(0, 99))
        else:
            machine.poll(draw.choice(CONSUMERS), draw.choice(["read", "read", "late", "lost"]))

    def wait() -> None:
        long = [LEASE_S, 11 * LEASE_S] if draw.random() < 0.02 else []
        machine.let_time_pass(draw.choice([0.01, 0.1, 0.5, *long]))

    def step() -> None:
        machine.step(draw.choice(["read", "late", "lost"]), draw.randint(1, 6))

    for _ in range(num_operations):
        actions = [submit, submit_again, touch_a_live_one, read, wait, step]
        draw.choices(actions, [6, 2, 3, 10, 6, 16])[0]()
        machine.every_stream_is_a_prefix_of_the_oracles()
        machine.work_is_never_left_without_a_step()
        if draw.random() < 0.002:
            machine.end_the_incarnation(13, draw.random() < 0.5)
    machine.teardown()
    return machine


@pytest.mark.parametrize("seed", range(12))
def test_a_long_random_walk_ends_with_every_stream_right(seed: int) -> None:
    random_walk(seed, num_operations=500)


ReplicaMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60)
TestReplicaMachine = ReplicaMachine.TestCase
