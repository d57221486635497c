"""The worked example prints the figures of its tables."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "paged_attention_reference.py"


def test_the_worked_example_prints_the_figures_of_its_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "block_table_a=[5, 1, 6]",
        "block_table_b=[5, 3, -1]",
        "unique_blocks=4",
        "allocated_slots=16",
        "unique_live_tokens=13",
        "internal_fragmentation_slots=3",
        "prefix_sharing_saved_slots=4",
        "max_attention_abs_diff_block_major=0",
        "max_attention_abs_diff_hnd=0",
        "max_attention_abs_diff_vectorised=0",
        "max_attention_abs_diff=0",
    ]


@pytest.mark.parametrize("order", ["block_major", "hnd", "vectorised"])
def test_every_layout_of_the_worked_example_gets_the_same_tables(order: str) -> None:
    example = runpy.run_path(str(EXAMPLE))
    tables, accounting, difference = example["run_layout"](order)
    assert [table.block_ids for table in tables] == [[5, 1, 6], [5, 3]]
    assert accounting.block_map == ".#.#.=#"
    assert difference == 0.0
