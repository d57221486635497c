import dataclasses
import random
from typing import get_args

import pytest
from replica_driver import ReplicaDriver, make_limits, make_request, make_scope, prompt_keys

from rayserve_paged.core import policy
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.config import QueuePolicy
from rayserve_paged.core.kv_manager import KVManager
from rayserve_paged.core.policy import WAITING_KEYS, WaitingRequest
from rayserve_paged.core.replica_messages import CancelRequest
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.waiting_queue import WaitingQueue

SCOPE = make_scope(4)
POLICIES: tuple[QueuePolicy, ...] = get_args(QueuePolicy)


def make_kv(num_blocks: int = 64) -> KVManager:
    return KVManager(BlockPool(num_blocks), 4)


def waiting(
    arrival: int,
    *,
    prompt: list[int] | None = None,
    max_tokens: int = 4,
    priority: int = 0,
    tenant: str | None = None,
) -> SequenceState:
    request = make_request(
        [1] if prompt is None else prompt,
        max_tokens,
        request_id=f"q{arrival}",
        priority=priority,
    )
    request = dataclasses.replace(request, tenant=tenant)
    return SequenceState(request, prompt_keys(request, SCOPE), SCOPE.root(), arrival, (), 4)


def start_first(queue: WaitingQueue) -> SequenceState:
    first = queue.first()
    assert first is not None
    queue.start(first)
    first.num_cached_tokens = 0
    return first


def cache(kv: KVManager, prompt: list[int]) -> None:
    """Compute a prompt's blocks, and let go of them."""
    table = kv.open([])
    kv.grow(table, len(prompt))
    keys = prompt_keys(make_request(prompt), SCOPE)
    for block_id, key in zip(table.block_ids, keys, strict=False):
        kv.seal(block_id, key)
    kv.close(table)


def order_of(queue: WaitingQueue) -> list[int]:
    started = []
    while queue:
        started.append(start_first(queue).arrival)
    return started


def test_first_come_first_served_looks_at_arrival_alone() -> None:
    queue = WaitingQueue(make_kv(), "fcfs")
    for arrival, priority in enumerate([3, 0, -2]):
        queue.add(waiting(arrival, priority=priority))
    assert [s.arrival for s in queue.in_order] == [0, 1, 2]
    assert order_of(queue) == [0, 1, 2]


def test_by_priority_the_lower_number_goes_first_then_arrival() -> None:
    queue = WaitingQueue(make_kv(), "priority")
    for arrival, priority in enumerate([3, 0, -2, 0]):
        queue.add(waiting(arrival, priority=priority))
    assert order_of(queue) == [2, 1, 3, 0]


def test_the_shortest_has_the_fewest_tokens_left_whatever_its_prompt_or_output() -> None:
    queue = WaitingQueue(make_kv(), "shortest-remaining")
    queue.add(waiting(0, prompt=[1] * 20, max_tokens=5))
    queue.add(waiting(1, prompt=[1] * 4, max_tokens=20))
    queue.add(waiting(2, prompt=[1] * 5, max_tokens=5))
    resumed = waiting(3, prompt=[1] * 40, max_tokens=20)
    resumed.tokens.extend([2] * 12)
    resumed.num_cached_tokens = 0  # It has run: only its outputs are left, eight of them.
    queue.add(resumed)
    assert order_of(queue) == [3, 2, 1, 0]


def test_the_longest_cached_prefix_goes_first_as_blocks_come_and_go() -> None:
    kv = make_kv(8)
    queue = WaitingQueue(kv, "longest-prefix-first")
    tales = [[i] * 4 + [9] * 9 for i in range(3)]
    for arrival, tale in enumerate(tales):
        queue.add(waiting(arrival, prompt=tale))
    assert [s.arrival for s in queue.in_order] == [0, 1, 2]
    cache(kv, tales[2][:4])
    cache(kv, tales[1][:12])
    assert [s.arrival for s in queue.in_order] == [1, 2, 0]
    assert queue.first() is queue.in_order[0]
    # All is evicted, and the first in line is looked at again.
    table = kv.open([])
    kv.grow(table, 32)
    kv.close(table)
    first = queue.first()
    assert first is not None
    assert first.arrival == 0
    cache(kv, tales[1][:8])
    assert order_of(queue) == [1, 0, 2]


def test_tenants_are_served_by_weight() -> None:
    queue = WaitingQueue(make_kv(), "weighted-fair", tenant_weights={"gold": 3.0})
    for arrival in range(40):
        tenant = "gold" if arrival < 20 else "tin"
        queue.add(waiting(arrival, tenant=tenant, prompt=[1] * 6, max_tokens=6))
    started = [start_first(queue).tenant for _ in range(12)]
    assert started == ["gold", "tin", "gold", "gold"] + ["gold", "tin", "gold", "gold"] * 2


