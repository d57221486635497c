"""Numbers with their units, and the sentences that say what a picture shows."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, Literal

from rayserve_paged.experiments.report.layout import Layout, Place, Series

Format = Callable[[float], str]

ABSENT: Final = "-"
_ALIKE: Final = 1.1
"""Figures whose ratio is below this are called alike."""


def seconds(value: float) -> str:
    """Return "12 ms" or "3.4 s"."""
    if value >= 100:
        return f"{value:,.0f} s"
    text = f"{value:.2g}"
    return f"{text} s" if float(text) >= 1 else f"{_short(1000 * value)} ms"


def count(value: float) -> str:
    """Return "1,234" or "3.4"."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else _short(value)


def tokens_rate(value: float) -> str:
    """Return "1,234 tokens/s"."""
    return f"{count(value)} tokens/s"


def requests_rate(value: float) -> str:
    """Return "12 requests/s"."""
    return f"{count(value)} requests/s"


def percent(value: float) -> str:
    """Return "63%" of a share."""
    share = 100 * value
    return f"{share:.0f}%" if share >= 10 or not share else f"{share:.2g}%"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A figure that pictures and sentences are about.

    Args:
        name: Of `summary.Figures`.
        title: What it is called.
        unit: In which the picture has it; empty for a count.
        form: Its value with the unit.
        better: Which is better; None where neither is.
        scale: Factor from the value to the picture's unit.
    """

    name: str
    title: str
    unit: str
    form: Format
    better: Literal["low", "high"] | None = None
    scale: float = 1.0


def value_of(layout: Layout, measure: Measure, series: Series, place: Place) -> float | None:
    """Return the mean over the seeds."""
    spread = layout.point(series, place).figures[measure.name]
    return None if spread is None else spread[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Compared:
    """Values of a measure that a sentence may set against each other.

    Args:
        context: What they have in common, such as " at 12 requests/s".
        values: At least two, ascending, and what each is of.
    """

    context: str
    values: Sequence[tuple[float, str]]

    @property
    def ratio(self) -> float:
        """The most over the least."""
        low, high = self.values[0][0], self.values[-1][0]
        if low == high:
            return 1.0
        return high / low if low > 0 else math.inf


def finding(layout: Layout, measure: Measure) -> str:
    """Return a sentence: what a measure is at its best and at its worst.

    Under the same load the lines are compared, where there are several. Along any other x, what
    the lines are is a circumstance, and each is compared with itself.
    """
    by_series = len(layout.series) > 1 and (layout.is_load or len(layout.places) == 1)
    compared = _by_series(layout, measure) if by_series else _by_place(layout, measure)
    if not compared:
        return _alone(layout, measure)
    widest = max(compared, key=lambda each: (each.ratio, each.values[-1][0]))
    low, high = widest.values[0], widest.values[-1]
    if widest.ratio < _ALIKE:
        cause = layout.series_title if by_series else layout.x_title.partition(",")[0]
        span = _range(measure, low[0], high[0])
        return f"{measure.title}: much the same whatever the {cause}, {span}{widest.context}"
    first, second = (high, low) if measure.better == "high" else (low, high)
    return (
        f"{measure.title}{widest.context}: {measure.form(first[0])} {first[1]}, "
        f"{measure.form(second[0])} {second[1]}"
    )


def _alone(layout: Layout, measure: Measure) -> str:
    known = [
        value
        for series in layout.series
        for place in layout.places
        if (value := value_of(layout, measure, series, place)) is not None
    ]
    if len(known) == 1:
        return f"{measure.title}: {measure.form(known[0])}"
    return f"{measure.title}: no values to compare"


def _by_series(layout: Layout, measure: Measure) -> list[_Compared]:
    """Compare the lines at each place."""
    compared = []
    for place in layout.places:
        values = [
            (value, f"with {series.label}")
            for series in layout.series
            if (value := value_of(layout, measure, series, place)) is not None
        ]
        if len(values) > 1:
            context = f" at {place.text}" if place.text else ""
            compared.append(_Compared(context, sorted(values, key=lambda each: each[0])))
    return compared


def _by_place(layout: Layout, measure: Measure) -> list[_Compared]:
    """Compare the places of each line."""
    compared = []
    for series in layout.series:
        values = [
            (value, f"{'with' if layout.is_categorical else 'at'} {place.text}")
            for place in layout.places
            if (value := value_of(layout, measure, series, place)) is not None
        ]
        if len(values) > 1:
            context = f" with {series.label}" if series.label else ""
            compared.append(_Compared(context, sorted(values, key=lambda each: each[0])))
    return compared


def _range(measure: Measure, low: float, high: float) -> str:
    parts = measure.form(low), measure.form(high)
    return parts[0] if parts[0] == parts[1] else " to ".join(parts)


KEPT: Final = 0.9
"""Share of the requests that keep the objective where it is called kept."""


def kept_finding(layout: Layout, measure: Measure) -> str:
    """Return where along x the objective is kept, by series."""
    if len(layout.places) < 2 or layout.is_categorical:
        return finding(layout, measure)
    reach: dict[tuple[int, ...], list[str]] = {}
    for series in layout.series:
        values = (value_of(layout, measure, series, place) for place in layout.places)
        kept = tuple(index for index, value in enumerate(values) if (value or 0.0) >= KEPT)
        reach.setdefault(kept, []).append(series.label)
    parts = []
    for kept in sorted(reach, key=len, reverse=True):
        names = _listed(reach[kept])
        where = _where(layout, kept)
        parts.append(f"{where} with {names}" if names else where)
    return f"{percent(KEPT)} of the requests keep the objective {', '.join(parts)}"


def _where(layout: Layout, kept: Sequence[int]) -> str:
    """Return a phrase for some places along x, of which there are several."""
    texts, last = [layout.places[index].text for index in kept], len(layout.places) - 1
    if not kept:
        return "at no load" if layout.is_load else "nowhere"
    if kept[-1] - kept[0] >= len(kept):
        return f"at {_listed(texts)}"
    if layout.is_load and kept[0] == 0:
        return f"up to {texts[-1]}"
    if len(kept) == last + 1:
        return "everywhere"
    if kept[0] == 0:
        return f"up to {texts[-1]}"
    if len(kept) == 1 and kept[0] < last:
        return f"at {texts[0]}"
    return f"from {texts[0]} on" if kept[-1] == last else f"from {texts[0]} to {texts[-1]}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
