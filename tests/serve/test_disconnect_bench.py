"""When a client that leaves has its blocks taken back, as a replica's log tells."""

from pathlib import Path

from http_endpoint import Stream, endpoint_of

from rayserve_paged.core.event_log import LoggedEvent
from rayserve_paged.core.replica_messages import StepFinished
from rayserve_paged.event_files import read_log
from rayserve_paged.experiments.disconnect_bench import Departure, prompt_of, take_down


def test_a_departure_is_over_once_the_replica_holds_nothing_of_it(tmp_path: Path) -> None:
    with endpoint_of({"event_log_dir": str(tmp_path)}) as endpoint:
        streams = [
            Stream(endpoint, prompt=list(prompt_of(number)), max_tokens=900) for number in (0, 1)
        ]
        for stream in streams:
            stream.texts(2)
            stream.leave()
        endpoint.wait_for_blocks()
    entries = list(read_log(tmp_path / "r0.0.jsonl"))
    never = float("inf")
    assert take_down(entries, [never, never]) == {}
    steps = [
        entry.now
        for entry in entries
        if isinstance(entry, LoggedEvent) and isinstance(entry.event, StepFinished)
    ]
    found = take_down(entries, [steps[1], never])
    assert set(found) == {0}
    assert 0 < found[0].num_steps < len(steps)
    assert 0.0 < found[0].told_s <= found[0].free_s


def test_two_steps_or_fifty_milliseconds_are_soon() -> None:
    assert Departure(told_s=0.01, free_s=0.04, num_steps=9).is_soon
    assert Departure(told_s=0.9, free_s=1.0, num_steps=2).is_soon
    assert not Departure(told_s=0.01, free_s=0.06, num_steps=3).is_soon