def test_a_tenant_that_comes_late_does_not_wait_behind_the_backlog_of_another() -> None:
    queue = WaitingQueue(make_kv(), "weighted-fair")
    for arrival in range(30):
        queue.add(waiting(arrival, tenant="flood"))
    for _ in range(5):
        start_first(queue)
    queue.add(waiting(30, tenant="rare"))
    assert [start_first(queue).tenant for _ in range(3)] == ["flood", "rare", "flood"]


def test_what_a_sequence_did_not_take_is_given_back_to_its_tenant() -> None:
    queue = WaitingQueue(make_kv(), "weighted-fair")
    for arrival in range(4):
        queue.add(waiting(arrival, tenant="ab"[arrival % 2], prompt=[1] * 2, max_tokens=98))
    first, second = start_first(queue), start_first(queue)
    assert (first.tenant, second.tenant) == ("a", "b")
    first.tokens.extend([5] * 90)
    queue.settle(first)  # 8 of its 98 were not taken.
    second.tokens.append(5)
    queue.settle(second)
    assert order_of(queue) == [3, 2]


def test_requests_that_name_no_tenant_are_charged_to_their_salt() -> None:
    plain = waiting(0)
    salted = dataclasses.replace(plain.request, scope=RequestScope("s"))
    assert plain.tenant == ""
    assert SequenceState(salted, (), SCOPE.root(), 0, (), 4).tenant == "s"
    named = dataclasses.replace(salted, tenant="t")
    assert SequenceState(named, (), SCOPE.root(), 0, (), 4).tenant == "t"


# --- against a plain search -----------------------------------------------------------------


class Books:
    """The plain search: every key anew, from a snapshot of each waiting sequence."""

    def __init__(self, kv: KVManager, weights: dict[str, float]) -> None:
        self.kv = kv
        self.weights = weights
        self.sequences: list[SequenceState] = []
        self.served: dict[str, float] = {}
        self.level = 0.0

    def add(self, sequence: SequenceState) -> None:
        tenant = sequence.tenant
        others = [self.served[s.tenant] for s in self.sequences]
        if all(s.tenant != tenant for s in self.sequences):
            level = min(others, default=self.level)
            self.served[tenant] = max(self.served.get(tenant, level), level)
        self.sequences.append(sequence)

    def start(self, sequence: SequenceState) -> None:
        self.sequences.remove(sequence)
        if sequence.num_cached_tokens is None:
            self.level = self.served[sequence.tenant]
            tokens = sequence.num_prompt + sequence.request.params.max_tokens  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
            self.served[sequence.tenant] += tokens / self.weights.get(sequence.tenant, 1.0)

    def snapshot(self, sequence: SequenceState) -> WaitingRequest:
        left = sequence.max_known - sequence.num_known
        started = sequence.num_cached_tokens is not None
        return WaitingRequest(
            priority=sequence.priority,
            arrival=sequence.arrival,
            sibling=0,
            num_remaining_tokens=left if started else left + sequence.num_prompt,
            num_cached_blocks=len(self.kv.match(sequence.keys, sequence.num_known)),
            tenant_served=self.served[sequence.tenant],
        )

    def in_order(self, name: QueuePolicy) -> list[SequenceState]:
        return sorted(self.sequences, key=lambda s: WAITING_KEYS[name](self.snapshot(s)))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_the_first_is_that_of_a_plain_search_over_snapshots(name: QueuePolicy, seed: int) -> None:
    draw = random.Random(seed)
    kv = make_kv(24)
    weights = {"a": 2.0, "b": 0.5}
    queue = WaitingQueue(kv, name, None if seed % 2 else 5, weights)
    books = Books(kv, weights)
    running: list[SequenceState] = []
    num_passed = 0
    for arrival in range(400):
        story = [draw.randrange(2) for _ in range(4)] * 5
        if len(books.sequences) < 40:
            sequence = waiting(
                arrival,
                prompt=story[: draw.randrange(1, 20)],
                max_tokens=draw.randrange(1, 30),
                priority=draw.randrange(3) if name == "priority" else 0,
                tenant=draw.choice(["a", "b", "c", None]),
            )
            queue.add(sequence)
            books.add(sequence)
        match draw.randrange(5):
            case 0 | 1:
                oldest_every = policy.OLDEST_EVERY[name] if seed % 2 else 5
                by_age = oldest_every is not None and num_passed + 1 >= oldest_every
                assert queue.is_turn_of_oldest == by_age
                oldest = min(books.sequences, key=lambda s: s.arrival)
                expected = oldest if by_age else books.in_order(name)[0]
                assert queue.first() is expected
                books.start(expected)
                assert start_first(queue) is expected
                num_passed = 0 if expected is oldest else num_passed + 1
                running.append(expected)
            case 2:
                gone = draw.choice(books.sequences)
                queue.remove(gone)
                books.sequences.remove(gone)
            case 3 if running:
                resumed = running.pop(draw.randrange(len(running)))
                queue.add(resumed)  # It was preempted.
                books.add(resumed)
            case _:
                cache(kv, story)
        assert list(queue.in_order) == books.in_order(name)
        assert len(queue) == len(books.sequences)
        assert queue.num_entries <= 2 * len(queue) + 8 * 5


