"""What a simulation tells of replicas and controllers that die."""

import dataclasses
import itertools

import pytest
from sim_harness import make_spec, make_workload

from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.event_log import CONTROLLER, LogEntry, LoggedEvent, LoggedStart
from rayserve_paged.core.ids import ReplicaId, RequestId
from rayserve_paged.core.replay import replay
from rayserve_paged.core.replica_messages import StepFinished
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.faults import (
    ClusterFault,
    FaultPlan,
    KillController,
    KillReplica,
    Partition,
    SlowReplica,
)
from rayserve_paged.sim.report import SimReport

NUM_REQUESTS = 30
START_S = 1.0
Times = dict[RequestId, list[float]]
"""When each token of a request came."""


def serve(
    *faults: ClusterFault, seed: int = 1, num_blocks: int = 200, max_decode_steps: int = 1024
) -> tuple[SimReport, Times]:
    spec = dataclasses.replace(
        make_spec(num_blocks=num_blocks, max_decode_steps=max_decode_steps),
        start_s=START_S,
        recovery=RecoveryConfig(patience_s=1e6),
    )
    times: Times = {}

    def watch(update: StreamUpdate, now: float) -> None:
        times.setdefault(update.request_id, []).extend([now] * len(update.token_ids))

    cluster = Cluster(spec, watch=watch, plan=FaultPlan(faults=faults))
    return cluster.run(make_workload(seed, NUM_REQUESTS)), times


def num_gaps(seed: int = 1) -> int:
    return sum(request.num_output_tokens - 1 for request in make_workload(seed, NUM_REQUESTS))


DEATHS = [
    (KillReplica(at_s=1.2, replica="r0"),),
    (KillReplica(at_s=1.2, replica="r0", hangs=True),),
    (
        KillReplica(at_s=1.2, replica="r0"),
        KillReplica(at_s=1.5, replica="r1"),
        KillReplica(at_s=2.9, replica="r0"),
    ),
]


@pytest.mark.parametrize("faults", DEATHS, ids=["killed", "hangs", "three"])
@pytest.mark.parametrize("num_blocks", [40, 200])
def test_a_death_amid_a_plan_of_several_steps_leaves_what_single_steps_would(
    faults: tuple[ClusterFault, ...], num_blocks: int
) -> None:
    several, _times = serve(*faults, num_blocks=num_blocks)
    single, _times = serve(*faults, num_blocks=num_blocks, max_decode_steps=1)
    for column in ("num_steps", "num_hit_tokens", "num_preemptions", "num_computed_tokens"):
        found = [getattr(report.replicas, column).tolist() for report in (several, single)]
        assert found[0] == found[1], column
    assert several.requests.num_attempts.tolist() == single.requests.num_attempts.tolist()
    assert several.requests.num_attempts.max() > 1
    assert several.deaths == single.deaths
    assert several.token_gaps_s.count == single.token_gaps_s.count
    # To the round trip of a poll that single steps had answered before.
    assert several.token_gaps_s.mean == pytest.approx(single.token_gaps_s.mean, rel=1e-3)
    assert several.requests.end_s.tolist() == pytest.approx(
        single.requests.end_s.tolist(), abs=1e-3
    )


@pytest.mark.parametrize("faults", DEATHS, ids=["killed", "hangs", "three"])
def test_the_pause_of_a_request_that_lost_its_replica_is_a_time_between_tokens(
    faults: tuple[ClusterFault, ...],
) -> None:
    report, times = serve(*faults, max_decode_steps=1)
    quiet, _times = serve(max_decode_steps=1)
    assert report.token_gaps_s.count == quiet.token_gaps_s.count == num_gaps()
    assert report.num_output_tokens == quiet.num_output_tokens
    seen = [b - a for came in times.values() for a, b in itertools.pairwise(came)]
    longest_s = report.token_gaps_s.percentile(100)
    assert longest_s == pytest.approx(max(seen), rel=0.02)
    quiet_s = quiet.token_gaps_s.percentile(100)
    assert longest_s is not None
    assert quiet_s is not None
    assert longest_s > 1.5 * quiet_s
    assert report.token_gaps_s.mean == pytest.approx(sum(seen) / len(seen), rel=0.01)


def test_tokens_that_no_reader_got_before_a_death_are_timed_once() -> None:
    """Cut off, the replica goes on sampling for a while before it dies."""
    cut_off = Partition(from_s=1.0, until_s=2.0, places=("r0",))
    report, times = serve(cut_off, KillReplica(at_s=1.25, replica="r0"))
    assert report.requests.num_attempts.max() > 1
    assert not any(1.0 < came < 1.25 for came in times[RequestId("q6")])
    assert report.token_gaps_s.count == num_gaps()


