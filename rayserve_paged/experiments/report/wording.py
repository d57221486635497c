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


_Value = tuple[float, Series]


def finding(layout: Layout, measure: Measure) -> str:
    """Return a sentence: how a measure differs between the lines, or along the only one."""
    num_series, num_places = len(layout.series), len(layout.places)
    if num_series > 1:
        return _between_series(layout, measure)
    if num_places > 1:
        return _along_x(layout, measure)
    value = value_of(layout, measure, layout.series[0], layout.places[0])
    return f"{measure.title}: {ABSENT if value is None else measure.form(value)}"


def _between_series(layout: Layout, measure: Measure) -> str:
    """Name the best and the worst where they differ most."""
    widest: tuple[Place, _Value, _Value] | None = None
    for each in layout.places:
        ends = _ends(layout, measure, each)
        if ends is None:
            continue
        least, most = ends
        if widest is None or _ratio(least[0], most[0]) > _ratio(widest[1][0], widest[2][0]):
            widest = each, least, most
    if widest is None:
        return f"{measure.title}: no values to compare"
    place, low, high = widest
    at = f" at {place.text}" if place.text else ""
    if _ratio(low[0], high[0]) < _ALIKE:
        return (
            f"{measure.title} hardly depends on the variant: {_range(measure, low[0], high[0])}{at}"
        )
    first, second = (high, low) if measure.better == "high" else (low, high)
    return (
        f"{measure.title}{at}: {measure.form(first[0])} with {first[1].label}, "
        f"{measure.form(second[0])} with {second[1].label}"
    )


def _ends(layout: Layout, measure: Measure, place: Place) -> tuple[_Value, _Value] | None:
    """Return the least and the most at a place; None with fewer than two values."""
    found = [
        (value, series)
        for series in layout.series
        if (value := value_of(layout, measure, series, place)) is not None
    ]
    if len(found) < 2:
        return None
    found.sort(key=lambda each: (each[0], each[1].index))
    return found[0], found[-1]


def _along_x(layout: Layout, measure: Measure) -> str:
    (series,) = layout.series
    found = [
        (value, place)
        for place in layout.places
        if (value := value_of(layout, measure, series, place)) is not None
    ]
    if len(found) < 2:
        return f"{measure.title}: no values to compare"
    values = [value for value, _place in found]
    if _ratio(min(values), max(values)) < _ALIKE:
        return f"{measure.title} is much the same: {_range(measure, min(values), max(values))}"
    (first, begin), (last, end) = found[0], found[-1]
    best = max(found, key=lambda each: each[0] if measure.better == "high" else -each[0])
    is_inside = best[1] not in (begin, end)
    if (is_inside and measure.better is not None) or layout.is_categorical:
        word = "highest" if measure.better == "high" else "lowest"
        return f"{measure.title} is {word} with {best[1].text}: {measure.form(best[0])}"
    verb = "rises" if last > first else "falls"
    return (
        f"{measure.title} {verb} from {measure.form(first)} at {begin.text} "
        f"to {measure.form(last)} at {end.text}"
    )


def _ratio(low: float, high: float) -> float:
    if low == high:
        return 1.0
    return high / low if low > 0 else math.inf


def _range(measure: Measure, low: float, high: float) -> str:
    parts = measure.form(low), measure.form(high)
    return parts[0] if parts[0] == parts[1] else " to ".join(parts)


KEPT: Final = 0.9
"""Share of the requests that keep the objective where it is called kept."""

_NOWHERE: Final = -(10**9)


def kept_finding(layout: Layout, measure: Measure) -> str:
    """Return how far along x the objective is kept, by series."""
    if len(layout.places) < 2 or layout.is_categorical:
        return finding(layout, measure)
    reach: dict[int, list[str]] = {}
    for series in layout.series:
        kept = [
            index
            for index, place in enumerate(layout.places)
            if (value_of(layout, measure, series, place) or 0.0) >= KEPT
        ]
        end = (kept[-1] if layout.is_load else -kept[0]) if kept else _NOWHERE
        reach.setdefault(end, []).append(series.label)
    parts = []
    for end in sorted(reach, reverse=True):
        place = layout.places[abs(end)].text if end != _NOWHERE else ""
        if layout.is_load:
            where = f"up to {place}" if place else "at no load"
        else:
            where = f"from {place} on" if place else "nowhere"
        names = _listed(reach[end])
        parts.append(f"{where} with {names}" if names else where)
    return f"{percent(KEPT)} of the requests keep the objective {', '.join(parts)}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
