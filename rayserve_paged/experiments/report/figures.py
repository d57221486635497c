"""The pictures of a report: what each is of, what it shows, and its numbers as a table."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from rayserve_paged.experiments.cell_result import CellResult
from rayserve_paged.experiments.outcome import Outcome
from rayserve_paged.experiments.report.layout import Layout, Place, Series, lay_out
from rayserve_paged.experiments.report.line import FloatArray, Line, Scale
from rayserve_paged.experiments.report.measures import (
    BALANCE,
    FAILED,
    GOODPUT,
    HELD,
    HELD_MAX,
    HITS,
    ITL_P50,
    ITL_P99,
    KEPT,
    PREEMPTIONS,
    REQUESTS,
    TOKENS,
    TTFT_P50,
    TTFT_P99,
    WAITING,
    WAITING_MAX,
    WASTE,
)
from rayserve_paged.experiments.report.panels import bar_panel, curve_panel, line_panel, strip_panel
from rayserve_paged.experiments.report.wording import (
    ABSENT,
    Measure,
    finding,
    kept_finding,
    seconds,
    value_of,
)
from rayserve_paged.experiments.timeline import timeline, tokens_by_replica

_NUM_TIMES: Final = 160
_CURVE: Final = np.concatenate([np.linspace(0, 98, 99), np.linspace(98.1, 100, 20)])


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The numbers of a figure.

    Args:
        num_names: Columns, from the first, that name what a row is about.
        headings: Of the columns.
        rows: Texts, one for each heading.
    """

    num_names: int
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class FigurePart:
    """One figure of the report.

    Args:
        name: Its anchor.
        topic: What it is of.
        finding: What is seen.
        note: How to read it.
        panels: Caption and SVG of each.
        table: Its numbers.
    """

    name: str
    topic: str
    finding: str
    note: str
    panels: Sequence[tuple[str, str]]
    table: Table