def test_a_replica_that_is_cut_off_for_long_is_given_up_and_lingers_beside_its_next_life() -> None:
    cut_off = Partition(from_s=1.0, until_s=7.0, places=("controller", "r1"))
    spec = dataclasses.replace(
        make_spec(), start_s=START_S, recovery=RecoveryConfig(patience_s=1e6)
    )
    finished: dict[RequestId, int] = {}

    def watch(update: StreamUpdate, now: float) -> None:
        if update.finish is not None:
            assert update.finish is FinishReason.LENGTH
            finished[update.request_id] = finished.get(update.request_id, 0) + 1

    cluster = Cluster(spec, watch=watch, plan=FaultPlan(faults=(cut_off,)))
    first = cluster.latest(ReplicaId("r0"))
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        # The controller has given it up after 3 s, and started the next a second later.
        seen.append((first.stopped is None, cluster.latest(ReplicaId("r0")) is not first))

    for at_s in (3.9, 5.5, 6.9, 7.1):
        cluster.engine.at(at_s, look)
    requests = [dataclasses.replace(one, arrival_s=one.arrival_s + 0.4) for one in make_workload(1)]
    cluster.run(requests)
    assert seen == [(True, False), (True, True), (True, True), (False, True)]
    assert finished == {RequestId(f"q{number}"): 1 for number in range(len(requests))}
    # Its neighbour is on the controller's side, and lives on.
    assert list(cluster.replicas) == [
        (ReplicaId("r0"), 0),
        (ReplicaId("r1"), 0),
        (ReplicaId("r0"), 1),
    ]


def test_a_life_that_lingers_is_logged_and_counted_beside_its_next_one() -> None:
    cut_off = Partition(from_s=1.0, until_s=7.0, places=("controller", "r1"))
    slow = SlowReplica(from_s=0.0, until_s=9.0, replica="r0", factor=20.0)
    spec = dataclasses.replace(
        make_spec(max_decode_steps=1), start_s=START_S, recovery=RecoveryConfig(patience_s=1e6)
    )
    log: list[LogEntry] = []
    cluster = Cluster(spec, log.append, plan=FaultPlan(faults=(cut_off, slow)))
    report = cluster.run(
        dataclasses.replace(one, arrival_s=0.5, num_output_tokens=200)
        for one in make_workload(1, 8)
    )
    steps = [
        entry
        for entry in log
        if isinstance(entry, LoggedEvent) and isinstance(entry.event, StepFinished)
    ]
    last_s = {entry.machine: entry.now for entry in steps}
    assert last_s["r0"] > 6.5, "it has served until it could be ended"
    assert replay(log).difference is None
    assert report.replicas.num_steps.sum() == len(steps)
    names = [entry.machine for entry in log if isinstance(entry, LoggedStart)]
    assert names == [CONTROLLER, "r0", "r1", "r0.1"]
    assert [cluster.life(name).source for name in names[1:]] == list(cluster.replicas)


def needed(report: SimReport) -> int:
    columns = report.requests
    computed = columns.num_prompt_tokens - columns.num_cached_tokens + columns.num_output_tokens - 1
    return int(computed.sum())


def test_what_is_computed_is_what_the_requests_need_and_what_deaths_make_them_need_again() -> None:
    quiet, _times = serve()
    assert quiet.replicas.num_computed_tokens.sum() == needed(quiet)
    report, _times = serve(KillReplica(at_s=1.2, replica="r0"))
    again = int(report.replicas.num_computed_tokens.sum()) - needed(report)
    lost = report.requests.num_attempts > 1
    lengths = report.requests.num_prompt_tokens + report.requests.num_output_tokens
    assert 0 < again <= lengths[lost].sum()


def test_deaths_are_told_with_when_each_was_over() -> None:
    faults = (
        KillReplica(at_s=1.2, replica="r0"),
        KillReplica(at_s=1.3, replica="r0"),
        KillController(at_s=1.8, down_s=0.25),
        KillReplica(at_s=2.1, replica="r1", hangs=True),
        KillReplica(at_s=1000.0, replica="r1"),
    )
    report, _times = serve(*faults)
    told = [(death.name, death.time_s, death.hangs) for death in report.deaths]
    # One that is down stays down, and the run is over before the last.
    assert told == [("r0", 1.2, False), ("controller", 1.8, False), ("r1", 2.1, True)]
    backs = {death.name: death.back_s for death in report.deaths}
    assert backs["controller"] == 2.05
    # The controller notices after half a second, and starts it at once.
    assert backs["r0"] == pytest.approx(1.2 + 0.5 + START_S)
    assert backs["r1"] is not None
    assert backs["r1"] > 2.1 + START_S


def test_a_replica_that_is_down_holds_nothing_and_nothing_is_free_there() -> None:
    spec = dataclasses.replace(make_spec(), start_s=2.0, load_interval_s=0.1)
    plan = FaultPlan(faults=(KillReplica(at_s=1.0, replica="r0"),))
    loads = Cluster(spec, plan=plan).run(make_workload(1)).loads
    totals = loads.num_free_blocks + loads.num_cached_blocks + loads.num_held_blocks
    of_dead = (loads.replica == 0) & (loads.time_s > 1.0) & (loads.time_s < 3.5)
    assert set(totals[of_dead]) == {0}
    assert set(totals[~of_dead]) == {200}
    assert loads.num_held_blocks[~of_dead].max() > 0