# --- nobody waits for ever ------------------------------------------------------------------


def overtake(name: QueuePolicy, arrival: int, kv: KVManager) -> SequenceState:
    """A request that goes before the victim of its policy's test."""
    match name:
        case "fcfs" | "priority":
            return waiting(arrival, priority=-1)
        case "weighted-fair":
            return waiting(arrival, tenant=f"t{arrival}")  # Nobody was ever served less.
        case "shortest-remaining":
            return waiting(arrival, max_tokens=1)
        case "longest-prefix-first":
            cache(kv, [7] * 4)
            return waiting(arrival, prompt=[7] * 5)


@pytest.mark.parametrize("num_older", [0, 1, 5])
@pytest.mark.parametrize(
    ("name", "oldest_every", "bound"),
    [
        ("fcfs", None, 1),
        ("priority", 4, 4),
        ("weighted-fair", None, 16),
        ("weighted-fair", 3, 3),
        ("shortest-remaining", None, 16),
        ("shortest-remaining", 2, 2),
        ("longest-prefix-first", None, 16),
        ("longest-prefix-first", 1, 1),
    ],
)
def test_under_a_stream_of_overtakers_each_starts_within_its_bound(
    name: QueuePolicy, oldest_every: int | None, bound: int, num_older: int
) -> None:
    kv = make_kv()
    queue = WaitingQueue(kv, name, oldest_every)
    arrivals = iter(range(10_000))
    if name == "weighted-fair":  # The victims' tenant has had more than anybody will.
        queue.add(waiting(next(arrivals), tenant="old", max_tokens=9000))
        queue.add(overtake(name, next(arrivals), kv))
        start_first(queue)
    victims = [
        waiting(next(arrivals), tenant="old", max_tokens=50, priority=1)
        for _ in range(num_older + 1)
    ]
    for victim in victims:
        queue.add(victim)
    queue.add(overtake(name, next(arrivals), kv))
    num_before = len(queue) - 1 - len(victims)
    num_starts = 0
    while victims[-1] in queue.in_order:
        queue.add(overtake(name, next(arrivals), kv))
        queue.add(overtake(name, next(arrivals), kv))
        start_first(queue)
        num_starts += 1
        assert num_starts <= bound * (num_before + num_older + 1)
    # And the bound is used: without it the stream goes first.
    assert num_starts == bound * (num_before + num_older + 1) or num_before


def test_strict_priority_without_a_bound_lets_the_less_urgent_wait() -> None:
    queue = WaitingQueue(make_kv(), "priority")
    low = waiting(0, priority=1)
    queue.add(low)
    for arrival in range(1, 200):
        queue.add(waiting(arrival))
        assert start_first(queue) is not low


def test_one_that_starts_by_age_is_as_urgent_as_whom_it_was_put_before() -> None:
    queue = WaitingQueue(make_kv(), "priority", oldest_every=2)
    low = waiting(0, priority=5)
    queue.add(low)
    for arrival in (1, 2):
        queue.add(waiting(arrival, priority=-1))
    assert start_first(queue).arrival == 1
    assert start_first(queue) is low
    assert low.priority == -1
    assert low.request.priority == 5


def test_tenants_that_always_wait_are_served_alike_within_one_request_each() -> None:
    draw = random.Random(3)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    queue = WaitingQueue(make_kv(), "weighted-fair", oldest_every=10**6, tenant_weights=weights)
    arrivals = iter(range(100_000))
    served = dict.fromkeys(weights, 0.0)
    largest = 60
    for tenant in weights:
        for _ in range(3):
            queue.add(waiting(next(arrivals), tenant=tenant, max_tokens=draw.randrange(1, largest)))
    for _ in range(3000):
        started = start_first(queue)
        size = started.num_prompt + (started.request.params.max_tokens or 0)
        served[started.tenant] += size / weights[started.tenant]
        tokens = draw.randrange(1, largest)
        queue.add(waiting(next(arrivals), tenant=started.tenant, max_tokens=tokens))
        assert max(served.values()) - min(served.values()) <= largest / min(weights.values())


def test_one_of_whose_samples_is_withdrawn_while_it_waits_moves_up_as_the_shortest() -> None:
    driver = ReplicaDriver(make_limits(64, max_num_seqs=4), policy="shortest-remaining")
    driver.submit(make_request(range(5), 9, request_id="runs", n=4))
    driver.submit(make_request(range(4), 8, request_id="two", n=2))
    three = make_request(range(4), 6, request_id="three", n=3)
    driver.submit(three)
    queue = driver.replica.batcher.queue
    # 4 + 2 * 8 tokens against 4 + 3 * 6, and 4 + 2 * 6 once one of the three is withdrawn.
    names = [sequence.request.request_id for sequence in queue.in_order]
    assert names == ["two", "three"]
    driver.send(CancelRequest(three.request_id, three.attempt, sibling=1))
    assert queue.first() is driver.sequence(three)
