"""Known faults of other runtimes, shown on a simulated cluster. Ids are those of the docs.

The numbers are the cases' own.
"""

import time
from typing import cast

import pytest
from sim_harness import make_spec, make_workload, simulate

from rayserve_paged.core.event_log import (
    LogEntry,
    LoggedEvent,
    LoggedStart,
    ReplicaStart,
    encode,
)
from rayserve_paged.core.replay import new_replica
from rayserve_paged.core.replica_messages import ReplicaEvent
from rayserve_paged.sim.cluster import Cluster
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
