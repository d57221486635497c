"""Known faults of other runtimes: which replica takes a request. Ids are those of the docs.

The numbers are the cases' own.
"""

import random
import tracemalloc
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count

import pytest
from replica_driver import depths, make_limits, make_report, make_request, make_scope, prompt_keys

from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import Placed, SubmitRequest
from rayserve_paged.core.directory import Directory
from rayserve_paged.core.ids import BlockKey, Incarnation, ReplicaId
from rayserve_paged.core.replica_messages import RegisterReplica
from rayserve_paged.core.request import Request

BLOCK_SIZE = 16
LIMITS = make_limits(
    num_blocks=10_000, block_size=BLOCK_SIZE, vocab_size=2**30, max_model_len=100_000
)
SCOPE = make_scope(block_size=BLOCK_SIZE)


class Router:
    """A controller whose replicas are never short of anything, and compute when they are told."""

    def __init__(self, num_replicas: int) -> None:
        self.controller = Controller(None)
        self.names = [ReplicaId(f"r{i}") for i in range(num_replicas)]
        self.num_reports = dict.fromkeys(self.names, 0)
        self.numbers = count()
        for name in self.names:
            self.controller.handle(RegisterReplica(name, Incarnation(0), LIMITS, SCOPE), 0.0)

    def unique(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt has."""
        return [next(self.numbers) for _ in range(num_tokens)]

    def submit(self, prompt: Sequence[int], consumer: str = "c0") -> tuple[ReplicaId, Request]:
        name = f"q{next(self.numbers)}"
        request = make_request(prompt, 64, request_id=name, consumer_id=consumer)
        *_sent, placed = self.controller.handle(SubmitRequest(request), 0.0)
        assert isinstance(placed, Placed)
        return placed.replica_id, request

    def end(self, replica: ReplicaId, request: Request, answer: Sequence[int] = ()) -> None:
        """The request has ended; what it computed, with its answer, is cached and reported."""
        whole = make_request([*request.prompt_token_ids, *answer], 1)
        report = make_report(
            replica,
            request,
            prefilled=[request],
            sequence=self.num_reports[replica],
            published=prompt_keys(whole, SCOPE),
        )
        self.num_reports[replica] += 1
        self.controller.handle(report, 0.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_b104_a_prefix_that_all_prompts_share_is_served_by_all_replicas(seed: int) -> None:
    router, draw = Router(8), random.Random(seed)
    common = router.unique(512)
    placed: Counter[ReplicaId] = Counter()
    in_flight: list[tuple[ReplicaId, Request]] = []
    for _ in range(800):
        if len(in_flight) == 64:
            router.end(*in_flight.pop(draw.randrange(64)))
        in_flight.append(router.submit([*common, *router.unique(64)]))
        placed[in_flight[-1][0]] += 1
    assert len(placed) == 8
    assert max(placed.values()) <= 2 * min(placed.values())


@pytest.mark.parametrize("num_added", [8, 64, 200])
@pytest.mark.parametrize("in_turns", [False, True])
def test_b104_sessions_that_run_one_request_at_a_time_use_all_replicas(
    num_added: int, in_turns: bool
) -> None:
    router = Router(2)
    history = [router.unique(256)] * 14
    placed: Counter[ReplicaId] = Counter()
    homes: list[set[ReplicaId]] = [set() for _ in range(14)]
    turns = [(session, turn) for session in range(14) for turn in range(32)]
    for session, _turn in sorted(turns, key=lambda turn: turn[1]) if in_turns else turns:
        prompt = [*history[session], *router.unique(num_added)]
        replica, request = router.submit(prompt)
        answer = router.unique(num_added)
        router.end(replica, request, answer)
        history[session] = [*prompt, *answer]
        placed[replica] += 1
        homes[session].add(replica)
    assert len(placed) == 2
    assert min(placed.values()) >= 0.25 * 14 * 32
    # And most sessions stay where their history is.
    assert sum(len(home) == 1 for home in homes) >= 12


@pytest.mark.parametrize("num_in_flight", [1, 10])
def test_b104_prompts_that_share_nothing_are_spread_evenly(num_in_flight: int) -> None:
    router = Router(5)
    placed: Counter[ReplicaId] = Counter()
    in_flight: deque[tuple[ReplicaId, Request]] = deque()
    for number in range(500):
        if len(in_flight) == num_in_flight:
            router.end(*in_flight.popleft())
        in_flight.append(router.submit(router.unique(64 + number % 7)))
        placed[in_flight[-1][0]] += 1
    assert len(placed) == 5
    assert max(placed.values()) <= 1.5 * min(placed.values())


@pytest.mark.parametrize("num_shared", [0, 512])
def test_b105_a_burst_between_two_reports_does_not_go_to_one_replica(num_shared: int) -> None:
    draw = random.Random(num_shared)
    num_even = 0
    for _ in range(100):
        router = Router(8)
        common = router.unique(num_shared)
        # What the reports told: one replica has computed the prefix, and some are at work.
        router.end(*router.submit([*common, *router.unique(64)]))
        for _ in range(draw.randrange(8)):
            router.submit(router.unique(64))
        before = Counter({name: router.controller.num_requests(name) for name in router.names})
        for number in range(16):
            router.submit([*common, *router.unique(64)], consumer=f"router{number}")
        taken = [router.controller.num_requests(name) - before[name] for name in router.names]
        assert sum(taken) == 16
        num_even += max(taken) <= 6
    assert num_even >= 95


def test_b109_the_directory_stays_within_its_limit_and_so_does_its_memory() -> None:
    directory = Directory(max_keys=100_000)
    sizes = []
    tracemalloc.start()
    try:
        for start in range(0, 1_000_000, 1000):
            keys = [BlockKey(number.to_bytes(32)) for number in range(start, start + 1000)]
            directory.update(start // 1000 % 8, keys, ())
            assert len(directory) <= 100_000
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert depths(directory, [BlockKey((999_999).to_bytes(32))], 8).count(1) == 1
    assert depths(directory, [BlockKey((0).to_bytes(32))], 8) == [0] * 8
    assert max(sizes[200:]) <= 1.01 * max(sizes[:200])


def test_b109_prefixes_in_use_outlast_others_that_were_published_later() -> None:
    directory = Directory(max_keys=100)
    chains = [[BlockKey(bytes([chain, i]) * 16) for i in range(10)] for chain in range(30)]
    for chain in chains:
        directory.update(0, chain, ())
        assert depths(directory, chains[0], 1) == [10]
        assert len(directory) <= 100
    assert depths(directory, chains[1], 1) == [0]