class FigureBuilder:
    """Draws the figures of one experiment.

    Args:
        outcome: Of the experiment.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.layout: Layout = lay_out(outcome)
        self.outcome = outcome
        self._slo = outcome.experiment.slo

    def figures(self) -> list[FigurePart]:
        """Return all figures, in the order of the page."""
        return [
            self._latency(),
            self._distribution_of_ttft(),
            self._distribution_of_itl(),
            self._throughput(),
            self._goodput(),
            self._hits(),
            self._preemptions(),
            self._occupancy(),
            self._waste(),
            self._queue(),
            self._replicas(),
        ]

    # --- along x --------------------------------------------------------------------------

    def _latency(self) -> FigurePart:
        slo = self._slo.ttft_s
        return self.along(
            "latency",
            "Latency",
            finding(self.layout, TTFT_P99),
            [TTFT_P50, TTFT_P99, ITL_P99],
            "From the submission of a request to its first token, and from each token to the next.",
            is_log=True,
            limits={TTFT_P99.name: slo, TTFT_P50.name: slo},
        )

    def _throughput(self) -> FigurePart:
        return self.along(
            "throughput",
            "Throughput",
            finding(self.layout, TOKENS),
            [TOKENS, REQUESTS],
            "Over the time from the first arrival to the last end, the tail of the run included.",
        )

    def _goodput(self) -> FigurePart:
        bounds = []
        if self._slo.ttft_s is not None:
            bounds.append(f"first token within {seconds(self._slo.ttft_s)}")
        if self._slo.itl_s is not None:
            bounds.append(f"{seconds(self._slo.itl_s)} from token to token on average")
        return self.along(
            "goodput",
            "Goodput",
            kept_finding(self.layout, KEPT),
            [GOODPUT, KEPT],
            f"Requests that keep the objective: {' and '.join(bounds) or 'none was set'}.",
        )

    def _hits(self) -> FigurePart:
        note = "Share of the prompt tokens whose KV was in the prefix cache of the replica chosen."
        return self.along("hits", "Prefix cache", finding(self.layout, HITS), [HITS], note)

    def _preemptions(self) -> FigurePart:
        measures = [PREEMPTIONS, FAILED]
        told = finding(self.layout, PREEMPTIONS)
        values = [self._value(PREEMPTIONS, s, p) for s in self.layout.series for p in self._places]
        if not any(values):
            told = "No request was preempted"
            told += "" if all(v == 0 for v in values) else ", as far as is known"
        note = "A preempted request gives its blocks back and computes again what the cache lost."
        return self.along("preemptions", "Preemptions", told, measures, note)

    @property
    def _places(self) -> Sequence[Place]:
        return self.layout.places

    def _value(self, measure: Measure, series: Series, place: Place) -> float | None:
        return value_of(self.layout, measure, series, place)

    def along(
        self,
        name: str,
        topic: str,
        told: str,
        measures: Sequence[Measure],
        note: str,
        *,
        is_log: bool = False,
        limits: dict[str, float | None] | None = None,
    ) -> FigurePart:
        """Draw a panel for each measure, along x.

        Args:
            name: Anchor of the figure.
            topic: What it is of.
            told: What is seen.
            measures: Of the panels.
            note: How to read it.
            is_log: Whether the measures are on logarithmic scales, where they are above 0.
            limits: By measure, a line across its panel.
        """
        panels = []
        for measure in measures:
            # Seconds have their unit at the ticks.
            unit = f", {measure.unit}" if measure.unit not in ("", "s") else ""
            limit = (limits or {}).get(measure.name)
            svg = self._measure_panel(measure, is_log=is_log, limit=limit)
            panels.append((f"{measure.title}{unit}", svg))
        return FigurePart(name, topic, told, note, panels, self.table(measures))

    def _measure_panel(self, measure: Measure, *, is_log: bool, limit: float | None) -> str:
        layout = self.layout
        description = f"{finding(layout, measure)}. The numbers are in the table below."
        if not layout.x_title:
            bars = [
                (series, value * measure.scale, measure.form(value))
                for series in layout.series
                if (value := self._value(measure, series, self._places[0])) is not None
            ]
            return bar_panel(bars, Scale(title=measure.unit), description)
        lines = [self._line(measure, series) for series in layout.series]
        y = Scale(
            is_log=is_log and all((line.y[~np.isnan(line.y)] > 0).all() for line in lines),
            is_seconds=measure.unit == "s",
            is_count=not measure.unit,
            limit=limit,
            limit_label="objective",
            bounds=(None, None) if is_log else (0, _top(lines)),
        )
        return line_panel(lines, self._x_scale(), y, description)

    def _line(self, measure: Measure, series: Series) -> Line:
        layout = self.layout
        spreads = [layout.point(series, place).figures[measure.name] for place in self._places]
        table = np.array([(np.nan,) * 3 if spread is None else spread for spread in spreads])
        mean, low, high = table.T * measure.scale
        x = np.array([place.position for place in self._places])
        several = len(self.outcome.experiment.seeds) > 1
        return Line(series, x, mean, low if several else None, high if several else None)

    def _x_scale(self) -> Scale:
        layout, places = self.layout, self._places
        positions = [place.position for place in places]
        if layout.is_categorical:
            return Scale(title=layout.x_title, ticks=(positions, [p.label for p in places]))
        if layout.is_load:
            return Scale(title=layout.x_title, bounds=(0, None))
        is_log = min(positions) > 0 and max(positions) / min(positions) >= 8
        ticks = positions, [f"{position:,g}" for position in positions]
        return Scale(title=layout.x_title, is_log=is_log, ticks=ticks)

    def table(self, measures: Sequence[Measure]) -> Table:
        """Return these measures of every point."""
        layout = self.layout
        rows = []
        for place in layout.places:
            for series in layout.series:
                values = (self._value(measure, series, place) for measure in measures)
                texts = (
                    ABSENT if value is None else measure.form(value)
                    for measure, value in zip(measures, values, strict=True)
                )
                rows.append([*self._names(series, place), *texts])
        names = self._headings()
        return Table(len(names), [*names, *(measure.title for measure in measures)], rows)

    def _headings(self) -> list[str]:
        headings = [self.layout.x_title] if self.layout.x_title else []
        return [*headings, self.layout.series_title] if len(self.layout.series) > 1 else headings

    def _names(self, series: Series, place: Place) -> list[str]:
        names = [place.text] if self.layout.x_title else []
        return [*names, series.label] if len(self.layout.series) > 1 else names

    # --- one panel for each place ---------------------------------------------------------

    def _distribution_of_ttft(self) -> FigurePart:
        def curve(result: CellResult) -> tuple[FloatArray, FloatArray]:
            values = result.requests["ttft_s"].drop_nulls().to_numpy()
            if not len(values):
                return np.array([np.nan]), np.array([np.nan])
            return np.percentile(values, _CURVE), _CURVE

        x = Scale(
            title="time to first token",
            is_log=True,
            is_seconds=True,
            limit=self._slo.ttft_s,
            limit_label="objective",
        )
        y = Scale(bounds=(0, 102))
        panels = self._panels(curve, x, y, "share of requests, %", is_distribution=True)
        return FigurePart(
            "ttft",
            "Distribution of the time to first token",
            finding(self.layout, TTFT_P50),
            "How many percent of the requests had their first token within the time below.",
            panels,
            self.table([TTFT_P50, *self._percentiles("ttft_s", "time to first token")]),
        )

    def _distribution_of_itl(self) -> FigurePart:
        def curve(result: CellResult) -> tuple[FloatArray, FloatArray]:
            gaps, counts = result.gaps["gap_s"].to_numpy(), result.gaps["count"].to_numpy()
            if not len(gaps):
                return np.array([np.nan]), np.array([np.nan])
            below = 100 * np.cumsum(counts) / counts.sum()
            kept = np.unique(np.searchsorted(below, _CURVE).clip(0, len(gaps) - 1))
            # From 0 on: where all tokens came alike, that is all there is to see.
            return np.append(gaps[kept[0]], gaps[kept]), np.append(0.0, below[kept])

        x = Scale(title="time from token to token", is_log=True, is_seconds=True)
        y = Scale(bounds=(0, 102))
        panels = self._panels(curve, x, y, "share of tokens, %", is_distribution=True)
        return FigurePart(
            "itl",
            "Distribution of the time between tokens",
            finding(self.layout, ITL_P99),
            "How many percent of the tokens came within the time below after the one before.",
            panels,
            self.table([ITL_P50, *self._percentiles("itl_s", "time between tokens")]),
        )

    def _percentiles(self, name: str, title: str) -> list[Measure]:
        names = {"p90": "P90", "p99": "P99", "mean": "Mean"}
        return [
            Measure(f"{name}_{part}", f"{word} {title}", "s", seconds, "low")
            for part, word in names.items()
        ]

    def _occupancy(self) -> FigurePart:
        panels = self._over_time("held_share", 100, "blocks held by requests, %")
        note = "Share of the KV blocks that running requests hold; the rest is free or cached."
        told, table = finding(self.layout, HELD), self.table([HELD, HELD_MAX])
        return FigurePart("occupancy", "KV occupancy over time", told, note, panels, table)

    def _waste(self) -> FigurePart:
        panels = self._over_time("waste_share", 100, "slots held without a token, %")
        note = "Share of the slots in held blocks that no token is in: the ends of last blocks."
        told, table = finding(self.layout, WASTE), self.table([WASTE])
        return FigurePart("waste", "KV waste over time", told, note, panels, table)

    def _queue(self) -> FigurePart:
        panels = self._over_time("num_waiting", 1, "waiting requests")
        note = "Requests that replicas have been given and that have not started, of all replicas."
        told, table = finding(self.layout, WAITING_MAX), self.table([WAITING, WAITING_MAX])
        return FigurePart("queue", "Queue depth over time", told, note, panels, table)

    def _over_time(self, name: str, scale: float, caption: str) -> list[tuple[str, str]]:
        def curve(result: CellResult) -> tuple[FloatArray, FloatArray]:
            times, values = timeline(result).thinned(name, _NUM_TIMES)
            return times, values * scale

        x = Scale(title="time, s", bounds=(0, None))
        return self._panels(curve, x, Scale(), caption)

    def _replicas(self) -> FigurePart:
        panels = []
        for place in self.layout.shown_places:
            rows = []
            for series in self.layout.series:
                tokens = tokens_by_replica(self.first_result(series, place))
                mean = float(tokens.mean())
                rows.append((series, tokens / mean if mean else tokens))
            description = f"Work of each replica over the mean{self.at(place)}."
            shares = np.concatenate([values for _series, values in rows])
            bounds = min(0.5, 0.95 * float(shares.min())), max(1.5, 1.05 * float(shares.max()))
            x = Scale(title="tokens served, 1 is the mean", bounds=bounds, limit=1.0)
            panels.append(
                (self.caption("each dot a replica", place), strip_panel(rows, x, description))
            )
        note = "Prompt and output tokens of the requests that each replica served, over the mean."
        told, table = finding(self.layout, BALANCE), self.table([BALANCE])
        return FigurePart("replicas", "Load of the replicas", told, note, panels, table)

    def _panels(
        self,
        curve: Callable[[CellResult], tuple[FloatArray, FloatArray]],
        x: Scale,
        y: Scale,
        caption: str,
        *,
        is_distribution: bool = False,
    ) -> list[tuple[str, str]]:
        """Draw the first seed's curves: a panel for each place shown, all on one scale."""
        layout = self.layout
        lines = {
            place.label: [
                Line(series, *curve(self.first_result(series, place))) for series in layout.series
            ]
            for place in layout.shown_places
        }
        drawn = [line for each in lines.values() for line in each]
        if is_distribution:
            x = dataclasses.replace(x, bounds=_span(drawn))
        else:
            y = dataclasses.replace(y, bounds=(0, _top(drawn)))
        panels = []
        for place in layout.shown_places:
            description = f"{x.title}{self.at(place)}: {caption}. The table below has its numbers."
            svg = curve_panel(
                lines[place.label], x, y, description, is_distribution=is_distribution
            )
            panels.append((self.caption(caption, place), svg))
        return panels

    def first_result(self, series: Series, place: Place) -> CellResult:
        """Return the result of a point's first seed."""
        return self.outcome.results[self.layout.point(series, place).cells[0]]

    def at(self, place: Place) -> str:
        """Return where a picture is, as the end of a sentence."""
        return f" at {place.text}" if place.text else ""

    def caption(self, caption: str, place: Place) -> str:
        """Return what stands above a picture of one place."""
        return f"{place.text}: {caption}" if place.text else caption


def _top(lines: Sequence[Line]) -> float:
    """Return the upper end of a scale from 0."""
    tops = [line.high if line.high is not None else line.y for line in lines]
    highest = max((float(np.nanmax(top, initial=0.0)) for top in tops), default=0.0)
    return 1.08 * highest if highest else 1.0


def _span(lines: Sequence[Line]) -> tuple[float | None, float | None]:
    """Return the ends of a scale that holds all curves."""
    known = [line.x[~np.isnan(line.x)] for line in lines]
    values = np.concatenate(known) if known else np.empty(0)
    if not len(values) or not values.min() > 0:
        return None, None
    return float(values.min()) / 1.08, float(values.max()) * 1.08
