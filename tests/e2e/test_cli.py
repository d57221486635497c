"""The command: results on stdout alone, one line and status 2 for whatever cannot be had."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_run import FINGERPRINT, Ended, Run, refusal

import rayserve_paged
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.model.fingerprint import oracle

KEYS = [
    "request_id",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "num_cached_tokens",
    "replica",
    "ttft_s",
    "tpot_s",
]
SAMPLE_KEYS = ["sibling", "token_ids", "text", "finish_reason", "tpot_s"]


def greedy(prompt: str, num_tokens: int) -> list[int]:
    return oracle(prompt.encode(), num_tokens)


# --- results --------------------------------------------------------------------------------


def test_json_lines_have_the_documented_keys_in_the_order_of_the_prompts(run: Run) -> None:
    args = ["--prompt", "one", "--prompt", "two", "--temperature", "0", "--json"]
    ended = run(*FINGERPRINT, *args)
    assert (ended.status, ended.err) == (0, "")
    assert [list(row) for row in ended.rows] == [KEYS, KEYS]
    assert [row["token_ids"] for row in ended.rows] == [greedy("one", 16), greedy("two", 16)]
    assert [row["prompt_token_ids"] for row in ended.rows] == [list(b"one"), list(b"two")]
    assert {row["finish_reason"] for row in ended.rows} == {"length"}


def test_one_prompt_is_answered_with_its_text_alone(run: Run) -> None:
    args = ["--prompt", "ship", "--temperature", "0", "--max-tokens", "5"]
    by_text = run(*FINGERPRINT, *args)
    (row,) = run(*FINGERPRINT, *args, "--json").rows
    assert by_text == Ended(0, row["text"] + "\n", "")


def test_several_answers_in_text_name_their_prompts(run: Run) -> None:
    ended = run(*FINGERPRINT, "--prompt", "a", "--prompt", "b", "--temperature", "0")
    assert [line for line in ended.out.splitlines() if line.startswith("---")] == [
        "--- --prompt 1 (length)",
        "--- --prompt 2 (length)",
    ]


def test_sampling_flags_reach_the_request(run: Run) -> None:
    args = ["--prompt", "x", "--json", "--seed", "3", "--top-k", "50", "--logprobs", "1"]
    args += ["--top-p", "0.9", "--temperature", "0.7", "--min-tokens", "2", "--max-tokens", "9"]
    first, second = (run(*FINGERPRINT, *args).rows[0] for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert len(first["logprobs"]) == 9
    assert {len(position["top"]) for position in first["logprobs"]} == {1}


def test_log_probabilities_of_a_prompt_are_listed_one_for_each_token(run: Run) -> None:
    args = ["--prompt", "a prompt", "--json", "--temperature", "0", "--prompt-logprobs", "2"]
    (row,) = run(*FINGERPRINT, *args).rows
    first, *others = row["prompt_logprobs"]
    assert first is None
    assert len(others) == len(row["prompt_token_ids"]) - 1
    assert [len(position["top"]) for position in others] == [2] * len(others)
    assert all(position["logprob"] <= position["top"][0][1] for position in others)


def test_the_best_beams_are_listed_best_first(run: Run) -> None:
    args = ["--prompt", "x", "--json", "--beam-width", "3", "--n", "2", "--max-tokens", "5"]
    args += ["--length-penalty", "0", "--early-stopping", "true"]
    (row,) = run(*FINGERPRINT, *args).rows
    assert list(row) == [*KEYS, "cumulative_logprob", "samples"]
    sums = [sample["cumulative_logprob"] for sample in row["samples"]]
    assert sums == sorted(sums, reverse=True)
    assert [len(sample["token_ids"]) for sample in row["samples"]] == [5, 5]


def test_several_samples_of_a_prompt_are_listed(run: Run) -> None:
    args = ["--prompt", "x", "--json", "--seed", "3", "--n", "3"]
    (row,) = run(*FINGERPRINT, *args).rows
    assert list(row) == [*KEYS, "samples"]
    assert [list(sample) for sample in row["samples"]] == [SAMPLE_KEYS] * 3
    assert [sample["sibling"] for sample in row["samples"]] == [0, 1, 2]
    assert len({tuple(sample["token_ids"]) for sample in row["samples"]}) == 3
    for name in SAMPLE_KEYS[1:]:
        assert row["samples"][0][name] == row[name]


def test_the_best_of_several_samples_are_listed_best_first(run: Run) -> None:
    args = ["--prompt", "x", "--json", "--seed", "3"]
    (five,) = run(*FINGERPRINT, *args, "--n", "5", "--logprobs", "0").rows
    (row,) = run(*FINGERPRINT, *args, "--n", "2", "--best-of", "5").rows
    ranked = sorted(five["samples"], key=lambda sample: -sample["cumulative_logprob"])[:2]
    assert list(row) == [*KEYS, "cumulative_logprob", "samples"]
    for sample, expected in zip(row["samples"], ranked, strict=True):
        assert list(sample) == [*SAMPLE_KEYS, "cumulative_logprob"]
        assert sample["sibling"] == expected["sibling"]
        assert sample["token_ids"] == expected["token_ids"]
        assert sample["cumulative_logprob"] == pytest.approx(expected["cumulative_logprob"])
    (only,) = run(*FINGERPRINT, *args, "--best-of", "5").rows
    assert only["token_ids"] == ranked[0]["token_ids"]
    assert "samples" not in only


def test_several_samples_in_text_are_numbered(run: Run) -> None:
    args = ["--prompt", "x", "--seed", "3", "--allowed-token-ids", "65,66"]
    ended = run(*FINGERPRINT, *args, "--n", "2")
    lines = ended.out.splitlines()
    assert lines[::2] == [f"--- --prompt 1, sample {number} of 2 (length)" for number in (1, 2)]
    assert lines[1] != lines[3]
    # One of them is printed as if it were the only one.
    assert run(*FINGERPRINT, *args, "--best-of", "2").out.splitlines() in ([lines[1]], [lines[3]])


def test_flags_that_edit_the_logits_reach_the_request(run: Run) -> None:
    args = ["--prompt", "x", "--json", "--temperature", "0"]

    def token_ids(*flags: str) -> list[int]:
        ended = run(*FINGERPRINT, *args, *flags)
        assert ended.status == 0, ended
        ids: list[int] = ended.rows[0]["token_ids"]
        return ids

    assert token_ids("--logit-bias", "7=100") == [7] * 16
    assert token_ids("--logit-bias", '{"7": 50, "8": -1}', "--logit-bias", "9=100") == [9] * 16
    assert token_ids("--allowed-token-ids", "12") == [12] * 16
    whole = greedy("x", 16)
    assert token_ids("--stop-token-ids", f"1,{whole[3]}") == whole[:4]
    assert token_ids("--temperature", "50", "--min-p", "1") == greedy("x", 16)
    few = ["--allowed-token-ids", "5, 6,7,8"]
    plain = token_ids(*few)
    assert set(plain) <= {5, 6, 7, 8}
    assert token_ids(*few, "--frequency-penalty", "2") != plain
    assert token_ids(*few, "--presence-penalty", "2") != plain
    assert token_ids(*few, "--repetition-penalty", "100") != plain


def test_steps_may_overlap_or_be_planned_several_at_once(run: Run) -> None:
    args = ["--prompt", "a", "--prompt", "b", "--temperature", "0", "--json"]
    for flags in (["--pipeline-depth", "2"], ["--max-decode-steps", "8"]):
        ended = run(*FINGERPRINT, *args, *flags)
        assert [row["token_ids"] for row in ended.rows] == [greedy("a", 16), greedy("b", 16)]


def test_a_stop_string_ends_the_text(run: Run) -> None:
    args = ["--prompt", "x", "--temperature", "0", "--json"]
    (whole,) = run(*FINGERPRINT, *args).rows
    stop = whole["text"][6:9]
    (row,) = run(*FINGERPRINT, *args, "--stop", stop).rows
    assert row["text"] == whole["text"][: whole["text"].index(stop)]
    assert row["finish_reason"] == "stop"


def test_timings_are_name_value_lines_on_stderr(run: Run) -> None:
    ended = run(*FINGERPRINT, "--prompt", "x", "--json", "--timings")
    assert len(ended.rows) == 1
    values = {name: float(v) for name, v in (line.split("=") for line in ended.err.splitlines())}
    stages = ["imported_s", "ready_s", "submitted_s", "first_token_s", "answered_s"]
    assert [name for name in values if name in stages] == stages
    assert sorted(values[stage] for stage in stages) == [values[stage] for stage in stages]
    assert values["process_rss_mb"] > 0


def test_replicas_and_ranks_give_the_same_tokens(run: Run) -> None:
    args = ["--prompt", "a", "--prompt", "b", "--temperature", "0", "--json"]
    ended = run(*FINGERPRINT, *args, "--tp", "2", "--replicas", "2", "--block-size", "8")
    assert [row["token_ids"] for row in ended.rows] == [greedy("a", 16), greedy("b", 16)]
    assert len({row["replica"] for row in ended.rows}) == 2


# --- files of prompts -----------------------------------------------------------------------


def test_lines_of_a_file_bring_their_own_parameters(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "text", "max_tokens": 3}\n\n{"prompt_token_ids": [1, 2], "temperature": 0}\r\n',
        encoding="utf-8-sig",
    )
    ended = run(*FINGERPRINT, "--prompts", str(path), "--max-tokens", "5", "--json")
    first, second = ended.rows
    assert len(first["token_ids"]) == 3
    assert second["token_ids"] == oracle([1, 2], 5)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "x", "temperature": NaN}', "temperature=nan is not accepted"),
        ('{"prompt": "x", "max_tokens": "5"}', "max_tokens='5' is not accepted"),
        ('{"prompt": "x", "temprature": 1}', "a known field: temperature"),
        ('{"prompt": "x", "n": 0}', "n=0 is not accepted"),
        ('{"prompt": "x", "n": 65}', "n=65 is not accepted: expected at most 64"),
        ('{"prompt": "x", "best_of": 65}', "best_of=65 is not accepted: expected at most 64"),
        ('{"prompt": "x", "n": 3, "best_of": 2}', "best_of=2 is not accepted: expected an integer"),
        ('{"prompt": "x", "logit_bias": {"1_0": 1}}', "logit_bias='1_0' is not accepted"),
        ('{"prompt": "x", "logit_bias": {"1": 1, "01": 2}}', "expected one bias for each token id"),
        ('{"prompt": "x", "logit_bias": 5}', "logit_bias=5 is not accepted"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "exactly one of prompt, messages"),
        ('{"max_tokens": 5}', "exactly one of prompt, messages"),
        ('{"prompt": 5}', "prompt=5 is not accepted"),
        ('{"prompt": "x"', "a JSON object on a line of its own (Expecting"),
        ("[" * 100_000, "a JSON object on a line of its own (maximum recursion depth"),
        ('{"prompt": "x", "n": 2, "n": 3}', "n=3 is not accepted: expected one value, and 2 is"),
        ("[1, 2]", "a JSON object"),
        ('{"prompt_token_ids": "12"}', "expected a list"),
        ('{"prompt_token_ids": [5, 1000]}', "prompt_token_ids=1000 is not accepted"),
        ('{"prompt": ""}', "at least one token"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no chat template"),
        ('{"prompt": "x", "max_tokens": 2000}', "needs 125 blocks of 16 slots"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(
    run: Run, tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    said = refusal(run(*FINGERPRINT, "--prompts", str(path), "--json"))
    assert f"{path}:2" in said
    assert complaint in said


def test_every_sampling_parameter_may_be_set_by_a_line(run: Run, tmp_path: Path) -> None:
    params = SamplingParams(
        n=2,
        best_of=3,
        stop=["x"],
        stop_token_ids=[3],
        seed=1,
        logprobs=0,
        logit_bias={5: 1.5},
        allowed_token_ids=[5, 6],
    )
    fields = dataclasses.asdict(params)
    # Set by `response_format`, which has tests of its own.
    del fields["grammar"]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x", **fields}))
    assert run(*FINGERPRINT, "--prompts", str(path), "--json").status == 0


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--model", "no-such-model"], "model='no-such-model' is not accepted: expected"),
        (["--tp", "5"], "tensor_parallel_size=5 is not accepted"),
        (["--num-blocks", "0"], "cache.num_blocks=0 is not accepted"),
        (["--block-size", "0"], "cache.block_size=0 is not accepted"),
        (["--replicas", "0"], "parallel.num_replicas=0 is not accepted"),
        (["--dtype", "fp4"], "model.dtype='fp4' is not accepted"),
        (["--kv-dtype", "int4"], "model.kv_dtype='int4' is not accepted: expected 'fp32', 'bf16'"),
        (["--kv-dtype", "int8"], "model.kv_dtype='int8' is not accepted: expected nothing for the"),
        (["--cache-memory", "4096TiB"], "values that fit together: give num_blocks or memory"),
        (["--num-blocks", "9000000000000"], "at most"),
        (["--max-model-len", "4"], "prompt='5 tokens' is not accepted: expected at most 3 tokens"),
        (["--max-tokens", "0"], "max_tokens=0 is not accepted"),
        (["--temperature", "nan"], "temperature=nan is not accepted"),
        (["--top-p", "0"], "top_p=0.0 is not accepted"),
        (["--max-tokens", "2000"], "needs 126 blocks of 16 slots, and the pool has 64"),
        (["--n", "0"], "n=0 is not accepted"),
        (["--n", "9", "--max-num-seqs", "8"], "n=9 is not accepted: expected at most 8"),
        (["--beam-width", "2", "--n", "3"], "n=3 is not accepted: expected at most beam_width=2"),
        (["--beam-width", "2", "--early-stopping", "x"], "early_stopping='x' is not accepted"),
        (["--n", "2", "--best-of", "1"], "best_of=1 is not accepted: expected an integer from n=2"),
        (["--min-p", "nan"], "min_p=nan is not accepted"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0 is not accepted"),
        (["--presence-penalty", "2.1"], "presence_penalty=2.1 is not accepted"),
        (["--frequency-penalty", "inf"], "frequency_penalty=inf is not accepted"),
        (["--logit-bias", "7"], "--logit-bias='7' is not accepted: expected ID=BIAS or"),
        (
            ["--logit-bias", "7=1", "--logit-bias", '{"7": 2}'],
            "expected one bias for each token id",
        ),
        (["--logit-bias", '{"7": 2'], "--logit-bias='{\"7\": 2' is not accepted"),
        (["--logit-bias", "7=nan"], "logit_bias=nan is not accepted"),
        (["--logit-bias", "1000=1"], "logit_bias=1000 is not accepted"),
        (["--allowed-token-ids", ""], "--allowed-token-ids='' is not accepted"),
        (["--stop-token-ids", "1;2"], "--stop-token-ids='1;2' is not accepted"),
        (["--allowed-token-ids", "1,x"], "--allowed-token-ids='1,x' is not accepted"),
        (["--pipeline-depth", "3"], "batch.pipeline_depth=3 is not accepted"),
        (["--max-decode-steps", "0"], "batch.max_decode_steps=0 is not accepted"),
        (["--shell", "slurm"], "shell='slurm' is not accepted"),
        (["--prompts", "x.jsonl"], "either --prompt or --prompts"),
        (["--config", "no-such.yaml"], "config='no-such.yaml' is not accepted"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    run: Run, args: list[str], complaint: str
) -> None:
    assert complaint in refusal(run(*FINGERPRINT, "--prompt", "hello", *args))


def test_a_cache_larger_than_the_memory_is_refused(run: Run) -> None:
    args = ["generate", "--model", "fingerprint", "--shell", "inprocess", "--prompt", "x"]
    said = refusal(run(*args, "--cache-memory", "4096TiB"))
    assert "cache.memory=" in said
    assert "available to each rank" in said


def test_a_directory_without_a_model_is_refused(run: Run, tmp_path: Path) -> None:
    said = refusal(run("generate", "--model", str(tmp_path), "--prompt", "x"))
    assert "config.json" in said


def test_a_missing_file_of_prompts_is_refused(run: Run) -> None:
    said = refusal(run(*FINGERPRINT, "--prompts", "no-such.jsonl"))
    assert said.startswith("--prompts='no-such.jsonl' is not accepted")


def test_an_empty_file_of_prompts_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    assert "at least one prompt" in refusal(run(*FINGERPRINT, "--prompts", str(path)))


def test_a_model_must_be_named(run: Run) -> None:
    assert "--model=None" in refusal(run("generate", "--prompt", "x"))


def test_a_model_may_be_named_by_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSERVE_MODEL__MODEL", "fingerprint")
    command = ("generate", "--shell", "inprocess", "--num-blocks", "8", "--json")
    (row,) = run(*command, "--prompt", "x", "--temperature", "0").rows
    assert row["token_ids"] == greedy("x", 16)


def test_the_version_is_told(run: Run) -> None:
    assert run("--version") == Ended(0, f"rayserve-paged {rayserve_paged.__version__}\n", "")


def test_early_stopping_is_read_as_people_write_it(run: Run) -> None:
    args = ["--prompt", "x", "--json", "--beam-width", "3", "--max-tokens", "5"]
    said = [run(*FINGERPRINT, *args, "--early-stopping", word) for word in ("True", "NEVER")]
    assert [ended.status for ended in said] == [0, 0]


def test_a_misspelt_option_is_a_usage_error(run: Run) -> None:
    ended = run(*FINGERPRINT, "--promt", "x")
    assert ended.status == 2
    assert ended.out == ""
    assert "--prompt" in ended.err


# --- as a process ---------------------------------------------------------------------------


def test_the_command_answers_as_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "rayserve_paged.cli", *FINGERPRINT, "--json"]
    ended = subprocess.run(
        [*command, "--prompt", "x", "--temperature", "0"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["token_ids"] == greedy("x", 16)


def test_a_refusal_as_a_process_has_no_traceback() -> None:
    command = [sys.executable, "-m", "rayserve_paged", "generate", "--model", "no-such-model"]
    ended = subprocess.run([*command, "--prompt", "x"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("rayserve-paged: model='no-such-model' is not accepted")


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from rayserve_paged.cli import app\n"
        "app(['generate', '--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'ray', 'tokenizers', 'torch', 'transformers', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr == "[]\n"


@pytest.mark.ray
def test_the_command_on_ray_prints_results_alone_on_stdout() -> None:
    command = [sys.executable, "-m", "rayserve_paged.cli", "generate", "--model", "fingerprint"]
    command += ["--prompt", "x", "--temperature", "0", "--num-blocks", "64", "--json", "--timings"]
    command += ["--tp", "2", "--n", "2"]
    ended = subprocess.run(command, capture_output=True, text=True)
    (row,) = map(json.loads, ended.stdout.splitlines())
    assert ended.returncode == 0
    assert [sample["token_ids"] for sample in row["samples"]] == [greedy("x", 16)] * 2
    values = {name: float(v) for name, v in (line.split("=") for line in ended.stderr.splitlines())}
    assert {"first_token_s", "deployment.ray_init_s", "r0.rank1.rss_mb"} <= set(values)
    assert values["r0.rank0.rss_mb"] > 0


@pytest.mark.ray
def test_what_a_rank_on_ray_refuses_is_said_in_one_line() -> None:
    command = [sys.executable, "-m", "rayserve_paged.cli", "generate", "--model", "fingerprint"]
    command += ["--prompt", "x", "--cache-memory", "4096TiB"]
    ended = subprocess.run(command, capture_output=True, text=True)
    said = refusal(Ended(ended.returncode, ended.stdout, ended.stderr))
    assert "cache.memory=" in said
    assert "available to each rank" in said
