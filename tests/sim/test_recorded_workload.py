"""The event logs of a run as a workload: who arrived when, with what, and got how much."""

from pathlib import Path

import pytest
from sim_harness import make_spec, make_workload, simulate

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.event_log import LoggedEvent, to_line
from rayserve_paged.event_files import read_log
from rayserve_paged.sim.cluster import Cluster
from rayserve_paged.sim.recorded_workload import is_event_log, read_recorded
from rayserve_paged.sim.requests import SimRequest, requests_of
from rayserve_paged.sim.workload_file import TraceChanges, open_workload

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl"
PLAIN = TraceChanges()


def record(folder: Path, requests: list[SimRequest], by_machine: bool) -> Path:
    """Simulate and write the logs: one file for all machines, or one for each in a folder."""
    lines: dict[str, list[str]] = {}
    cluster = Cluster(
        make_spec(), lambda entry: lines.setdefault(entry.machine, []).append(to_line(entry))
    )
    cluster.run(requests)
    if by_machine:
        for machine, own in lines.items():
            (folder / f"{machine}.0.jsonl").write_text("\n".join(own) + "\n")
        return folder
    path = folder / "events.jsonl"
    path.write_text("\n".join(line for own in lines.values() for line in own) + "\n")
    return path


@pytest.mark.parametrize("by_machine", [False, True])
def test_a_recorded_run_arrives_as_it_did_with_its_own_prompts_and_lengths(
    tmp_path: Path, by_machine: bool
) -> None:
    requests = make_workload(5, num_requests=30)
    path = record(tmp_path, requests, by_machine)
    assert is_event_log(path)
    workload = read_recorded(path)
    vocab_size = make_spec().limits.vocab_size
    assert [r.token_ids for r in workload.requests] == [r.make_prompt(vocab_size) for r in requests]
    assert [r.output_length for r in workload.requests] == [r.num_output_tokens for r in requests]
    assert [r.input_length for r in workload.requests] == [r.num_prompt_tokens for r in requests]
    # Each took its way to the controller.
    first_s = requests[0].arrival_s
    for got, sent in zip(workload.requests, requests, strict=True):
        assert got.arrival_ms / 1000 == pytest.approx(sent.arrival_s - first_s, abs=1e-3)
    assert workload.num_skipped == 0


def test_a_recorded_run_served_again_takes_the_same_times_and_finds_the_same_prefixes(
    tmp_path: Path,
) -> None:
    requests = make_workload(6, num_requests=30)
    again = open_workload(record(tmp_path, requests, True), 16, 0, PLAIN)
    assert (again.num_requests, again.num_skipped) == (30, 0)
    first, second = simulate(make_spec(), requests), simulate(make_spec(), again.requests)
    assert second.report.token_hit_rate == first.report.token_hit_rate > 0
    assert second.report.num_output_tokens == first.report.num_output_tokens
    assert second.report.requests.ttft_s.mean() == pytest.approx(
        first.report.requests.ttft_s.mean(), rel=0.05
    )


def test_what_got_no_token_is_left_out_and_a_submission_made_twice_counts_once(
    tmp_path: Path,
) -> None:
    path = record(tmp_path, make_workload(7, num_requests=12), False)
    lines = path.read_text().splitlines()
    first = next(
        entry
        for entry in read_log(path)
        if isinstance(entry, LoggedEvent) and type(entry.event).__name__ == "SubmitRequest"
    )
    name = first.event.request.request_id  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    twice = [*lines, to_line(first._replace(now=first.now + 3.0))]
    path.write_text("\n".join(twice) + "\n")
    assert len(read_recorded(path).requests) == 12
    silent = [line for line in lines if f'"{name}"' not in line or "SubmitRequest" in line]
    path.write_text("\n".join(silent) + "\n")
    workload = read_recorded(path)
    assert (len(workload.requests), workload.num_skipped) == (11, 1)
    assert workload.requests[0].arrival_ms == 0.0


def test_the_changes_to_a_trace_apply_but_for_repetition(tmp_path: Path) -> None:
    path = record(tmp_path, make_workload(8, num_requests=10), False)
    halved = open_workload(path, 16, 0, TraceChanges(time_scale=0.5, limit=4))
    plain = list(requests_of(read_recorded(path), 16))
    for got, want in zip(halved.requests, plain[:4], strict=True):
        assert got.arrival_s == pytest.approx(want.arrival_s / 2)
        assert got.token_ids == want.token_ids
    with pytest.raises(InvalidInputError, match="repeat=2"):
        open_workload(path, 16, 0, TraceChanges(repeat=2))


def test_what_is_no_log_of_a_run_is_refused(tmp_path: Path) -> None:
    assert not is_event_log(TRACE)
    assert not is_event_log(tmp_path / "none.jsonl")
    with pytest.raises(InvalidInputError, match="event logs"):
        open_workload(tmp_path, 16, 0, PLAIN)
    path = record(tmp_path, make_workload(9, num_requests=3), False)
    lines = [line for line in path.read_text().splitlines() if '"controller"' in line]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InvalidInputError, match=r"a request got a token \(3 did not\)"):
        read_recorded(path)
