"""Measured step times: the file, and what is interpolated between its points."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.sim.profiled_cost import ProfiledCost, read_profile

# A step takes 10 s and 1 s per token; attention 0.01 s per token and context token, for a chunk
# also per token and half the chunk.
TABLE: dict[str, Any] = {
    "format": "rayserve-paged/profile/1",
    "model": "toy",
    "device": "paper",
    "empty": {"num_tokens": [1, 4, 100], "seconds": [11.0, 14.0, 110.0]},
    "decode": {
        "num_sequences": [1, 4],
        "num_context_tokens": [0, 100, 1000],
        "seconds": [[11.0, 12.0, 21.0], [14.0, 18.0, 54.0]],
    },
    "prefill": {
        "num_tokens": [4, 100],
        "num_context_tokens": [0, 100],
        "seconds": [[14.08, 18.08], [160.0, 260.0]],
    },
}


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(TABLE | changes))
    return path


@pytest.fixture
def cost(tmp_path: Path) -> ProfiledCost:
    return ProfiledCost(read_profile(write(tmp_path / "p.json")))


def test_a_step_that_was_measured_takes_what_was_measured(cost: ProfiledCost) -> None:
    assert cost.profile.device == "paper"
    cases = [
        (ints(100), ints(1), 12.0),
        (ints(1000, 1000, 1000, 1000), ints(1, 1, 1, 1), 54.0),
        (ints(100), ints(100), 260.0),
        (ints(0), ints(4), 14.08),
    ]
    for num_computed, num_tokens, seconds in cases:
        assert cost.step_seconds(num_computed, num_tokens, 1, 1) == pytest.approx([seconds])


def test_steps_between_and_beyond_the_points_lie_on_their_lines(cost: ProfiledCost) -> None:
    # Two sequences with 300 in the cache on average: 10 + 2 + 2 x 0.01 x 300.
    assert cost.step_seconds(ints(200, 400), ints(1, 1), 2, 1) == pytest.approx([18.0])
    # Eight, of 2,000: beyond both axes.
    eight = np.full(8, 2000, np.int32)
    assert cost.step_seconds(eight, np.ones(8, np.int32), 8, 1) == pytest.approx([178.0])


def test_a_mixed_step_takes_the_empty_one_and_each_attention(cost: ProfiledCost) -> None:
    # 101 tokens: 111 s. Attention: 2 s to decode at 200, 50 + 100 s for the chunk.
    (seconds,) = cost.step_seconds(ints(200, 100), ints(1, 100), 2, 1)
    assert seconds == pytest.approx(111 + 2 + 150)


def test_the_steps_of_a_plan_take_exactly_what_single_steps_take(cost: ProfiledCost) -> None:
    computed = ints(17, 333, 90)
    ones = np.ones(3, np.int32)
    several = cost.step_seconds(computed, ones, 3, 40)
    single = [cost.step_seconds(computed + np.int32(i), ones, 3, 1)[0] for i in range(40)]
    assert several.tolist() == single
    after_a_chunk = cost.step_seconds(ints(10, 50), ints(20, 1), 2, 3)
    assert after_a_chunk[1:].tolist() == [
        cost.step_seconds(ints(30 + i, 51 + i), ints(1, 1), 2, 1)[0] for i in range(2)
    ]


def test_measurements_in_which_context_is_free_never_make_a_step_faster(tmp_path: Path) -> None:
    noisy = {
        "num_tokens": [4, 100],
        "num_context_tokens": [0, 100],
        "seconds": [[13, 12], [99, 98]],
    }
    cost = ProfiledCost(read_profile(write(tmp_path / "p.json", prefill=noisy)))
    assert cost.step_seconds(ints(50), ints(52), 1, 1) == pytest.approx([62.0])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": "other/1"}, "format"),
        ({"empty": {"num_tokens": [1, 4], "seconds": [1.0]}}, "empty"),
        ({"empty": {"num_tokens": [4, 4], "seconds": [1.0, 2.0]}}, "empty"),
        ({"empty": {"num_tokens": [1], "seconds": [1.0]}}, "empty.num_tokens"),
        ({"empty": {"num_tokens": [1, 2], "seconds": [1.0, -1.0]}}, "empty.seconds.1"),
        ({"decode": TABLE["decode"] | {"seconds": [[1.0, 2.0, 3.0]]}}, "decode"),
        ({"more": 1}, "more"),
    ],
)
def test_a_table_that_is_none_is_refused_by_its_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    path = write(tmp_path / "p.json", **changes)
    with pytest.raises(InvalidInputError) as refused:
        read_profile(path)
    assert refused.value.field == f"{path}: {field}"


def test_a_file_that_is_no_json_or_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a readable file"):
        read_profile(tmp_path / "none.json")
    path = tmp_path / "p.json"
    path.write_text("{")
    with pytest.raises(InvalidInputError, match="a JSON object"):
        read_profile(path)
