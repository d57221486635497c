"""Known faults of other runtimes, shown on a simulated cluster. Ids are those of the docs.

The numbers are the cases' own.
"""

import dataclasses
import time
from typing import cast

import numpy as np
import pytest
from sim_harness import make_spec, make_workload, simulate

from rayserve_paged.core.controller_messages import LoseReplica, Placed, SubmitRequest
from rayserve_paged.core.event_log import (
    CONTROLLER,
    LogEntry,
    LoggedEvent,
    LoggedStart,
    ReplicaStart,
    encode,
)
from rayserve_paged.core.replay import new_replica
from rayserve_paged.core.replica_messages import ReplicaEvent
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.faults import DisturbMessages, FaultPlan, KillReplica, Partition
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.token_streams import Segment


def test_b114_a_report_counts_the_tokens_that_were_delivered() -> None:
    requests = [
        SimRequest(0.0, (Segment(1, 7),), 4, seed=1),
        SimRequest(0.0, (Segment(2, 3),), 4, seed=2),
    ]
    report = simulate(make_spec(num_replicas=1, num_blocks=4, block_size=4), requests).report
    assert report.replicas.num_preemptions.sum() >= 1
    assert report.num_output_tokens == 8
    assert report.requests.num_output_tokens.tolist() == [4, 4]


def test_b115_random_prompts_hit_nothing_however_long_they_wait_and_whatever_is_preempted() -> None:
    requests = [
        SimRequest(0.001 * number, (Segment(100 + number, 64),), 60, seed=number)
        for number in range(40)
    ]
    report = simulate(make_spec(num_blocks=24), requests).report
    assert report.replicas.num_preemptions.sum() >= 1
    assert report.requests.ttft_s.max() > 10 * report.requests.ttft_s.min()
    assert report.replicas.num_queried_tokens.sum() == 40 * 64
    assert report.token_hit_rate == 0.0
    assert report.requests.num_cached_tokens.sum() == 0


def test_b117_a_wall_clock_that_jumps_by_an_hour_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = make_workload(3)
    expected = simulate(make_spec(), requests, with_log=True)
    jumps = iter(range(10**9))
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600 * (next(jumps) % 3 - 1))
    got = simulate(make_spec(), requests, with_log=True)
    assert got.log_digest == expected.log_digest
    columns = got.report.requests
    assert (columns.ttft_s > 0).all()
    assert (columns.e2e_s >= columns.ttft_s).all()


def test_b117_a_replica_whose_clock_is_5_s_ahead_does_the_same() -> None:
    entries: list[LogEntry] = []
    cluster = Cluster(make_spec(num_blocks=60), entries.append)
    report = cluster.run(make_workload(3))
    assert len(report.requests.number) == 60
    (start,) = [entry.start for entry in entries if isinstance(entry, LoggedStart)][2:]
    assert isinstance(start, ReplicaStart)
    right, ahead = new_replica(start), new_replica(start)
    num_commands = 0
    for entry in entries:
        if isinstance(entry, LoggedEvent) and entry.machine == start.replica_id:
            # Adding 5 s to a multiple of 1 / 2**20 s rounds nothing.
            now = round(entry.now * 2**20) / 2**20
            event = cast("ReplicaEvent", entry.event)
            commands = right.handle(event, now)
            assert encode(ahead.handle(event, now + 5.0)) == encode(commands)
            num_commands += len(commands)
    assert num_commands > 100
    assert ahead.accounting() == right.accounting()


def test_b77_a_dead_replica_gets_nothing_and_one_that_was_out_of_reach_is_taken_back() -> None:
    # 100 requests a second on r0, r1 and r2 of the case's A, B and C. What looks like a failure of
    # C is that of the link to one of its consumers, which holds it for lost.
    requests = [
        SimRequest(0.01 * number, (Segment(number, 40),), 8, seed=number) for number in range(2500)
    ]
    plan = FaultPlan(
        faults=(
            KillReplica(at_s=4.0, replica="r0"),
            Partition(from_s=8.0, until_s=11.0, places=("r1",)),
            DisturbMessages(from_s=13.0, until_s=23.0, ends=("c0", "r2"), lost=1.0),
        )
    )
    spec = dataclasses.replace(
        make_spec(num_replicas=3, num_blocks=2000, max_num_seqs=64), start_s=1000.0
    )
    placed: dict[str, list[float]] = {"r0": [], "r1": [], "r2": []}
    first_error_s: dict[str, float] = {}
    now = 0.0

    def record(entry: LogEntry) -> None:
        nonlocal now
        if entry.machine != CONTROLLER or isinstance(entry, LoggedStart):
            return
        if isinstance(entry, LoggedEvent):
            now = entry.now
            match entry.event:
                case SubmitRequest(lost_at=(replica_id, _)) | LoseReplica(replica_id):
                    first_error_s.setdefault(replica_id, now)
            return
        for command in entry.commands:
            if isinstance(command, Placed):
                placed[command.replica_id].append(now)

    cluster = Cluster(spec, record, plan=plan)
    report = cluster.run(requests)
    assert report.num_output_tokens == 2500 * 8
    assert 4.0 <= first_error_s["r0"] <= 5.0
    assert max(placed["r0"]) <= first_error_s["r0"]
    back = [at for at in placed["r1"] if at >= 11.0]
    assert back[0] <= 11.0 + 5.0
    assert len(back) > 300
    # It was held for lost, and was back as soon as it had answered the controller.
    assert first_error_s["r2"] >= 13.0
    assert max(np.diff(placed["r2"])) < 1.0
    assert dict(cluster.controller.controller.replicas) == {"r1": 0, "r2": 0}
