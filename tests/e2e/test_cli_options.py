"""The command: how prompts are served, by flags for all of them and by fields of their lines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_run import FINGERPRINT, Run, refusal

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.model.fingerprint import oracle
from rayserve_paged.model.row_content import RowContent

SMALL = ["--block-size", "4", "--temperature", "0", "--json"]
ONE_BY_ONE = [*SMALL, "--max-num-seqs", "1"]


def ids(first: int, number: int = 17) -> list[int]:
    return list(range(first, first + number))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def write(path: Path, *rows: dict[str, Any]) -> list[str]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ["--prompts", str(path)]


# --- flags ----------------------------------------------------------------------------------


def test_windows_and_adapters_of_flags_are_those_of_the_answer(run: Run) -> None:
    flags = ["--window", "6", "--num-sink-tokens", "2", "--adapter", "a@b@1"]
    (row,) = run(*FINGERPRINT, *SMALL, "--prompt", "a window on the sea", *flags).rows
    prompt = list(b"a window on the sea")
    content = RowContent(Adapter("a@b", "1"))
    window = AttentionWindow(6, 2)
    assert row["token_ids"] == oracle(prompt, 16, window=window, content=content)
    assert row["token_ids"] != oracle(prompt, 16, content=content)


def test_a_deadline_ends_an_answer_and_says_so(run: Run) -> None:
    args = [*FINGERPRINT, "--num-blocks", "256", "--max-tokens", "4000", "--deadline-s", "0.2"]
    (row,) = run(*args, "--prompt", "x", "--temperature", "0", "--json").rows
    assert row["finish_reason"] == "deadline"
    assert row["token_ids"] == oracle(b"x", 4000)[: len(row["token_ids"])]
    ended = run(*args, "--prompt", "x")
    assert ended.status == 0
    assert ended.err == "rayserve-paged: ended by its deadline (--prompt 1)\n"


def test_what_is_to_be_kept_outlives_what_came_after_it(run: Run, prompts: Path) -> None:
    args = [*FINGERPRINT, *ONE_BY_ONE, "--num-blocks", "10", "--policy", "fcfs"]
    rows = [{"prompt_token_ids": ids(first), "max_tokens": 1} for first in (0, 20, 40, 60, 0)]
    kept = {**rows[0], "retention": [{"priority": 90}]}
    plain = run(*args, *write(prompts, *rows)).rows
    assert [row["num_cached_tokens"] for row in plain] == [0, 0, 0, 0, 0]
    with_flag = run(*args, *write(prompts, *rows), "--retention", "0:16=90,1000").rows
    assert [row["num_cached_tokens"] for row in with_flag][-1] < 16
    with_row = run(*args, *write(prompts, kept, *rows[1:])).rows
    assert [row["num_cached_tokens"] for row in with_row] == [0, 0, 0, 0, 16]


def test_text_that_is_pinned_is_cached_for_all_that_begin_with_it(run: Run) -> None:
    args = [*FINGERPRINT, *ONE_BY_ONE, "--num-blocks", "10", "--max-tokens", "2"]
    texts = ["system and one", "x" * 30, "y" * 30, "system and two"]
    prompts = [arg for text in texts for arg in ("--prompt", text)]
    pins = ["--pin", "system and ", "--max-pinned-share", "0.25", "--retention", "0:14=80"]
    rows = run(*args, *prompts, *pins).rows
    assert [row["num_cached_tokens"] for row in rows] == [8, 0, 0, 8]
    rows = run(*args, *prompts).rows
    assert [row["num_cached_tokens"] for row in rows] == [0, 0, 0, 0]
    # Whose they are counts as well.
    mine = ["--tenant-salt", "mine", "--window", "100"]
    rows = run(*args, *prompts, *pins, *mine).rows
    assert [row["num_cached_tokens"] for row in rows] == [8, 0, 0, 8]


# --- lines ----------------------------------------------------------------------------------


def test_each_line_is_served_by_its_own_fields_over_the_flags(run: Run, prompts: Path) -> None:
    prompt = ids(100)
    image = Attachment(bytes(range(16)), 12, 4)
    rows: list[dict[str, Any]] = [
        {},
        {"window": 9, "num_sink_tokens": 0},
        {"window": None, "num_sink_tokens": 0},
        {"adapter": {"adapter_id": "a", "version": "1"}},
        {"tenant_salt": "s"},
        {"attachments": [{"digest": image.digest.hex(), "offset": 12, "num_tokens": 4}]},
        {"request_id": "mine", "deadline_s": 1000, "priority": -3, "tenant": "t"},
    ]
    file = write(prompts, *({"prompt_token_ids": prompt, **row} for row in rows))
    flags = ["--window", "6", "--num-sink-tokens", "1", "--max-num-seqs", "1", "--policy", "fcfs"]
    answers = run(*FINGERPRINT, *SMALL, *flags, *file).rows
    window = AttentionWindow(6, 1)
    plain = oracle(prompt, 16, window=window)
    assert [answer["token_ids"] for answer in answers] == [
        plain,
        oracle(prompt, 16, window=AttentionWindow(9)),
        oracle(prompt, 16),
        oracle(prompt, 16, window=window, content=RowContent(Adapter("a", "1"))),
        plain,
        oracle(prompt, 16, window=window, content=RowContent(None, (image,))),
        plain,
    ]
    # The image shares what comes before it with the first line, the last line all.
    assert [answer["num_cached_tokens"] for answer in answers] == [0, 0, 0, 0, 0, 12, 16]
    assert answers[6]["request_id"] == "mine"


def order_of_starts(rows: list[dict[str, Any]]) -> list[int]:
    return sorted(range(len(rows)), key=lambda index: rows[index]["ttft_s"])


def test_priorities_and_tenants_decide_who_starts_first(run: Run, prompts: Path) -> None:
    args = [*FINGERPRINT, *ONE_BY_ONE, "--max-tokens", "40"]
    rows = [{"prompt": f"{n}", "priority": priority} for n, priority in enumerate((0, 3, 1, 2))]
    answers = run(*args, *write(prompts, *rows)).rows
    assert order_of_starts(answers) == [0, 2, 3, 1]
    rows = [{"prompt": f"{n}", "tenant": tenant} for n, tenant in enumerate("aaab")]
    fair = ["--policy", "weighted-fair", "--tenant-weights", '{"b": 2}']
    answers = run(*args, *fair, *write(prompts, *rows)).rows
    # The newcomer starts level with who waits, and is served before a third one of the same.
    assert order_of_starts(answers) == [0, 1, 3, 2]


def test_lines_that_are_pinned_come_first_and_tell_what_is_kept(run: Run, prompts: Path) -> None:
    args = [*FINGERPRINT, *ONE_BY_ONE, "--num-blocks", "12", "--max-tokens", "2"]
    system = {"prompt_token_ids": ids(0, 9), "pin": True}
    rows = [{"prompt_token_ids": ids(0, 12)}, {"prompt_token_ids": ids(50, 30)}, system]
    share = ["--max-pinned-share", "0.25"]
    answers = run(*args, *share, *write(prompts, *rows)).rows
    assert [answer["num_cached_tokens"] for answer in answers] == [8, 0, 0]
    assert [answer.get("num_pinned_tokens") for answer in answers] == [None, None, {"r0": 8}]
    said = refusal(run(*args, *write(prompts, *rows)))
    assert f"{prompts}:3: pin=True is not accepted" in said
    assert "--max-pinned-share" in said
    long = {"prompt_token_ids": ids(0, 20), "pin": True}
    ended = run(*args, *share, *write(prompts, rows[0], long))
    assert (ended.status, ended.out) == (2, "")
    assert "of the 3" in ended.err
    assert f"{prompts}:2" in ended.err


ADAPTER = {"adapter_id": "a", "version": "1"}
IMAGE = {"digest": "00" * 16, "offset": 0, "num_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"priority": "high"}, "priority='high' is not accepted: expected an integer from"),
        ({"priority": 1.5}, "priority=1.5 is not accepted: expected an integer from"),
        ({"tenant": ""}, "tenant='' is not accepted: expected a non-empty string"),
        ({"tenant_salt": 5}, "tenant_salt=5 is not accepted: expected a string"),
        ({"window": 0}, "window=0 is not accepted: expected an integer from 1"),
        ({"window": "8"}, "window='8' is not accepted: expected an integer from 1"),
        ({"num_sink_tokens": 2}, "num_sink_tokens=2 is not accepted: expected 0 where"),
        ({"window": 8, "num_sink_tokens": -1}, "num_sink_tokens=-1 is not accepted"),
        ({"deadline_s": 0}, "deadline_s=0 is not accepted: expected a number of seconds above 0"),
        ({"deadline_s": "5"}, "deadline_s='5' is not accepted: expected a number of seconds"),
        ({"request_id": ""}, "request_id='' is not accepted: expected a non-empty string"),
        ({"request_id": "first"}, "request_id='first' is not accepted: expected an id of its own"),
        ({"adapter": "a@1"}, "adapter='a@1' is not accepted: expected an object with the fields"),
        ({"adapter": {"adapter_id": "a"}}, "expected an object with the field version"),
        ({"adapter": {**ADAPTER, "verion": 2}}, "adapter.verion=2 is not accepted: expected a kn"),
        ({"adapter": {**ADAPTER, "version": 2}}, "adapter.version=2 is not accepted: expected a t"),
        ({"retention": {"priority": 90}}, "retention={'priority': 90} is not accepted: expected a"),
        (
            {"retention": [90]},
            "retention[0]=90 is not accepted: expected an object with the fields",
        ),
        ({"retention": [{"prio": 9}]}, "retention[0].prio=9 is not accepted: expected a known fi"),
        ({"retention": [{"priority": 101}]}, "retention[0].priority=101 is not accepted"),
        ({"retention": [{"start": 9}]}, "retention[0].start=9 is not accepted: expected an integ"),
        ({"retention": [{"end": "x"}]}, "retention[0].end='x' is not accepted"),
        ({"retention": [{"duration_s": -1}]}, "retention[0].duration_s=-1 is not accepted"),
        ({"retention": None}, "retention=None is not accepted: expected a list"),
        ({"attachments": [IMAGE]}, "expected none but with prompt_token_ids"),
        ({"pin": "yes"}, "pin='yes' is not accepted: expected true or false"),
        ({"windows": 8}, "windows=8 is not accepted: expected a known field: window"),
    ],
)
def test_a_bad_line_is_refused_with_its_place_its_field_and_what_would_do(
    run: Run, prompts: Path, fields: dict[str, Any], complaint: str
) -> None:
    rows = [{"prompt": "good", "request_id": "first"}, {"prompt": "three", **fields}]
    said = refusal(run(*FINGERPRINT, *write(prompts, *rows)))
    assert said.startswith(f"{prompts}:2: ")
    assert complaint in said


@pytest.mark.parametrize(
    ("attachments", "complaint"),
    [
        ("x", "attachments='x' is not accepted: expected a list"),
        ([{**IMAGE, "digest": "xyz"}], "attachments[0].digest='xyz' is not accepted: expected by"),
        ([{**IMAGE, "digest": 5}], "attachments[0].digest=5 is not accepted: expected bytes"),
        (
            [{**IMAGE, "digest": "00"}],
            "attachments[0].digest=b'\\x00' is not accepted: expected 16",
        ),
        ([{**IMAGE, "num_tokens": 9}], "attachments[0].num_tokens=9 is not accepted: expected at"),
        ([IMAGE, {**IMAGE, "offset": -1}], "attachments[1].offset=-1 is not accepted"),
        ([{"digest": "00" * 16}], "expected an object with the field offset"),
    ],
)
def test_a_bad_attachment_is_refused_with_its_place(
    run: Run, prompts: Path, attachments: object, complaint: str
) -> None:
    file = write(prompts, {"prompt_token_ids": [1, 2, 3], "attachments": attachments})
    said = refusal(run(*FINGERPRINT, *file))
    assert said.startswith(f"{prompts}:1: ")
    assert complaint in said


def test_neighbours_of_bad_lines_are_answered_where_these_are_skipped(
    run: Run, prompts: Path
) -> None:
    write(prompts, {"prompt": "one"}, {"prompt": "two", "window": 0}, {"prompt": "three"})
    bad = ['{"prompt": "four"', '{"prompt": "five", "max_tokens": 5000}', '{"prompt": ""}']
    prompts.write_text(prompts.read_text() + "\n".join(bad))
    args = [*FINGERPRINT, "--prompts", str(prompts), "--temperature", "0", "--skip-invalid"]
    ended = run(*args, "--json")
    assert ended.status == 0
    assert [row.get("token_ids") for row in ended.rows] == [
        oracle(b"one", 16),
        None,
        oracle(b"three", 16),
        None,
        None,
        None,
    ]
    errors = [row.get("error", "") for row in ended.rows]
    assert [error.split(" is not")[0] for error in errors[:2]] == ["", f"{prompts}:2: window=0"]
    assert [f"{prompts}:{number}" in errors[number - 1] for number in (4, 5, 6)] == [True] * 3
    assert ended.err.startswith(f"rayserve-paged: 4 of 6 prompts refused, the first: {prompts}:2")
    text = run(*args).out.splitlines()
    assert [line for line in text if line.startswith("---")][:2] == [
        f"--- {prompts}:1 (length)",
        f"--- {prompts}:2 (refused)",
    ]


# --- flags that are refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--priority", "3000000000"], "priority=3000000000 is not accepted"),
        (["--tenant", ""], "tenant='' is not accepted"),
        (["--window", "-1"], "window=-1 is not accepted: expected an integer from 1"),
        (["--num-sink-tokens", "3"], "num_sink_tokens=3 is not accepted: expected 0 where there"),
        (["--adapter", "a"], "--adapter='a' is not accepted: expected ID@VERSION"),
        (["--adapter", "@1"], "--adapter='@1' is not accepted: expected ID@VERSION"),
        (["--retention", "90"], "--retention='90' is not accepted: expected START:END=PRIORITY"),
        (["--retention", "0:4=90,1.2.3"], "--retention='0:4=90,1.2.3' is not accepted"),
        (["--retention", "0:4=101"], "retention[0].priority=101 is not accepted"),
        (["--retention", "0:9=90"], "--prompt 1: retention[0].end=9 is not accepted"),
        (["--retention", "0:4=9", "--retention", "3:=9"], "retention[1].start=3 is not accepted"),
        (["--deadline-s", "-1"], "deadline_s=-1.0 is not accepted"),
        (["--deadline-s", "nan"], "deadline_s=nan is not accepted"),
        (["--pin", "hello"], "--pin 1: pin=True is not accepted"),
        (["--pin", "", "--max-pinned-share", "0.5"], "--pin 1: prompt='' is not accepted"),
        (["--max-pinned-share", "0.95"], "cache.max_pinned_share=0.95 is not accepted"),
        (["--policy", "lifo"], "batch.policy='lifo' is not accepted: expected 'fcfs', 'priority'"),
        (["--tenant-weights", "gold=2"], "batch.tenant_weights='gold=2' is not accepted"),
        (["--tenant-weights", '{"gold": -2}'], "batch.tenant_weights.gold=-2 is not accepted"),
        (["--oldest-every", "0"], "batch.oldest_every=0 is not accepted"),
        (["--max-num-waiting", "-1"], "batch.max_num_waiting=-1 is not accepted"),
        (["--max-pending-tokens", "0"], "batch.max_pending_tokens=0 is not accepted"),
        (["--skip-invalid"], "--skip-invalid=True is not accepted: expected --prompts with it"),
    ],
)
def test_a_bad_flag_is_refused_in_one_line(run: Run, args: list[str], complaint: str) -> None:
    assert complaint in refusal(run(*FINGERPRINT, "--prompt", "hello", *args))


# --- with a real model, and as a process ----------------------------------------------------


@pytest.mark.slow
def test_a_real_model_is_served_by_the_same_fields_and_refuses_what_it_lacks(
    run: Run, prompts: Path
) -> None:
    text = "The ferry runs between the north pier and the south pier every thirty minutes"
    rows: list[dict[str, Any]] = [
        {},
        {"window": 500},
        {"window": 6, "num_sink_tokens": 2},
        {"tenant_salt": "s", "retention": [{"priority": 80}], "tenant": "t", "deadline_s": 600},
        {"adapter": ADAPTER},
    ]
    file = write(prompts, *({"prompt": text, **row} for row in rows))
    smollm2 = ["generate", "--model", "smollm2", "--shell", "inprocess", *SMALL, "--skip-invalid"]
    plain, wide, narrow, other, refused = run(*smollm2, *file, "--num-blocks", "400").rows
    assert plain["token_ids"] == wide["token_ids"] == other["token_ids"]
    assert narrow["token_ids"] != plain["token_ids"]
    assert "expected None, or one that is loaded (there is none)" in refused["error"]


def test_a_reader_that_has_enough_ends_the_command(prompts: Path) -> None:
    file = write(prompts, *({"prompt": f"{number}", "max_tokens": 1} for number in range(300)))
    command = [sys.executable, "-m", "rayserve_paged.cli", *FINGERPRINT, *file, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["finish_reason"] == "length"
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == ""
    process.stderr.close()
