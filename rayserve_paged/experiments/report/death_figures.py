"""The pictures of a report in whose runs replicas or the controller died."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from rayserve_paged.experiments.cell_result import CellResult
from rayserve_paged.experiments.report.figures import FigureBuilder, FigurePart
from rayserve_paged.experiments.report.layout import Place
from rayserve_paged.experiments.report.line import FloatArray, Line, Scale
from rayserve_paged.experiments.report.measures import (
    DEATHS,
    GOODPUT,
    PAUSE,
    RECOMPUTED,
    RESUMED,
    SLOWEST,
)
from rayserve_paged.experiments.report.panels import curve_panel
from rayserve_paged.experiments.report.wording import finding

_NUM_BINS: Final = 60
_TEXT_ROOM: Final = 0.3
"""Share of a picture's width that is kept for who died."""
_MAX_NAMES: Final = 3


def death_figures(builder: FigureBuilder) -> list[FigurePart]:
    """Return what deaths cost, and what they did to first tokens over time; nothing without any."""
    if all(result.deaths.is_empty() for result in builder.outcome.results):
        return []
    return [_costs(builder), _slowest(builder)]


def death_answers(builder: FigureBuilder) -> list[str]:
    """Return what deaths cost, in sentences; none without any."""
    if all(result.deaths.is_empty() for result in builder.outcome.results):
        return []
    return [finding(builder.layout, measure) for measure in (GOODPUT, PAUSE, RECOMPUTED)]


def _costs(builder: FigureBuilder) -> FigurePart:
    return builder.along(
        "deaths",
        "What deaths cost",
        finding(builder.layout, RECOMPUTED),
        [RESUMED, RECOMPUTED, PAUSE],
        "A request whose replica dies goes on at another one, which computes it again while its "
        "reader waits for the next token. Counted is every token beyond those that requests which "
        "ended well need once, so that preemptions and requests that failed are in it as well.",
    )


def _slowest(builder: FigureBuilder) -> FigurePart:
    layout = builder.layout
    lines = {
        place.label: [
            Line(series, *_slowest_over_time(builder.first_result(series, place)))
            for series in layout.series
        ]
        for place in layout.shown_places
    }
    known = [line.y[~np.isnan(line.y)] for each in lines.values() for line in each]
    values = np.concatenate(known)
    bounds = (float(values.min()) / 1.2, float(values.max()) * 1.4) if len(values) else (None, None)
    limit = builder.outcome.experiment.slo.ttft_s
    y = Scale(is_log=True, is_seconds=True, bounds=bounds, limit=limit, limit_label="objective")
    panels = []
    for place in layout.shown_places:
        x = Scale(title="time of arrival, s", bounds=(0, None), marks=_marks(builder, place))
        description = (
            f"Slowest first token by time of arrival{builder.at(place)}, with a mark at each "
            "death. The table below has its numbers."
        )
        svg = curve_panel(lines[place.label], x, y, description)
        panels.append((builder.caption("slowest first token", place), svg))
    return FigurePart(
        "slowest",
        "Slowest first token over time",
        finding(layout, SLOWEST),
        "The longest time to a first token among the requests that came in each sixtieth of the "
        "run. A dotted line stands where a replica, or the controller, dies in some of the runs.",
        panels,
        builder.table([DEATHS, SLOWEST]),
    )


def _slowest_over_time(result: CellResult) -> tuple[FloatArray, FloatArray]:
    arrivals = result.requests["arrival_s"].to_numpy()
    edges = np.linspace(0.0, float(arrivals.max(initial=0.0)), _NUM_BINS + 1)
    index = np.searchsorted(edges, arrivals, side="right").clip(1, _NUM_BINS) - 1
    slowest = np.full(_NUM_BINS, np.nan)
    np.fmax.at(slowest, index, result.requests["ttft_s"].fill_null(np.nan).to_numpy())
    return edges[:-1], slowest


def _marks(builder: FigureBuilder, place: Place) -> list[tuple[float, str]]:
    """Return when somebody dies in any run of a picture, and at the first of several that are
    close who they are.
    """
    results = [builder.first_result(series, place) for series in builder.layout.series]
    rows = pl.concat([result.deaths for result in results]).select("time_s", "died")
    deaths = sorted((float(time_s), str(name)) for time_s, name in rows.unique().iter_rows())
    end_s = max(float(result.requests["arrival_s"].to_numpy().max()) for result in results)
    groups: list[list[tuple[float, str]]] = []
    for death in deaths:
        if not groups or death[0] - groups[-1][0][0] > _TEXT_ROOM * end_s:
            groups.append([])
        groups[-1].append(death)
    marks = [(time_s, "") for time_s, _name in deaths]
    return [*marks, *((group[0][0], _who_dies([name for _at, name in group])) for group in groups)]


def _who_dies(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMES:
        return f"{len(names)} deaths"
    return f"{', '.join(names)} {'dies' if len(names) == 1 else 'die'}"
