"""A controller under any order of events: its books are those of a dict, and 0 when idle."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
from cluster_driver import ClusterDriver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from replica_driver import Stream, make_limits, make_report, make_request, make_scope, prompt_keys

from rayserve_paged.core.book_invariants import check_books
from rayserve_paged.core.controller import Controller
from rayserve_paged.core.controller_messages import (
    ControllerCommand,
    LoseReplica,
    Placed,
    Rejected,
    ReplicaLost,
    SendToReplica,
    StopReplica,
    SubmitRequest,
    WithdrawRequest,
)
from rayserve_paged.core.errors import (
    DuplicateRequestError,
    NoReplicaError,
    QuotaExceededError,
)
from rayserve_paged.core.ids import (
    Attempt,
    BlockKey,
    ConsumerId,
    Incarnation,
    ReplicaId,
    RequestId,
    Term,
)
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    CancelRequest,
    ControllerMessage,
    FenceReplica,
    RegisterReplica,
    ReplicaReport,
)
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.tenant_quota import TenantQuota
from rayserve_paged.sim.fingerprint_rank import oracle

LIMITS = make_limits(num_blocks=16, block_size=2)
SCOPE = make_scope(block_size=2)
NAMES = tuple(ReplicaId(name) for name in ("r0", "r1", "r2"))
QUOTAS = {
    "many": TenantQuota(max_concurrent_requests=4),
    "large": TenantQuota(block_share=1.0),
    "fast": TenantQuota(tokens_per_minute=40),
}
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 7], [1, 2])


@dataclasses.dataclass
class FakeReplica:
    """What a live incarnation was given, what it would tell, and what it has told."""

    incarnation: Incarnation
    assigned: dict[RequestId, Request] = dataclasses.field(default_factory=dict)
    # Of those whose prompts are not computed: tokens and keys that are to be.
    queued: dict[RequestId, int] = dataclasses.field(default_factory=dict)
    wanted: dict[RequestId, set[BlockKey]] = dataclasses.field(default_factory=dict)
    expected: set[BlockKey] = dataclasses.field(default_factory=set)
    keys: set[BlockKey] = dataclasses.field(default_factory=set)
    reports: list[ReplicaReport] = dataclasses.field(default_factory=list)

    def dequeue(self, request: Request) -> None:
        self.queued.pop(request.request_id, None)
        self.expected -= self.wanted.pop(request.request_id, set())

    @property
    def num_tokens(self) -> int:
        return sum(
            len(request.prompt_token_ids) + request.params.n * (request.params.max_tokens or 0)
            for request in self.assigned.values()
        )


def to(
    name: ReplicaId,
    incarnation: Incarnation,
    event: AssignRequest | CancelRequest | FenceReplica,
) -> SendToReplica:
    return SendToReplica(name, incarnation, ControllerMessage(Term(0), event))


class ControllerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.controller = Controller(deployment_lease_s=None)
        self.live: dict[ReplicaId, FakeReplica] = {}
        self.lives = dict.fromkeys(NAMES, 0)
        self.old_reports: list[ReplicaReport] = []
        self.num_requests = 0
        self.now = 0.0
        # Of each tenant what it was charged: when, tokens.
        self.charged: dict[str, list[tuple[float, int]]] = {}

    def handle(self, event: object) -> Sequence[ControllerCommand]:
        return self.controller.handle(event, self.now)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def register(self, name: ReplicaId, incarnation: int) -> Sequence[ControllerCommand]:
        return self.handle(RegisterReplica(name, Incarnation(incarnation), LIMITS, SCOPE))

    # --- replicas -------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def start_a_new_life(self, name: ReplicaId) -> None:
        self.lives[name] += 1
        old = self.live.pop(name, None)
        commands = self.register(name, self.lives[name])
        if old is None:
            assert commands == []
        else:
            self.check_loss(name, old, commands, "replaced by a restart")
        self.live[name] = FakeReplica(Incarnation(self.lives[name]))

    @rule(name=st.sampled_from(NAMES), age=st.integers(0, 2))
    def register_a_life_that_is_known(self, name: ReplicaId, age: int) -> None:
        incarnation = self.lives[name] - age
        if incarnation < 1:
            return
        commands = self.register(name, incarnation)
        if name in self.live:
            assert commands == []
        else:
            (stop,) = commands
            assert isinstance(stop, StopReplica)
            assert stop.incarnation == incarnation

    @rule(name=st.sampled_from(NAMES), age=st.integers(0, 1))
    def lose(self, name: ReplicaId, age: int) -> None:
        commands = self.handle(
            LoseReplica(name, Incarnation(self.lives[name] - age), "a rank is silent")
        )
        if age or name not in self.live:
            assert commands == []
        else:
            self.check_loss(name, self.live.pop(name), commands, "a rank is silent")

    def check_loss(
        self,
        name: ReplicaId,
        lost: FakeReplica,
        commands: Sequence[ControllerCommand],
        reason: str,
    ) -> None:
        consumers = tuple(sorted({request.consumer_id for request in lost.assigned.values()}))
        assert list(commands) == [
            to(name, lost.incarnation, FenceReplica(reason)),
            ReplicaLost(name, lost.incarnation, reason, consumers),
            StopReplica(name, lost.incarnation, reason),
        ]
        self.old_reports += lost.reports

    @precondition(lambda self: self.live)
    @rule(
        pick=st.integers(0, 99),
        num_prefilled=st.integers(0, 3),
        num_finished=st.integers(0, 3),
        fenced=st.integers(0, 9),
    )
    def report(self, pick: int, num_prefilled: int, num_finished: int, fenced: int) -> None:
        name = list(self.live)[pick % len(self.live)]
        replica = self.live[name]
        prefilled = [replica.assigned[request_id] for request_id in replica.queued][:num_prefilled]
        finished = list(replica.assigned.values())[:num_finished]
        published = {key for request in finished for key in prompt_keys(request, SCOPE)}
        evicted = set(sorted(replica.keys)[: pick % 3]) - published
        report = make_report(
            name,
            *finished,
            incarnation=replica.incarnation,
            sequence=len(replica.reports),
            published=published - replica.keys,
            evicted=evicted,
            prefilled=prefilled,
            fenced="a step failed" if fenced == 7 else None,
        )
        replica.keys = (replica.keys | published) - evicted
        replica.reports.append(report)
        for request in prefilled:
            replica.dequeue(request)
        for request in finished:
            del replica.assigned[request.request_id]
            replica.dequeue(request)
        commands = self.handle(report)
        if report.fenced is None:
            assert commands == []
        else:
            self.check_loss(name, self.live.pop(name), commands, "a step failed")

    @rule(pick=st.integers(0, 99))
    def report_once_more(self, pick: int) -> None:
        reports = [*self.old_reports, *(r for live in self.live.values() for r in live.reports)]
        if reports:
            assert self.handle(reports[pick % len(reports)]) == []

    # --- requests -------------------------------------------------------------------------

    def open_requests(self) -> list[tuple[ReplicaId, Request]]:
        return [
            (name, request)
            for name, replica in self.live.items()
            for request in replica.assigned.values()
        ]

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 5),
        consumer=st.sampled_from("ab"),
        n=st.sampled_from([1, 1, 3]),
        tenant=st.sampled_from([None, None, *QUOTAS]),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, consumer: str, n: int, tenant: str | None
    ) -> None:
        self.num_requests += 1
        request = make_request(
            prompt,
            max_tokens,
            request_id=f"q{self.num_requests}",
            consumer_id=consumer,
            n=n,
            tenant=tenant,
            quota=None if tenant is None else QUOTAS[tenant],
        )
        refused = self.live and self.exceeded(request)
        if not refused:
            self.place(request)
            if self.live and tenant is not None:
                costs = self.charged.setdefault(tenant, [])
                costs.append((self.now, request.num_promised_tokens))
            return
        (rejected,) = self.handle(SubmitRequest(request))
        assert isinstance(rejected, Rejected)
        assert isinstance(rejected.error, QuotaExceededError)
        assert rejected.error.name == refused

    @rule(seconds=st.sampled_from([0.5, 7.0, 90.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    def exceeded(self, request: Request) -> str | None:
        """Which limit a new request would exceed, counted anew from all that there was."""
        quota, tenant = request.quota, request.tenant
        if quota is None or tenant is None:
            return None
        live = [one for _name, one in self.open_requests() if one.tenant == tenant]
        if quota.max_concurrent_requests is not None and len(live) >= quota.max_concurrent_requests:
            return "max_concurrent_requests"
        if quota.block_share is not None:
            num_blocks = sum(one.num_tenant_blocks(LIMITS) for one in [*live, request])
            if num_blocks > quota.block_share * LIMITS.num_blocks * len(self.live):
                return "block_share"
        if quota.tokens_per_minute is not None:
            used, at = 0.0, 0.0
            for when, num_tokens in [*self.charged.get(tenant, []), (self.now, 0)]:
                used = max(0.0, used - (when - at) * quota.tokens_per_minute / 60) + num_tokens
                at = when
            if used + request.num_promised_tokens > quota.tokens_per_minute + 0.01:
                return "tokens_per_minute"
        return None

    def place(self, request: Request, first: Sequence[ControllerCommand] = ()) -> None:
        commands = self.handle(SubmitRequest(request))
        assert tuple(commands[: len(first)]) == tuple(first)
        commands = commands[len(first) :]
        if not self.live:
            (rejected,) = commands
            assert isinstance(rejected, Rejected)
            assert isinstance(rejected.error, NoReplicaError)
            return
        keys = prompt_keys(request, SCOPE)
        placed = commands[-1]
        assert isinstance(placed, Placed)
        name = placed.replica_id
        replica = self.live[name]
        depth = 0
        while depth < len(keys) and keys[depth] in replica.keys | replica.expected:
            depth += 1
        num_cached = depth * SCOPE.block_size
        replica.wanted[request.request_id] = set(keys[depth:])
        replica.expected |= set(keys[depth:])
        replica.queued[request.request_id] = max(1, len(request.prompt_token_ids) - num_cached)
        max_tokens = request.params.max_tokens
        assert max_tokens is not None
        names = (request.request_id, request.attempt, name, replica.incarnation)
        assert list(commands) == [
            to(name, replica.incarnation, AssignRequest(request, keys)),
            Placed(*names, max_tokens),
        ]
        replica.assigned[request.request_id] = request

    @precondition(lambda self: self.open_requests())
    @rule(pick=st.integers(0, 99))
    def submit_once_more(self, pick: int) -> None:
        requests = self.open_requests()
        name, request = requests[pick % len(requests)]
        again, placed = self.handle(SubmitRequest(request))
        assignment = AssignRequest(request, prompt_keys(request, SCOPE))
        assert again == to(name, self.live[name].incarnation, assignment)
        assert isinstance(placed, Placed)
        assert (placed.replica_id, placed.attempt) == (name, request.attempt)

    @precondition(lambda self: self.open_requests())
    @rule(pick=st.integers(0, 99))
    def submit_its_next_attempt(self, pick: int) -> None:
        requests = self.open_requests()
        name, request = requests[pick % len(requests)]
        del self.live[name].assigned[request.request_id]
        self.live[name].dequeue(request)
        cancel = CancelRequest(request.request_id, request.attempt)
        expected = to(name, self.live[name].incarnation, cancel)
        self.place(dataclasses.replace(request, attempt=Attempt(request.attempt + 1)), (expected,))

    @precondition(lambda self: self.open_requests())
    @rule(pick=st.integers(0, 99), change=st.sampled_from(["priority", "reader", "attempt"]))
    def submit_another_under_a_name_in_use(self, pick: int, change: str) -> None:
        requests = self.open_requests()
        _name, request = requests[pick % len(requests)]
        changes: dict[str, Any] = {
            "priority": {"priority": 3},
            "reader": {"consumer_id": ConsumerId("another")},
            "attempt": {"attempt": Attempt(request.attempt - 1)},
        }
        other = dataclasses.replace(request, **changes[change])
        (rejected,) = self.handle(SubmitRequest(other))
        assert isinstance(rejected, Rejected)
        assert isinstance(rejected.error, DuplicateRequestError)

    @precondition(lambda self: self.open_requests())
    @rule(pick=st.integers(0, 99), stale=st.booleans())
    def withdraw(self, pick: int, stale: bool) -> None:
        requests = self.open_requests()
        name, request = requests[pick % len(requests)]
        attempt = Attempt(request.attempt + stale)
        commands = self.handle(WithdrawRequest(request.request_id, attempt))
        cancel = CancelRequest(request.request_id, attempt)
        expected = [to(name, self.live[name].incarnation, cancel)]
        assert commands == ([] if stale else expected)

    # --- what must hold -------------------------------------------------------------------

    @invariant()
    def the_books_are_those_of_a_dict(self) -> None:
        check_books(self.controller)
        expected = {name: replica.incarnation for name, replica in self.live.items()}
        assert self.controller.replicas == expected
        for name, replica in self.live.items():
            assert self.controller.num_requests(name) == len(replica.assigned)
            assert self.controller.num_pending_tokens(name) == replica.num_tokens
            assert self.controller.num_queued_tokens(name) == sum(replica.queued.values())

    def teardown(self) -> None:
        while self.open_requests():
            for index in range(len(self.live)):
                self.report(index, num_prefilled=1, num_finished=3, fenced=0)
        for name in self.live:
            assert self.controller.num_requests(name) == 0
            assert self.controller.num_pending_tokens(name) == 0
            assert self.controller.num_queued_tokens(name) == 0
        assert self.controller.fleet.tenants.in_use == {}


ControllerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestControllerMachine = ControllerMachine.TestCase


@dataclasses.dataclass(eq=False)
class Submitted:
    request: Request
    stream: Stream
    withdrawn: bool = False


@pytest.mark.parametrize("seed", range(6))
def test_replicas_that_die_and_come_back_leave_every_stream_right_or_ended(seed: int) -> None:
    draw = random.Random(seed)
    limits = make_limits(num_blocks=12, block_size=2, vocab_size=31, eos_token_ids=(0,))
    cluster = ClusterDriver([limits, limits, dataclasses.replace(limits, num_blocks=8)])
    lives = dict.fromkeys(cluster.all_limits, 0)
    submitted: list[Submitted] = []
    for number in range(400):
        action = draw.choices(
            ["submit", "step", "poll", "withdraw", "tick", "die"], [4, 14, 6, 1, 3, 0.3]
        )
        up = list(cluster.drivers)
        match action[0]:
            case "submit":
                request = make_request(
                    draw.choice(PROMPTS) * draw.randint(1, 2),
                    draw.randint(1, 9),
                    request_id=f"q{number}",
                    consumer_id=draw.choice(["c0", "c1"]),
                    temperature=draw.choice([0.0, 1.0]),
                    seed=number,
                )
                submitted.append(Submitted(request, cluster.submit(request)))
            case "step" if up:
                cluster.step(draw.choice(up))
            case "poll" if up:
                cluster.poll(draw.choice(up), draw.choice(["c0", "c1"]))
            case "withdraw" if submitted:
                chosen = draw.choice(submitted)
                chosen.withdrawn = True
                cluster.withdraw(chosen.request)
            case "tick":
                cluster.tick(draw.choice([0.01, 0.2]))
            case "die":
                name = draw.choice(list(lives))
                if name in cluster.drivers:
                    cluster.lose_replica(name)
                else:
                    lives[name] += 1
                    cluster.start_replica(name, lives[name])
    cluster.run()
    for one in submitted:
        check_end(cluster, one)
    for name, driver in cluster.drivers.items():
        assert driver.replica.kv.pool.num_held == 0
        assert cluster.controller.num_requests(name) == 0
        assert cluster.controller.num_pending_tokens(name) == 0
        assert cluster.controller.num_queued_tokens(name) == 0


def check_end(cluster: ClusterDriver, one: Submitted) -> None:
    stream = one.stream
    expected = oracle(one.request, cluster.all_limits[ReplicaId("r0")])
    assert stream.token_ids == expected.token_ids[: len(stream.token_ids)]
    match stream.finish:
        case FinishReason.STOP | FinishReason.LENGTH:
            assert (stream.token_ids, stream.finish) == expected
        case FinishReason.CANCELLED:
            assert one.withdrawn
        case FinishReason.ERROR:
            # Nobody was there to take it, or to take its next attempt.
            assert one.request.request_id in cluster.rejected
            assert "a rank is silent" in (stream.error or "")
        case None:
            raise AssertionError("a stream has no end")
