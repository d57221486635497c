"""The demonstration at 80 columns and without colours."""

import asyncio
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.demo import demo_waves, run_demo
from rayserve_paged.prompts import Prompt

# Long enough that no other replica computes it sooner than one that has it.
SHARED = "a beginning that fills many blocks of sixteen\n" * 8
WAVES: list[list[Prompt]] = [[SHARED + "one?"], [SHARED + "two?", SHARED + "what?", "else?"]]


def lines_of_demo(waves: list[list[Prompt]]) -> list[str]:
    screen = io.StringIO()
    params = SamplingParams(max_tokens=60, temperature=0.0)
    with LLM("fingerprint", shell="inprocess", num_replicas=2, num_blocks=64) as llm:
        asyncio.run(run_demo(llm, waves, params, Console(file=screen, width=80)))
    return screen.getvalue().splitlines()


def test_the_demonstration_shows_answers_figures_and_blocks() -> None:
    lines = lines_of_demo(WAVES)
    text = "\n".join(lines)
    assert max(map(cell_len, lines)) <= 80
    assert "\x1b" not in text
    for prompt in ("one?", "two?", "what?", "else?"):
        assert f"> {prompt}" in text
    for name in (
        "unique_live_tokens",
        "allocated_slots",
        "internal_fragmentation_slots",
        "prefix_sharing_saved_slots",
        "num_cached_blocks",
        "num_pinned_blocks",
    ):
        # While the second wave ran, and when it had ended.
        assert text.count(f"  {name}=") == 2
        assert (f"  {name}=0" in text) == (name != "num_cached_blocks")
    pictures = [line.strip() for line in lines if line.strip() and set(line.strip()) <= set(".#=o")]
    assert [len(picture) for picture in pictures] == [64] * 4
    assert set("".join(pictures[2:])) <= {".", "o"}
    assert "= shared" in text


def test_the_table_tells_what_came_from_the_cache() -> None:
    lines = lines_of_demo(WAVES)
    heading = next(index for index, line in enumerate(lines) if line.startswith("prompt "))
    rows = [line.split() for line in lines[heading + 1 : heading + 5]]
    # The last columns: tokens, tokens of the prompt, cached, replica, TTFT, tokens a second.
    assert [row[-6] for row in rows] == ["60"] * 4
    # 368 shared characters: 23 whole blocks.
    assert len(SHARED) == 368
    assert [row[-4] for row in rows] == ["0", "368", "368", "0"]
    assert rows[0][-3] == rows[1][-3] == rows[2][-3] != rows[3][-3]


def test_a_refused_prompt_ends_the_demonstration_with_its_own_error() -> None:
    with pytest.raises(InvalidInputError, match="no chat template"):
        lines_of_demo(demo_waves())
