"""Traces: what a row means, and that whatever makes no sense is refused by line and column."""

from pathlib import Path

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.sim.analysis import count_lru_hits
from rayserve_paged.sim.workload import MAX_TOKENS, TraceRequest, read_workload

DATA = Path(__file__).parent / "data"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44"
BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT_ROW = "45,ChatGPT,1087,230,1317,Conversation log"


def mooncake_row(
    timestamp: object = 0,
    input_length: object = 600,
    output_length: object = 5,
    hash_ids: object = "[0, 1]",
) -> str:
    return (
        f'{{"timestamp": {timestamp}, "input_length": {input_length}, '
        f'"output_length": {output_length}, "hash_ids": {hash_ids}}}'
    )


def write(directory: Path, name: str, *rows: str, end: str = "\n", mark: str = "") -> Path:
    path = directory / name
    path.write_bytes((mark + "".join(row + end for row in rows)).encode())
    return path


def test_a_mooncake_trace_is_read_row_by_row() -> None:
    workload = read_workload(DATA / "mooncake_conversation.jsonl")
    assert (len(workload.requests), workload.trace_block_size) == (40, 512)
    assert workload.requests[0] == TraceRequest(1_350_000, 1411, 713, (0, 74326, 74327))


def test_an_azure_trace_counts_time_from_its_first_row_and_has_no_ids() -> None:
    workload = read_workload(DATA / "azure_conv.csv")
    assert (len(workload.requests), workload.trace_block_size) == (100, None)
    assert workload.requests[0] == TraceRequest(0.0, 374, 44)
    assert workload.requests[1] == TraceRequest(4314.579, 396, 109)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (mooncake_row(input_length=0, hash_ids="[]"), "input_length"),
        (mooncake_row(output_length=0), "output_length"),
        (mooncake_row(input_length=-5), "input_length"),
        (mooncake_row(timestamp=-3), "timestamp"),
        (mooncake_row(timestamp=99), "timestamp"),
        (mooncake_row(input_length="1e3"), "input_length"),
        (mooncake_row(input_length='"12 "'), "input_length"),
        (mooncake_row(output_length="NaN"), "output_length"),
        (mooncake_row(output_length="true"), "output_length"),
        (mooncake_row(timestamp=10**400), "timestamp"),
        ("", "row"),
        (mooncake_row()[:-5], "row"),
        ("[" * 100_000, "row"),
        ("7", "row"),
        ('{"timestamp": 100, "input_length": 1, "output_length": 1}', "hash_ids"),
        ('{"timestamp": 100, "timestamp": 100}', "timestamp"),
        ('{"timestamp": 100, "Input_length": 1}', "Input_length"),
        (mooncake_row(hash_ids="[4, 4]"), "hash_ids"),
        (mooncake_row(hash_ids="[4, -4]"), "hash_ids"),
        (mooncake_row(hash_ids="[4, 5.0]"), "hash_ids"),
        (mooncake_row(input_length=10**12), "input_length"),
    ],
)
def test_b119_a_mooncake_row_that_makes_no_sense_is_refused_by_line_and_column(
    tmp_path: Path, row: str, column: str
) -> None:
    path = write(tmp_path, "t.jsonl", mooncake_row(timestamp=100), row, mooncake_row(timestamp=100))
    with pytest.raises(InvalidInputError) as refused:
        read_workload(path)
    assert refused.value.field == f"{path}:2: {column}"
    workload = read_workload(path, skip_invalid=True)
    assert (len(workload.requests), workload.num_skipped) == (2, 1)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("2023-11-16 18:15:47.0,0,44", "ContextTokens"),
        ("2023-11-16 18:15:47.0,374,0", "GeneratedTokens"),
        ("2023-11-16 18:15:47.0,-5,44", "ContextTokens"),
        ("-3,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:46.5,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:47.0,1e3,44", "ContextTokens"),
        ("2023-11-16 18:15:47.0,374,12 ", "GeneratedTokens"),
        ("2023-11-16 18:15:47.0,NaN,44", "ContextTokens"),
        ("2023-11-16 18:15:47.0,\u0663,44", "ContextTokens"),
        ("2023-11-31 18:15:47.0,374,44", "TIMESTAMP"),
        ("", "ContextTokens"),
        ("2023-11-16 18:15:47.0,374", "GeneratedTokens"),
        ("2023-11-16 18:15:47.0,374,44,1", "GeneratedTokens"),
        (f"2023-11-16 18:15:47.0,{10**12},44", "ContextTokens"),
        (f"2023-11-16 18:15:47.0,{'9' * 5000},44", "ContextTokens"),
    ],
)
def test_b119_an_azure_row_that_makes_no_sense_is_refused_by_line_and_column(
    tmp_path: Path, row: str, column: str
) -> None:
    path = write(tmp_path, "t.csv", AZURE_HEADER, AZURE_ROW, row, AZURE_ROW)
    with pytest.raises(InvalidInputError) as refused:
        read_workload(path)
    assert refused.value.field == f"{path}:3: {column}"
    workload = read_workload(path, skip_invalid=True)
    assert (len(workload.requests), workload.num_skipped) == (2, 1)


