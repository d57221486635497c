"""Reads traces of requests: JSON lines of Mooncake, CSV of Azure and of BurstGPT.

What a row means is written down here, and everything else refuses the file, by line and column:

- Lengths are whole numbers of tokens from 1 to `MAX_TOKENS`: neither 1e3, "12" nor "12 " is one.
- Rows are in order of arrival; equal times are in order.
- The hash ids of a row are those of its prompt's blocks of `MOONCAKE_BLOCK_SIZE` tokens, head
  first, the last of which may be partly filled: ceil(input_length / 512) ids, each once, since an
  id stands for a block together with all that precedes it.
- BurstGPT's total is the sum of a row's tokens; a row without response tokens is a failed request,
  which is none to be served.
- A byte-order mark and CRLF are accepted; a line that is empty or repeats a column is not.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from rayserve_paged.core.block_table import num_blocks_for
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.token_ids import TokenIds

MOONCAKE_BLOCK_SIZE: Final = 512
MAX_TOKENS: Final = 2**31 - 1
_MAX_TIMESTAMP_MS: Final = 2**53  # Beyond it a float is not exact.

_MOONCAKE_COLUMNS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS: Final = (
    "Timestamp",
    "Model",
    "Request tokens",
    "Response tokens",
    "Total tokens",
    "Log Type",
)
_BURSTGPT_TIME: Final = re.compile(r"(0|[1-9]\d{0,12})(\.\d{1,6})?", re.ASCII)
_AZURE_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{1,7}", re.ASCII)
_CSV_COUNT: Final = re.compile(r"0|[1-9]\d{0,15}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row of a trace.

    Args:
        arrival_ms: When it arrives, from the trace's own zero, in milliseconds.
        input_length: Tokens of the prompt, at least 1.
        output_length: Tokens of the answer, at least 1.
        hash_ids: One id per block of the prompt, head first; None where the trace has none.
        token_ids: The prompt itself, of a recorded run; None where it is not known.
    """

    arrival_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None
    token_ids: TokenIds | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a trace, in order of arrival.

    Args:
        requests: At least one.
        trace_block_size: Tokens that a hash id stands for; None where the trace has no ids.
        num_skipped: Rows left out because they make no sense.
    """

    requests: tuple[TraceRequest, ...]
    trace_block_size: int | None
    num_skipped: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Format:
    parse: Callable[[str], TraceRequest]
    time_column: str
    trace_block_size: int | None


def read_workload(path: Path, *, skip_invalid: bool = False) -> Workload:
    """Read a trace: `.jsonl` as Mooncake's, `.csv` as Azure's or BurstGPT's, by its header.

    Mooncake's and BurstGPT's arrivals are their timestamps; Azure's count from the first row that
    is accepted, to the microsecond.

    Args:
        path: The file, in UTF-8.
        skip_invalid: Leave out and count the rows that make no sense. An order of arrival that is
            broken leaves out the row that is earlier than the last one accepted.

    Raises:
        InvalidInputError: Naming line and column of the first row that makes no sense, or a file
            that is no trace or holds no request.
    """
    if path.suffix not in (".csv", ".jsonl"):
        accepted = "a file named .jsonl (Mooncake) or .csv (Azure, BurstGPT)"
        raise InvalidInputError("trace", str(path), accepted)
    lines = _read_lines(path)
    if path.suffix == ".jsonl":
        mooncake = _Format(_mooncake_row, _MOONCAKE_COLUMNS[0], MOONCAKE_BLOCK_SIZE)
        return _read_rows(path, lines, 1, mooncake, skip_invalid)
    formats = {
        ",".join(_AZURE_COLUMNS): _Format(_AzureRows().row, _AZURE_COLUMNS[0], None),
        ",".join(_BURSTGPT_COLUMNS): _Format(_burstgpt_row, _BURSTGPT_COLUMNS[0], None),
    }
    header = lines[0].decode(errors="replace") if lines else ""
    if header not in formats:
        raise InvalidInputError(f"{path}:1: header", header, " or ".join(formats))
    return _read_rows(path, lines[1:], 2, formats[header], skip_invalid)


def _read_lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
    except OSError as error:
        accepted = f"a readable file ({error.strerror})"
        raise InvalidInputError("trace", str(path), accepted) from error
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()  # What follows the last line's end is no line.
    return [line.removesuffix(b"\r") for line in lines]


def _read_rows(
    path: Path,
    lines: Sequence[bytes],
    first_number: int,
    trace_format: _Format,
    skip_invalid: bool,
) -> Workload:
    requests: list[TraceRequest] = []
    num_skipped = 0
    for number, line in enumerate(lines, first_number):
        try:
            request = trace_format.parse(_text(line))
            if requests and request.arrival_ms < requests[-1].arrival_ms:
                accepted = f"an arrival not before the last row's, {requests[-1].arrival_ms} ms"
                raise InvalidInputError(trace_format.time_column, request.arrival_ms, accepted)
        except InvalidInputError as error:
            if not skip_invalid:
                field = f"{path}:{number}: {error.field}"
                raise InvalidInputError(field, error.value, error.accepted) from error
            num_skipped += 1
        else:
            requests.append(request)
    if not requests:
        accepted = "a trace with at least one request"
        if num_skipped:
            accepted += f" ({num_skipped} rows were left out)"
        raise InvalidInputError("trace", str(path), accepted)
    return Workload(tuple(requests), trace_format.trace_block_size, num_skipped)


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError("row", line, f"UTF-8 ({error})") from error


def _mooncake_row(line: str) -> TraceRequest:
    try:
        columns = json.loads(line, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # The latter where it is nested too deeply.
        raise InvalidInputError("row", line, f"a JSON object ({error})") from error
    if not isinstance(columns, dict):
        raise InvalidInputError("row", columns, "a JSON object")
    for name, value in columns.items():
        if name not in _MOONCAKE_COLUMNS:
            raise InvalidInputError(name, value, f"one of the columns {_MOONCAKE_COLUMNS}")
    timestamp = _whole_number(columns, "timestamp", 0, _MAX_TIMESTAMP_MS)
    input_length = _whole_number(columns, "input_length", 1, MAX_TOKENS)
    output_length = _whole_number(columns, "output_length", 1, MAX_TOKENS)
    hash_ids = _hash_ids(columns.get("hash_ids"), input_length)
    return TraceRequest(timestamp, input_length, output_length, hash_ids)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    columns: dict[str, object] = {}
    for name, value in pairs:
        if name in columns:
            raise InvalidInputError(name, value, "each column once")
        columns[name] = value
    return columns


def _whole_number(columns: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = columns.get(name)
    # A bool is an int to isinstance.
    if type(value) is not int or not least <= value <= most:
        raise InvalidInputError(name, value, f"a whole number from {least} to {most}")
    return value


def _hash_ids(value: object, input_length: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise InvalidInputError("hash_ids", value, "a list of whole numbers from 0")
    if len(set(value)) != len(value):
        raise InvalidInputError("hash_ids", value, "each id once")
    num_ids = num_blocks_for(input_length, MOONCAKE_BLOCK_SIZE)
    if len(value) != num_ids:
        accepted = (
            f"{num_ids} ids for {input_length} tokens in blocks of {MOONCAKE_BLOCK_SIZE}, "
            f"not {len(value)}"
        )
        raise InvalidInputError("hash_ids", value, accepted)
    return tuple(value)


class _AzureRows:
    """Parses rows, and knows the time of the first one that made sense."""

    def __init__(self) -> None:
        self._zero: datetime | None = None

    def row(self, line: str) -> TraceRequest:
        values = _csv_values(line, _AZURE_COLUMNS)
        time = _azure_time(values["TIMESTAMP"])
        input_length, output_length = (
            _csv_count(values, name) for name in ("ContextTokens", "GeneratedTokens")
        )
        if self._zero is None:
            self._zero = time
        arrival_ms = (time - self._zero) / timedelta(milliseconds=1)
        return TraceRequest(arrival_ms, input_length, output_length)


def _azure_time(text: str) -> datetime:
    accepted = "a time such as 2023-11-16 18:15:46.6805900"
    if not _AZURE_TIME.fullmatch(text):
        raise InvalidInputError("TIMESTAMP", text, accepted)
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInputError("TIMESTAMP", text, f"{accepted} ({error})") from error


def _burstgpt_row(line: str) -> TraceRequest:
    values = _csv_values(line, _BURSTGPT_COLUMNS)
    time = values["Timestamp"]
    if not _BURSTGPT_TIME.fullmatch(time):
        raise InvalidInputError("Timestamp", time, "a number of seconds from 0, such as 45 or 45.5")
    input_length, output_length = (
        _csv_count(values, name) for name in ("Request tokens", "Response tokens")
    )
    if values["Total tokens"] != str(input_length + output_length):
        accepted = f"{input_length + output_length}, the sum of the row's tokens"
        raise InvalidInputError("Total tokens", values["Total tokens"], accepted)
    for name in ("Model", "Log Type"):
        if not values[name].strip():
            raise InvalidInputError(name, values[name], "a name")
    return TraceRequest(float(time) * 1000, input_length, output_length)


def _csv_values(line: str, columns: Sequence[str]) -> dict[str, str]:
    values = line.split(",")
    if len(values) != len(columns):
        missing_or_last = columns[min(len(values), len(columns) - 1)]
        raise InvalidInputError(missing_or_last, line, f"{len(columns)} columns")
    return dict(zip(columns, values, strict=True))


def _csv_count(values: Mapping[str, str], name: str) -> int:
    text = values[name]
    count: object = int(text) if _CSV_COUNT.fullmatch(text) else text
    return _whole_number({name: count}, name, 1, MAX_TOKENS)
