"""The figures of cells, and of the points of the matrix over their seeds."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl

from rayserve_paged.core.request import FinishReason
from rayserve_paged.experiments.cell_result import CellResult
from rayserve_paged.experiments.config import SloConfig
from rayserve_paged.experiments.matrix import Experiment
from rayserve_paged.experiments.timeline import timeline, tokens_by_replica

Figures = dict[str, float | int | None]

PERCENTILES: Final = (50, 90, 99)
_ENDED_WELL: Final = (FinishReason.LENGTH.value, FinishReason.STOP.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """All seeds of one combination of the axes.

    Args:
        labels: By axis, the label of its value.
        cells: Indices into `Experiment.cells`.
        figures: By name the mean over the seeds, and the least and the most; None where no seed
            has a value.
    """

    labels: Mapping[str, str]
    cells: tuple[int, ...]
    figures: Mapping[str, tuple[float, float, float] | None]


def figures_of(result: CellResult, slo: SloConfig) -> Figures:
    """Return a cell's figures; None where there is no value."""
    requests = result.requests
    ended_well = requests.filter(pl.col("finish").is_in(_ENDED_WELL))
    num_requests, num_finished = len(requests), len(ended_well)
    arrivals = requests["arrival_s"].to_numpy()
    ends = requests["end_s"].to_numpy()
    arriving_s = float(np.ptp(arrivals)) if num_requests else 0.0
    span_s = float(ends.max() - arrivals.min()) if num_requests else 0.0
    num_output = int(requests["num_output_tokens"].sum())
    num_good = int(requests.select(meets(slo).sum()).item())
    started = requests.filter(pl.col("first_token_s").is_not_null())
    num_prompt = int(started["num_prompt_tokens"].sum())
    busy = result.replicas["busy_s"].mean()
    figures: Figures = {
        "num_requests": num_requests,
        "num_finished": num_finished,
        "num_failed": num_requests - num_finished,
        "span_s": span_s,
        "offered_requests_per_s": _rate(num_requests, arriving_s),
        "requests_per_s": _rate(num_finished, span_s),
        "output_tokens_per_s": _rate(num_output, span_s),
        "prompt_tokens_per_s": _rate(num_prompt, span_s),
        "goodput_requests_per_s": _rate(num_good, span_s),
        "slo_share": num_good / num_requests if num_requests else None,
        "hit_rate": int(started["num_cached_tokens"].sum()) / num_prompt if num_prompt else None,
        "num_preemptions": _total(result.replicas["num_preemptions"]),
        "num_deaths": len(result.deaths),
        "num_resumed": _num_resumed(requests),
        "num_recomputed_tokens": _num_recomputed(result, ended_well),
        "busy_share": busy / span_s if isinstance(busy, float) and span_s else None,
    }
    figures |= _distribution("ttft_s", requests["ttft_s"])
    figures |= _gaps("itl_s", result.gaps)
    figures |= _distribution("e2e_s", ended_well["e2e_s"])
    return figures | _over_time(result) | _balance(result)


def meets(slo: SloConfig) -> pl.Expr:
    """Return an expression over requests: whether one ended well and kept the objective."""
    good = pl.col("finish").is_in(_ENDED_WELL)
    if slo.ttft_s is not None:
        good &= pl.col("ttft_s").fill_null(math.inf) <= slo.ttft_s
    if slo.itl_s is not None:
        # A request of a single token has no gap to be late in.
        good &= pl.col("itl_s").fill_null(0.0) <= slo.itl_s
    return good


