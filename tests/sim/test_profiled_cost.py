"""Measured step times: the file, and what is interpolated between its points."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.step_messages import IntArray
from rayserve_paged.sim.profile import read_profile, write_profile
from rayserve_paged.sim.profiled_cost import ProfiledCost

# A step takes 10 s and 1 s per token; attention 0.01 s per token and context token, for a chunk
# also per token and half the chunk.
TABLE: dict[str, Any] = {
    "num_active": 1,
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
PROFILE: dict[str, Any] = {
    "format": "rayserve-paged/profile/2",
    "model": "toy",
    "dtype": "fp32",
    "device": "paper",
    "tables": [TABLE],
}


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def write(path: Path, table: dict[str, Any] | None = None, **changes: object) -> Path:
    path.write_text(json.dumps(PROFILE | {"tables": [TABLE | (table or {})]} | changes))
    return path


def slower(factor: float, num_active: int) -> dict[str, Any]:
    """The table with every step so many times as long."""

    def scaled(seconds: list[Any]) -> list[Any]:
        return [scaled(one) if isinstance(one, list) else one * factor for one in seconds]

    parts = {
        name: TABLE[name] | {"seconds": scaled(TABLE[name]["seconds"])}
        for name in ("empty", "decode", "prefill")
    }
    return {"num_active": num_active} | parts


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
    cost = ProfiledCost(read_profile(write(tmp_path / "p.json", {"prefill": noisy})))
    assert cost.step_seconds(ints(50), ints(52), 1, 1) == pytest.approx([62.0])


def test_no_step_takes_less_with_more_context_however_noisy_the_table(tmp_path: Path) -> None:
    decode = {
        "num_sequences": [1, 4, 16],
        "num_context_tokens": [0, 100, 200, 1000],
        "seconds": [[11.0, 14.0, 12.0, 13.0], [15.0, 13.0, 19.0, 18.0], [30.0, 40.0, 35.0, 41.0]],
    }
    cost = ProfiledCost(read_profile(write(tmp_path / "p.json", {"decode": decode})))
    for num_sequences in (1, 2, 4, 9, 16, 40):
        ones = np.ones(num_sequences, np.int32)
        seconds = [
            cost.step_seconds(np.full(num_sequences, context, np.int32), ones, num_sequences, 1)[0]
            for context in range(0, 2000, 50)
        ]
        assert (np.diff(seconds) >= 0).all()
        assert seconds[0] > 0


def test_steps_take_longer_the_more_replicas_of_the_machine_run_some(tmp_path: Path) -> None:
    tables = [TABLE, slower(1.5, 2), slower(2.5, 4)]
    cost = ProfiledCost(read_profile(write(tmp_path / "p.json", tables=tables)))
    assert cost.max_active == 4
    for num_active, factor in [(1, 1.0), (2, 1.5), (3, 2.0), (4, 2.5), (9, 2.5)]:
        seconds = cost.step_seconds(ints(50, 70), ints(1, 1), 2, 3, num_active)
        assert seconds == pytest.approx(factor * cost.step_seconds(ints(50, 70), ints(1, 1), 2, 3))


def test_what_the_core_and_a_live_deployment_add_is_added_to_every_step(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.json",
        control={"num_sequences": [1, 5], "seconds": [0.1, 0.5]},
        served={"scale": 1.5, "extra_s": 0.25},
    )
    seconds = ProfiledCost(read_profile(path)).step_seconds(ints(50, 50), ints(1, 1), 2, 4)
    plain = ProfiledCost(read_profile(write(path))).step_seconds(ints(50, 50), ints(1, 1), 2, 4)
    assert seconds == pytest.approx(1.5 * plain + 0.25 + 0.2)


def test_a_profile_that_was_written_is_read_again(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path / "p.json", start_s=3.5, tables=[TABLE, slower(2.0, 2)]))
    write_profile(profile, tmp_path / "again.json")
    assert read_profile(tmp_path / "again.json") == profile
    with pytest.raises(InvalidInputError, match="--out"):
        write_profile(profile, tmp_path / "nowhere" / "p.json")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": "other/1"}, "format"),
        (
            {"tables": [TABLE | {"empty": {"num_tokens": [1, 4], "seconds": [1.0]}}]},
            "tables.0.empty",
        ),
        (
            {"tables": [TABLE | {"empty": {"num_tokens": [4, 4], "seconds": [1.0, 2.0]}}]},
            "tables.0.empty",
        ),
        (
            {"tables": [TABLE | {"empty": {"num_tokens": [1], "seconds": [1.0]}}]},
            "tables.0.empty.num_tokens",
        ),
        (
            {"tables": [TABLE | {"empty": {"num_tokens": [1, 2], "seconds": [1.0, -1.0]}}]},
            "tables.0.empty.seconds.1",
        ),
        (
            {"tables": [TABLE | {"decode": TABLE["decode"] | {"seconds": [[1.0, 2.0, 3.0]]}}]},
            "tables.0.decode",
        ),
        ({"tables": []}, "tables"),
        ({"tables": [TABLE, TABLE]}, ""),
        ({"tables": [TABLE | {"num_active": 2}]}, ""),
        ({"control": {"num_sequences": [1, 2], "seconds": [1.0]}}, "control"),
        ({"served": {"scale": 0.0, "extra_s": 0.0}}, "served.scale"),
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