def test_a_burstgpt_trace_counts_seconds_and_has_no_ids(tmp_path: Path) -> None:
    first, last = "5,ChatGPT,472,18,490,Conversation log", "118.25,GPT-4,417,276,693,API log"
    path = write(tmp_path, "t.csv", BURSTGPT_HEADER, first, BURSTGPT_ROW, last)
    workload = read_workload(path)
    assert workload.trace_block_size is None
    assert workload.requests == (
        TraceRequest(5000.0, 472, 18),
        TraceRequest(45_000.0, 1087, 230),
        TraceRequest(118_250.0, 417, 276),
    )


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("46,ChatGPT,0,0,0,Conversation log", "Request tokens"),
        ("46,ChatGPT,10,0,10,Conversation log", "Response tokens"),
        ("46,ChatGPT,10,5,16,Conversation log", "Total tokens"),
        ("46,ChatGPT,10,5,15.0,Conversation log", "Total tokens"),
        ("46,ChatGPT,1e1,5,15,Conversation log", "Request tokens"),
        ("46,ChatGPT,10,5 ,15,Conversation log", "Response tokens"),
        ("46,,10,5,15,Conversation log", "Model"),
        ("46,ChatGPT,10,5,15, ", "Log Type"),
        ("44.9,ChatGPT,10,5,15,API log", "Timestamp"),
        ("-1,ChatGPT,10,5,15,API log", "Timestamp"),
        ("nan,ChatGPT,10,5,15,API log", "Timestamp"),
        ("1e3,ChatGPT,10,5,15,API log", "Timestamp"),
        ("46,ChatGPT,10,5,15", "Log Type"),
        ("46,ChatGPT,10,5,15,API log,", "Log Type"),
        ("", "Model"),
    ],
)
def test_b119_a_burstgpt_row_that_makes_no_sense_is_refused_by_line_and_column(
    tmp_path: Path, row: str, column: str
) -> None:
    path = write(tmp_path, "t.csv", BURSTGPT_HEADER, BURSTGPT_ROW, row, BURSTGPT_ROW)
    with pytest.raises(InvalidInputError) as refused:
        read_workload(path)
    assert refused.value.field == f"{path}:3: {column}"
    workload = read_workload(path, skip_invalid=True)
    assert (len(workload.requests), workload.num_skipped) == (2, 1)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_b119_line_ends_and_a_byte_order_mark_change_nothing(
    tmp_path: Path, end: str, mark: str
) -> None:
    rows = [mooncake_row(timestamp=3, output_length=MAX_TOKENS), mooncake_row(timestamp=3)]
    path = write(tmp_path, "t.jsonl", *rows, end=end, mark=mark)
    assert read_workload(path).requests == (
        TraceRequest(3, 600, 2_147_483_647, (0, 1)),
        TraceRequest(3, 600, 5, (0, 1)),
    )
    path = write(tmp_path, "t.csv", AZURE_HEADER, AZURE_ROW, end=end, mark=mark)
    assert read_workload(path).requests == (TraceRequest(0.0, 374, 44),)


@pytest.mark.parametrize(
    ("input_length", "hash_ids", "is_valid"),
    [
        (10, "[0]", True),
        (20, "[0, 1]", False),
        (513, "[0, 1]", True),
        (1024, "[0, 1]", True),
        (1025, "[0, 1]", False),
    ],
)
def test_b120_a_row_has_one_id_for_each_512_tokens_begun(
    tmp_path: Path, input_length: int, hash_ids: str, is_valid: bool
) -> None:
    row = mooncake_row(input_length=input_length, hash_ids=hash_ids)
    path = write(tmp_path, "t.jsonl", row)
    if is_valid:
        assert read_workload(path).requests[0].input_length == input_length
        return
    with pytest.raises(InvalidInputError, match="ids for") as refused:
        read_workload(path)
    assert refused.value.field == f"{path}:1: hash_ids"


def test_b120_ids_of_512_tokens_are_hits_of_32_blocks_of_16(tmp_path: Path) -> None:
    rows = [mooncake_row(input_length=1024, hash_ids=ids) for ids in ("[0, 1]", "[0, 2]")]
    workload = read_workload(write(tmp_path, "t.jsonl", *rows))
    hits = count_lru_hits(workload.requests, 512, 16)
    assert (hits.num_hit_blocks, hits.num_hit_tokens) == (32, 512)
    assert (hits.num_blocks, hits.num_tokens) == (128, 2048)


@pytest.mark.parametrize(
    ("name", "rows", "field"),
    [
        ("t.json", [mooncake_row()], "trace"),
        ("t.jsonl", [], "trace"),
        ("t.csv", [AZURE_HEADER], "trace"),
        ("t.csv", [], ":1: header"),
        ("t.csv", [AZURE_ROW], ":1: header"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, name: str, rows: list[str], field: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read_workload(write(tmp_path, name, *rows), skip_invalid=True)
    assert refused.value.field.endswith(field)


def test_a_missing_file_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a readable file"):
        read_workload(tmp_path / "t.csv")
    path = tmp_path / "t.jsonl"
    path.write_bytes(mooncake_row().encode() + b"\n\xff\n")
    with pytest.raises(InvalidInputError, match="UTF-8") as refused:
        read_workload(path)
    assert refused.value.field == f"{path}:2: row"
