"""The simulated cluster: the same seed the same log, several steps as single ones, nothing lost."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sim_harness import BLOCK_SIZE, Outcome, make_spec, make_workload, simulate

from rayserve_paged.core.event_log import LogEntry, LoggedCommands, LoggedEvent, to_line
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.replay import replay
from rayserve_paged.core.replica_messages import AnswerPoll, ReplicaReport, RunStep
from rayserve_paged.core.request import FinishReason
from rayserve_paged.event_files import read_log
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.cluster_spec import ClusterSpec
from rayserve_paged.sim.network import NetworkSpec
from rayserve_paged.sim.report import FINISHES
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.token_streams import Segment, answer_stream, make_prompt

LENGTH = FINISHES.index(FinishReason.LENGTH)


def answer_of(request: SimRequest, spec: ClusterSpec) -> tuple[int, ...]:
    segment = Segment(answer_stream(request.seed), request.num_output_tokens)
    return tuple(make_prompt((segment,), spec.limits.vocab_size))


# --- determinism ----------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_log_and_another_seed_another() -> None:
    one, again, other = (
        simulate(make_spec(), make_workload(seed), with_log=True) for seed in (1, 1, 2)
    )
    assert one.log_digest == again.log_digest
    assert one.report.requests.end_s.tolist() == again.report.requests.end_s.tolist()
    assert one.report.num_events == again.report.num_events
    assert one.log_digest != other.log_digest


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_log_does_not_depend_on_how_python_hashes(hash_seed: str) -> None:
    program = (
        "from sim_harness import make_spec, make_workload, simulate;"
        "spec, requests = make_spec(num_consumers=3), make_workload(1, num_requests=20);"
        "print(simulate(spec, requests, with_log=True).log_digest)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
    )
    requests = make_workload(1, num_requests=20)
    expected = simulate(make_spec(num_consumers=3), requests, with_log=True)
    assert run.stdout.strip() == expected.log_digest


def test_fresh_machines_replay_the_log_to_the_same_commands(tmp_path: Path) -> None:
    spec = make_spec(num_blocks=60)
    path = tmp_path / "events.jsonl"
    with path.open("w") as file:
        cluster = Cluster(spec, lambda entry: print(to_line(entry), file=file))
        report = cluster.run(make_workload(3))
    entries = list(read_log(path))
    result = replay(entries)
    assert result.difference is None
    assert result.num_machines == 3
    answered = [entry.commands for entry in entries if isinstance(entry, LoggedCommands)]
    commands = [command for some in answered for command in some]
    num_plans = sum(isinstance(command, RunStep) for command in commands)
    assert num_plans == int(report.replicas.num_plans.sum())
    assert sum(isinstance(command, AnswerPoll | ReplicaReport) for command in commands) > 100


# --- several steps as one event -------------------------------------------------------------


def assert_equal(several: Outcome, single: Outcome) -> None:
    assert several.streams == single.streams
    assert several.accountings == single.accountings
    assert several.keys == single.keys
    assert several.placed == single.placed
    assert several.num_steps == single.num_steps
    for column in ("num_hit_tokens", "num_queried_tokens", "num_preemptions"):
        several_column = getattr(several.report.replicas, column)
        assert several_column.tolist() == getattr(single.report.replicas, column).tolist()
    bins = [outcome.report.token_gaps_s.nonzero() for outcome in (several, single)]
    assert bins[0][0].tolist() == bins[1][0].tolist()
    assert bins[0][1].tolist() == bins[1][1].tolist()
    assert several.report.token_gaps_s.mean == pytest.approx(single.report.token_gaps_s.mean)


@pytest.mark.parametrize("num_blocks", [40, 200])
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_several_steps_give_the_streams_times_and_ledger_of_single_steps(
    seed: int, num_blocks: int
) -> None:
    requests = make_workload(seed)
    several = simulate(make_spec(num_blocks=num_blocks), requests)
    single = simulate(make_spec(num_blocks=num_blocks, max_decode_steps=1), requests)
    assert_equal(several, single)
    assert single.num_plans == single.num_steps
    assert several.num_plans < single.num_plans * 0.6
    if num_blocks == 40:
        assert several.report.replicas.num_preemptions.sum() > 0


def test_uneven_steps_are_as_uneven_in_plans_of_several() -> None:
    requests = make_workload(6)
    uneven = dataclasses.replace(make_spec(), step_ratios=(0.8, 1.2))
    several = simulate(uneven, requests)
    single = simulate(
        dataclasses.replace(uneven, batch=make_spec(max_decode_steps=1).batch), requests
    )
    assert_equal(several, single)
    assert several.num_plans < single.num_plans * 0.6
    even = simulate(make_spec(), requests)
    for percent, low, high in ((10, 0.0, 0.9), (90, 1.1, 9.0)):
        gap_s = several.report.token_gaps_s.percentile(percent)
        even_s = even.report.token_gaps_s.percentile(percent)
        assert gap_s is not None
        assert even_s is not None
        assert low < gap_s / even_s < high


def test_with_real_bandwidths_the_times_differ_by_what_a_longer_delivery_takes() -> None:
    requests = make_workload(5)
    network = NetworkSpec()
    several = simulate(make_spec(network=network), requests)
    single = simulate(make_spec(network=network, max_decode_steps=1), requests)
    for request_id, stream in single.streams.items():
        other = several.streams[request_id]
        assert (other.token_ids, other.finish) == (stream.token_ids, stream.finish)
        assert other.first_s == pytest.approx(stream.first_s, abs=1e-5)
        assert other.end_s == pytest.approx(stream.end_s, abs=1e-5)


def test_an_arrival_ends_a_plan_of_several_steps_after_the_step_that_is_running() -> None:
    first = SimRequest(0.0, (Segment(1, 16),), 40, seed=1)
    alone = simulate(make_spec(num_replicas=1), [first])
    second = SimRequest(0.05, (Segment(2, 16),), 1, seed=2)
    both = simulate(make_spec(num_replicas=1), [first, second])
    answered_s = both.streams[RequestId("q1")].end_s
    assert answered_s is not None
    # One step that runs, and its own: a block's 16 steps would take longer.
    step_s = alone.report.token_gaps_s.mean
    assert step_s is not None
    assert answered_s - 0.05 < 2.5 * step_s
    assert both.streams[RequestId("q0")].token_ids == alone.streams[RequestId("q0")].token_ids


def test_two_steps_in_flight_give_the_same_streams() -> None:
    requests = make_workload(6)
    one, two = (
        simulate(make_spec(max_decode_steps=1, pipeline_depth=depth), requests) for depth in (1, 2)
    )
    tokens = {name: stream.token_ids for name, stream in one.streams.items()}
    assert {name: stream.token_ids for name, stream in two.streams.items()} == tokens


# --- conservation ---------------------------------------------------------------------------


def test_every_request_ends_once_with_the_tokens_that_its_seed_decides() -> None:
    spec, requests = make_spec(num_blocks=40), make_workload(7)
    outcome = simulate(spec, requests)
    assert sorted(outcome.report.requests.number.tolist()) == list(range(len(requests)))
    for number, request in enumerate(requests):
        stream = outcome.streams[RequestId(f"q{number}")]
        assert stream.num_ends == 1
        assert stream.token_ids == answer_of(request, spec)
    columns = outcome.report.requests
    assert (columns.finish == LENGTH).all()
    assert columns.num_output_tokens.sum() == sum(r.num_output_tokens for r in requests)
    assert outcome.report.num_output_tokens == columns.num_output_tokens.sum()
    assert (columns.first_token_s > columns.arrival_s).all()
    assert (columns.end_s >= columns.first_token_s).all()
    gaps = outcome.report.token_gaps_s
    assert gaps.count == sum(request.num_output_tokens - 1 for request in requests)


def test_a_request_that_can_never_fit_is_refused_and_the_others_are_served() -> None:
    fits = SimRequest(0.0, (Segment(1, 16),), 4, seed=1)
    too_long = SimRequest(0.1, (Segment(2, 5000),), 4, seed=2)
    report = simulate(
        make_spec(num_blocks=20), [fits, too_long, dataclasses.replace(fits, arrival_s=0.2)]
    ).report
    columns = report.requests
    assert columns.number.tolist() == [0, 1, 2]
    assert columns.is_placed.tolist() == [True, False, True]
    assert np.isnan(columns.ttft_s).tolist() == [False, True, False]
    assert FINISHES[columns.finish[1]] is FinishReason.ERROR
    assert list(report.errors) == [1]
    assert "20" in report.errors[1]


def test_equal_prefixes_hit_and_the_hits_are_counted_by_block() -> None:
    story = Segment(9, 5 * BLOCK_SIZE + 3)
    requests = [
        SimRequest(float(number), (story, Segment(20 + number, 10)), 5, seed=number)
        for number in range(3)
    ]
    report = simulate(make_spec(num_replicas=1), requests).report
    assert report.requests.num_cached_tokens.tolist() == [0, 5 * BLOCK_SIZE, 5 * BLOCK_SIZE]
    num_prompt = 5 * BLOCK_SIZE + 13
    assert report.token_hit_rate == 2 * 5 * BLOCK_SIZE / (3 * num_prompt)


def test_a_second_turn_hits_the_answer_of_the_first() -> None:
    first = SimRequest(0.0, (Segment(1, 20),), 30, seed=5)
    answer = Segment(answer_stream(first.seed), first.num_output_tokens)
    second = SimRequest(5.0, (*first.segments, answer, Segment(2, 7)), 3, seed=6)
    report = simulate(make_spec(num_replicas=1), [first, second]).report
    # 20 + 30 tokens of which the last one's KV was never written: 3 blocks of 16.
    assert report.requests.num_cached_tokens.tolist() == [0, 48]


def test_idle_replicas_cost_no_events() -> None:
    requests = make_workload(8, num_requests=20)
    few, many = (
        simulate(make_spec(num_replicas=count), requests[:1]).report.num_events for count in (1, 64)
    )
    assert few == many


def test_the_placement_that_is_named_places() -> None:
    story = Segment(9, 5 * BLOCK_SIZE)
    requests = [SimRequest(float(n), (story, Segment(20 + n, 10)), 5, seed=n) for n in range(4)]
    spec = make_spec(num_replicas=4)
    aware = simulate(spec, requests)
    in_turn = simulate(dataclasses.replace(spec, placement="round-robin"), requests)
    assert aware.placed == ["r0"] * 4
    assert in_turn.placed == ["r0", "r1", "r2", "r3"]


# --- the report -----------------------------------------------------------------------------


def test_loads_are_taken_down_as_they_change_and_end_idle() -> None:
    outcome = simulate(make_spec(num_blocks=60), make_workload(9))
    loads = outcome.report.loads
    assert (np.diff(loads.time_s) >= 0).all()
    for replica in range(2):
        mine = loads.replica == replica
        assert loads.num_running[mine].max() > 1
        assert loads.num_running[mine][-1] == loads.num_waiting[mine][-1] == 0
        free, cached = loads.num_free_blocks[mine][-1], loads.num_cached_blocks[mine][-1]
        assert free + cached == 60
    assert (loads.num_free_blocks + loads.num_cached_blocks <= 60).all()


def test_the_state_of_replicas_is_taken_down_at_ticks_and_adds_up_to_their_totals() -> None:
    interval_s = 0.125
    spec = dataclasses.replace(make_spec(num_blocks=60), load_interval_s=interval_s)
    report = simulate(spec, make_workload(9)).report
    loads = report.loads
    ticks = loads.time_s / interval_s
    at_end = loads.time_s > report.end_s
    assert (ticks[~at_end] == ticks[~at_end].round()).all()
    for replica in range(2):
        mine = loads.replica == replica
        assert (np.diff(loads.time_s[mine]) > 0).all()
        for total in ("num_preemptions", "num_queried_tokens", "num_hit_tokens", "num_steps"):
            column = getattr(loads, total)[mine]
            assert (np.diff(column) >= 0).all()
            assert column[-1] == getattr(report.replicas, total)[replica]
    assert loads.num_preemptions.max() > 0


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_open_slots_are_those_that_the_ledger_counts_as_lost_inside_blocks(
    pipeline_depth: int,
) -> None:
    counted: list[tuple[int, int]] = []

    def record(entry: LogEntry) -> None:
        if isinstance(entry, LoggedEvent) and entry.machine == "r0":
            replica = host.replica
            ledger = replica.accounting()
            counted.append((replica.batcher.num_open_slots, ledger.internal_fragmentation_slots))

    spec = make_spec(num_replicas=1, num_blocks=60, pipeline_depth=pipeline_depth)
    cluster = Cluster(spec, record)
    (host,) = cluster.replicas.values()
    cluster.run(make_workload(4))
    assert len({open_slots for open_slots, _lost in counted}) > 20
    assert all(open_slots == lost for open_slots, lost in counted)


def test_a_request_beyond_the_queue_limit_is_refused() -> None:
    spec = make_spec(num_replicas=1, max_num_seqs=2)
    batch = spec.batch.model_copy(update={"max_num_waiting": 1})
    requests = [SimRequest(0.0, (Segment(n, 16),), 40, seed=n) for n in range(5)]
    report = simulate(dataclasses.replace(spec, batch=batch), requests).report
    assert report.requests.is_placed[np.argsort(report.requests.number)].tolist() == [
        *[True] * 3,
        *[False] * 2,
    ]
    assert sorted(report.errors) == [3, 4]
    assert "1 sequences wait and 1 may" in report.errors[3]


def test_times_of_a_request_alone_are_those_of_its_steps_and_messages() -> None:
    spec = make_spec(num_replicas=1, num_consumers=1)
    request = SimRequest(1.0, (Segment(1, 40),), 3, seed=1)
    report = simulate(spec, [request]).report

    def step_s(num_computed: int, num_tokens: int) -> float:
        rows = (np.array([num_computed], np.int32), np.array([num_tokens], np.int32))
        return float(spec.cost.step_seconds(*rows, 1, 1)[0])

    latency_s = spec.network.between_nodes.latency_s
    # Consumer to controller to replica, and the token back; its poll came while the step ran.
    first_s = 1.0 + 2 * latency_s + step_s(0, 40) + latency_s
    end_s = first_s + step_s(40, 1) + step_s(41, 1)
    assert report.requests.first_token_s[0] == pytest.approx(first_s, rel=1e-12)
    assert report.requests.end_s[0] == pytest.approx(end_s, rel=1e-12)
    assert report.requests.itl_s[0] == pytest.approx((step_s(40, 1) + step_s(41, 1)) / 2)
    assert report.replicas.busy_s[0] == pytest.approx(step_s(0, 40) + step_s(40, 1) + step_s(41, 1))
    assert report.output_tokens_per_s == pytest.approx(3 / (end_s - 1.0))
