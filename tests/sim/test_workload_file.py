"""Workloads from files: traces with changes, descriptions of synthetic ones, what is refused."""

from pathlib import Path

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.synthetic import SyntheticWorkload, generate
from rayserve_paged.sim.workload_file import TraceChanges, open_workload

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl"
DESCRIPTION = """
num_requests: 40
arrivals: {kind: gamma, rate_per_s: 2, cv: 1.5}
prompt_tokens: {median: 512}
output_tokens: {median: 128, sigma: 0.5}
system_prompts: {count: 4, num_tokens: 512}
"""


def test_a_trace_is_changed_in_order_and_served_lazily() -> None:
    plain = open_workload(TRACE, 64, 0, TraceChanges())
    assert (plain.num_requests, plain.num_skipped) == (40, 0)
    requests = list(plain.requests)
    changes = TraceChanges(time_scale=0.5, repeat=2, limit=50)
    changed = open_workload(TRACE, 64, 0, changes)
    assert changed.num_requests == 50
    got = list(changed.requests)
    assert [r.arrival_s for r in got[:40]] == [r.arrival_s / 2 for r in requests]
    assert got[0].segments == requests[0].segments
    assert got[40].segments[0].stream != requests[0].segments[0].stream
    assert 0 < open_workload(TRACE, 64, 0, TraceChanges(sample=0.5)).num_requests < 40


def test_a_description_gives_the_workload_that_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(DESCRIPTION)
    opened = open_workload(path, 48, 7, TraceChanges(limit=25))
    config = SyntheticWorkload.model_validate(
        {
            "num_requests": 40,
            "arrivals": {"kind": "gamma", "rate_per_s": 2, "cv": 1.5},
            "prompt_tokens": {"median": 512},
            "output_tokens": {"median": 128, "sigma": 0.5},
            "system_prompts": {"count": 4, "num_tokens": 512},
        }
    )
    assert opened.num_requests == 25
    assert list(opened.requests) == list(generate(config, 7))[:25]
    assert open_workload(path, 48, 7, TraceChanges(limit=100)).num_requests == 40


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (DESCRIPTION + "more: 1\n", "more"),
        (DESCRIPTION.replace("num_requests: 40", ""), "num_requests"),
        (DESCRIPTION.replace("cv: 1.5", "cv: -1"), "arrivals.gamma.cv"),
        ("[1, 2]", "description"),
        ("{", "trace"),
    ],
)
def test_a_description_that_is_none_is_refused_by_its_field(
    tmp_path: Path, content: str, field: str
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(content)
    with pytest.raises(InvalidInputError) as refused:
        open_workload(path, 16, 0, TraceChanges())
    assert refused.value.field in (f"{path}: {field}", field)


def test_changes_that_a_description_does_not_take_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(DESCRIPTION)
    for changes, field in (
        (TraceChanges(time_scale=0.5), "time_scale"),
        (TraceChanges(sample=0.5), "sample"),
        (TraceChanges(repeat=2), "repeat"),
        (TraceChanges(limit=0), "limit"),
    ):
        with pytest.raises(InvalidInputError) as refused:
            open_workload(path, 16, 0, changes)
        assert refused.value.field == field
    with pytest.raises(InvalidInputError, match="a readable file"):
        open_workload(tmp_path / "none.yaml", 16, 0, TraceChanges())
