"""Writes an experiment's tables: all cells in one file each, with the axes as columns."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import polars as pl

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.experiments.cell_result import CellResult
from rayserve_paged.experiments.config import SloConfig
from rayserve_paged.experiments.matrix import Cell, Experiment
from rayserve_paged.experiments.summary import Figures, meets

FILES: Final = {
    "requests": "results.parquet",
    "loads": "timeseries.parquet",
    "replicas": "replicas.parquet",
    "gaps": "token_gaps.parquet",
    "deaths": "deaths.parquet",
}
CELLS: Final = "cells.parquet"


def write_tables(
    out: Path, experiment: Experiment, results: Sequence[CellResult], figures: Sequence[Figures]
) -> None:
    """Write the files of `FILES` and `CELLS`.

    Raises:
        InvalidInputError: One cannot be written.
    """
    for table, file in FILES.items():
        parts = (
            _with_axes(experiment, cell, _table(result, table, experiment.slo))
            for cell, result in zip(experiment.cells, results, strict=True)
        )
        _write(out / file, parts)
    cells = (
        _with_axes(experiment, cell, pl.DataFrame([{**result.facts, **result.effort, **each}]))
        for cell, result, each in zip(experiment.cells, results, figures, strict=True)
    )
    _write(out / CELLS, cells)


def _table(result: CellResult, name: str, slo: SloConfig) -> pl.DataFrame:
    table: pl.DataFrame = getattr(result, name)
    return table.with_columns(meets(slo).alias("meets_slo")) if name == "requests" else table


def _with_axes(experiment: Experiment, cell: Cell, table: pl.DataFrame) -> pl.DataFrame:
    columns = [pl.lit(cell.digest).alias("cell")]
    for axis in experiment.axes:
        label = cell.labels[axis.name]
        (value,) = (value for value in axis.values if value.label == label)
        numbers = [each.number for each in axis.values]
        if not axis.is_numeric:
            column = pl.lit(label)
        elif all(isinstance(number, int) for number in numbers):
            column = pl.lit(value.number, pl.Int64)
        else:
            column = pl.lit(value.number, pl.Float64)
        columns.append(column.alias(axis.name))
    columns.append(pl.lit(cell.seed, pl.Int64).alias("seed"))
    names = [column.meta.output_name() for column in columns]
    return table.with_columns(columns).select(*names, pl.exclude(names))


def _write(path: Path, parts: Iterable[pl.DataFrame]) -> None:
    # Where no cell has a value of a column, its type says nothing.
    whole = pl.concat(list(parts), how="vertical_relaxed")
    draft = path.with_name(f".{path.name}")
    try:
        whole.write_parquet(draft)
        draft.replace(path)
    except OSError as error:
        accepted = f"a file that can be written ({error.strerror or error})"
        raise InvalidInputError("--out", str(path), accepted) from error