def points_of(experiment: Experiment, figures: Sequence[Figures]) -> list[Point]:
    """Gather the cells of each combination, in the order of the matrix."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, cell in enumerate(experiment.cells):
        groups.setdefault(tuple(cell.labels.values()), []).append(index)
    points = []
    for indices in groups.values():
        names = figures[indices[0]]
        gathered = {name: _spread([figures[index][name] for index in indices]) for name in names}
        points.append(Point(experiment.cells[indices[0]].labels, tuple(indices), gathered))
    return points


def summary_text(experiment: Experiment, figures: Sequence[Figures]) -> str:
    """Return `summary.json`: equal bytes for equal settings, where all cells are simulated."""
    points = points_of(experiment, figures)
    content = {
        "title": experiment.title,
        "question": experiment.question,
        "slo": experiment.slo.model_dump(),
        "axes": {axis.name: [value.label for value in axis.values] for axis in experiment.axes},
        "seeds": experiment.seeds,
        "points": [
            {
                "labels": point.labels,
                "num_seeds": len(point.cells),
                "figures": {
                    name: None if spread is None else dict(zip(_SPREAD, spread, strict=True))
                    for name, spread in point.figures.items()
                },
            }
            for point in points
        ],
        "cells": [
            {"cell": cell.digest, "labels": cell.labels, "seed": cell.seed, "figures": each}
            for cell, each in zip(experiment.cells, figures, strict=True)
        ],
    }
    return json.dumps(content, indent=1) + "\n"


_SPREAD = ("mean", "min", "max")


def _spread(values: Sequence[float | int | None]) -> tuple[float, float, float] | None:
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    return math.fsum(known) / len(known), min(known), max(known)


def _rate(count: int, span_s: float) -> float | None:
    return count / span_s if span_s else None


def _total(column: pl.Series) -> int | None:
    return None if column.null_count() else int(column.sum())


def _num_resumed(requests: pl.DataFrame) -> int | None:
    """How many requests went on at another replica, or in another life of theirs."""
    attempts = requests["num_attempts"]
    return None if attempts.null_count() else int((attempts > 1).sum())


def _num_recomputed(result: CellResult, ended_well: pl.DataFrame) -> int | None:
    """How many tokens were computed beyond those that the requests which ended well need once."""
    computed = _total(result.replicas["num_computed_tokens"])
    if computed is None:
        return None
    # The last token of an answer is not computed.
    needed = (
        pl.col("num_prompt_tokens") - pl.col("num_cached_tokens") + pl.col("num_output_tokens") - 1
    )
    return computed - int(ended_well.select(needed.sum()).item())


def _distribution(name: str, column: pl.Series) -> Figures:
    values = column.drop_nulls().to_numpy()
    figures: Figures = {f"{name}_mean": float(values.mean()) if len(values) else None}
    for percent in PERCENTILES:
        value = float(np.percentile(values, percent)) if len(values) else None
        figures[f"{name}_p{percent}"] = value
    figures[f"{name}_max"] = float(values.max()) if len(values) else None
    return figures


def _gaps(name: str, gaps: pl.DataFrame) -> Figures:
    seconds, counts = gaps["gap_s"].to_numpy(), gaps["count"].to_numpy()
    total = int(counts.sum())
    figures: Figures = {f"{name}_mean": float(seconds @ counts) / total if total else None}
    below = np.cumsum(counts)
    for percent in PERCENTILES:
        rank = max(1, math.ceil(total * percent / 100))
        value = float(seconds[np.searchsorted(below, rank)]) if total else None
        figures[f"{name}_p{percent}"] = value
    figures[f"{name}_max"] = float(seconds[-1]) if total else None
    return figures


def _over_time(result: CellResult) -> Figures:
    """Means and peaks over the time of the run, of all replicas together."""
    line = timeline(result)
    figures: Figures = {}
    for name in ("held_share", "waste_share", "num_waiting"):
        figures[f"{name}_mean"] = line.mean(name)
        figures[f"{name}_max"] = line.peak(name)
    return figures


def _balance(result: CellResult) -> Figures:
    """How unevenly the work was dealt: 1 where every replica had the same."""
    tokens = tokens_by_replica(result)
    mean = float(tokens.mean()) if len(tokens) else 0.0
    return {"load_max_over_mean": float(tokens.max()) / mean if mean else None}
