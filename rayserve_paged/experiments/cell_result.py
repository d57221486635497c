"""What a run leaves: five tables and a few facts, kept in a folder that is written at once.

The columns are described in docs/experiments.md.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import polars as pl

from rayserve_paged.sim.histogram import LogHistogram
from rayserve_paged.sim.report import FINISHES, Death, RequestColumns

FACTS: Final = "facts.json"
TABLES: Final = ("requests", "loads", "replicas", "gaps", "deaths")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CellResult:
    """One run that has ended.

    Args:
        requests: One row for each request.
        loads: The state of each replica at the ticks of a clock; a row holds until the next.
        replicas: One row for each replica.
        gaps: How often there was which time from a token to the next of its stream.
        deaths: One row for each time that a replica or the controller died.
        facts: Of the run as a whole, the same whenever a simulated one is run.
        effort: What it took to run it, which is not.
    """

    requests: pl.DataFrame
    loads: pl.DataFrame
    replicas: pl.DataFrame
    gaps: pl.DataFrame
    deaths: pl.DataFrame
    facts: Mapping[str, float | int | str | None]
    effort: Mapping[str, float]


def requests_frame(columns: RequestColumns, errors: Mapping[int, str]) -> pl.DataFrame:
    """Return one row for each request, in the order of their arrival."""
    frame = pl.DataFrame(
        {
            "request": columns.number,
            "arrival_s": columns.arrival_s,
            "first_token_s": columns.first_token_s,
            "end_s": columns.end_s,
            "ttft_s": columns.ttft_s,
            "itl_s": columns.itl_s,
            "e2e_s": columns.e2e_s,
            "num_prompt_tokens": columns.num_prompt_tokens,
            "num_output_tokens": columns.num_output_tokens,
            "num_cached_tokens": columns.num_cached_tokens,
            "replica": columns.replica,
            "is_placed": columns.is_placed,
            "num_attempts": columns.num_attempts,
            "finish": pl.Series([FINISHES[index].value for index in columns.finish], dtype=pl.Utf8),
            "error": pl.Series(
                [errors.get(number) for number in columns.number.tolist()], dtype=pl.Utf8
            ),
        }
    )
    return (
        frame.with_columns(
            pl.col("first_token_s", "ttft_s", "itl_s").fill_nan(None),
            pl.when("is_placed").then("replica").alias("replica"),
        )
        .drop("is_placed")
        .sort("request")
    )


def gaps_frame(gaps: LogHistogram) -> pl.DataFrame:
    """Return one row for each bin of a histogram that holds any."""
    middles, counts = gaps.nonzero()
    return pl.DataFrame({"gap_s": middles, "count": counts})


def deaths_frame(deaths: Iterable[Death]) -> pl.DataFrame:
    """Return one row for each death, in their order."""
    rows = [
        {"time_s": one.time_s, "died": one.name, "hangs": one.hangs, "back_s": one.back_s}
        for one in deaths
    ]
    types = {"time_s": pl.Float64, "died": pl.Utf8, "hangs": pl.Boolean, "back_s": pl.Float64}
    return pl.DataFrame(rows, schema=types)


def save(result: CellResult, folder: Path) -> None:
    """Write a result into a folder that did not exist, all at once.

    Raises:
        OSError: It cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, since a folder is only renamed within one file system.
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        for name in TABLES:
            table: pl.DataFrame = getattr(result, name)
            table.write_parquet(draft / f"{name}.parquet")
        facts = {"facts": result.facts, "effort": result.effort}
        (draft / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        for file in draft.iterdir():
            _to_disk(file)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _to_disk(path: Path) -> None:
    """Wait until the content is safe, so that no crash leaves a folder with empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(folder: Path) -> CellResult:
    """Read a result back.

    Raises:
        OSError: It is not there, or cannot be read.
    """
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    tables = {name: pl.read_parquet(folder / f"{name}.parquet") for name in TABLES}
    return CellResult(**tables, facts=facts["facts"], effort=facts["effort"])
