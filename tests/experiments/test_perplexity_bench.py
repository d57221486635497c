"""The perplexity of a text under caches of several dtypes, on small random models."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from command_run import Run, refusal, run
from random_model import make_llama, make_model

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.experiments.perplexity_bench import (
    perplexities,
    reference_manual,
    windows_of,
)

__all__ = ["make_llama", "make_model", "run"]


@pytest.fixture(scope="module")
def directory(make_llama: Callable[..., Path]) -> str:
    return str(make_llama(head_dim=16))


def test_windows_cut_the_first_tokens_without_a_gap(directory: str) -> None:
    text = reference_manual()
    windows = windows_of(text, directory, num_tokens=101, window=40)
    assert [len(window) for window in windows] == [40, 40, 21]
    (whole,) = windows_of(text, directory, num_tokens=101, window=101)
    assert [token_id for window in windows for token_id in window] == whole
    # A window of one token would have none to score.
    assert len(windows_of(text, directory, num_tokens=81, window=40)) == 2


def test_perplexity_is_that_of_the_prompts_log_probabilities(directory: str) -> None:
    windows = windows_of(reference_manual(), directory, num_tokens=150, window=60)
    exact, coded = perplexities(windows, directory, ("fp32", "int8"), "fp32")
    assert exact.num_scored == coded.num_scored == 59 + 59 + 29
    with LLM(directory, shell="inprocess", num_blocks=32, max_num_batched_tokens=16) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([list(window) for window in windows], params)
    scores = [s.logprob for o in outputs for s in o.prompt_logprobs or () if s is not None]
    assert exact.value == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-5)
    assert exact.ratio == 1.0
    assert coded.ratio == coded.value / exact.value != 1.0
    assert coded.ratio == pytest.approx(1.0, rel=0.05)


def test_the_command_prints_each_dtype_beside_fp32(
    run: Run, directory: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox " * 5)
    flags = ["--model", directory, "--text", str(text), "--num-tokens", "64", "--window", "32"]
    ended = run("bench", "perplexity", *flags, "--kv-dtype", "fp8,bf16", "--json")
    assert ended.status == 0, ended.err
    figures = json.loads(ended.out)
    assert [one["kv_dtype"] for one in figures["kv"]] == ["fp32", "bf16", "fp8"]
    assert all(one["num_scored"] == 62 for one in figures["kv"])
    plain = run("bench", "perplexity", *flags, "--kv-dtype", "fp8,bf16")
    assert [line.split()[0] for line in plain.out.splitlines()[1:]] == ["fp32", "bf16", "fp8"]


def test_what_cannot_be_measured_is_refused(run: Run, directory: str, tmp_path: Path) -> None:
    command = ("bench", "perplexity", "--model", directory)
    assert "--kv-dtype='int4'" in refusal(run(*command, "--kv-dtype", "int8,int4"))
    assert "--dtype='int8'" in refusal(run(*command, "--dtype", "int8"))
    assert "--text" in refusal(run(*command, "--text", str(tmp_path / "none")))
    fingerprint = ("bench", "perplexity", "--model", "fingerprint", "--num-tokens", "9")
    assert "whose cache holds integers" in refusal(run(*fingerprint))
    with pytest.raises(InvalidInputError, match="at most the 3 tokens of the text"):
        windows_of("abc", directory, num_tokens=4, window=2)
    with pytest.raises(InvalidInputError, match="window=1"):
        windows_of("abc", directory, num_tokens=3, window=1)


@pytest.mark.prove
@pytest.mark.timeout(0)
def test_every_dtype_of_the_cache_is_within_a_hundredth_of_fp32_on_20_000_tokens() -> None:
    windows = windows_of(reference_manual(), "smollm2", num_tokens=20_000, window=2048)
    for result in perplexities(windows, "smollm2", ("fp32", "bf16", "fp16", "int8", "fp8"), "fp32"):
        print(result)
        assert result.ratio == pytest.approx(1.0, abs=0.01)
