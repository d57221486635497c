"""Draws panels: small SVGs whose colours are the page's, of a width that fits a phone."""

import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from rayserve_paged.experiments.report.layout import Series
from rayserve_paged.experiments.report.line import NUM_COLORS, FloatArray, Line, Scale, color_of
from rayserve_paged.experiments.report.line_labels import (
    label_ends,
    label_peaks,
    label_sides,
    thin_labels,
)

# Stand for the page's variables, which differ between light and dark.
_TEXT: Final = "#fe00f0"
_GRID: Final = "#fe00f1"
_LIMIT: Final = "#fe00f2"
_COLOR: Final = re.compile(r"#fe00([0-9a-f]{2})")
_ID: Final = re.compile(r' id="([^"]*)"')
_REFERENCE: Final = re.compile(r'(url\(#|xlink:href="#)([^)"]*)')

MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "p")
_DASHES: Final = ("-", "--", ":")
_SIZE_IN: Final = (3.73, 2.5)
# Any: its type names every one of the library's settings.
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rayserve-paged",
    "font.size": 8.5,
    "font.family": "sans-serif",
    "text.color": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _TEXT,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "path.simplify": True,
}


def line_panel(lines: Sequence[Line], x: Scale, y: Scale, description: str) -> str:
    """Draw values against x, each line with its name at its end.

    Returns:
        SVG.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(x, y)
        for line in lines:
            color = color_of(line.series)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, lw=0)
            axes.plot(line.x, line.y, _dash(line), color=color, marker=_marker(line.series))
        _finish(axes, x, y)
        label_ends(axes, lines)
        thin_labels(axes)
        return _svg(figure, description)


def curve_panel(
    lines: Sequence[Line], x: Scale, y: Scale, description: str, *, is_distribution: bool = False
) -> str:
    """Draw dense curves without markers, with names where there is room.

    Args:
        lines: Curves over time, each value of which holds until the next; or
        x: horizontal scale,
        y: vertical scale,
        description: what is seen, for those who do not see it,
        is_distribution: whether the curves are cumulative distributions instead.

    Returns:
        SVG.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(x, y)
        for line in lines:
            draw = "default" if is_distribution else "steps-post"
            axes.plot(
                line.x, line.y, _dash(line), color=color_of(line.series), lw=1.4, drawstyle=draw
            )
        _finish(axes, x, y)
        if is_distribution:
            thin_labels(axes)
            label_sides(axes, lines)
        else:
            label_peaks(axes, lines)
        return _svg(figure, description)


def strip_panel(rows: Sequence[tuple[Series, FloatArray]], x: Scale, description: str) -> str:
    """Draw the values of each series as dots in a row of its own.

    Returns:
        SVG.
    """
    with mpl.rc_context(_STYLE):
        ticks = list(range(len(rows)))
        y = Scale(ticks=(ticks, ["" for _ in rows]), bounds=(len(rows) - 0.4, -0.7))
        height = max(1.2, 0.42 * len(rows) + 0.75)
        figure, axes = _axes(x, y, height)
        for row, (series, values) in enumerate(rows):
            alpha = max(0.15, min(0.8, 12 / max(1, len(values))))
            axes.plot(
                values,
                np.full(len(values), row),
                "o",
                ms=6.5,
                ls="none",
                color=color_of(series),
                alpha=alpha,
                mew=0,
            )
            axes.text(
                0,
                row - 0.32,
                series.label,
                color=color_of(series),
                va="bottom",
                fontsize=8,
                transform=axes.get_yaxis_transform(),
            )
        _finish(axes, x, y)
        axes.grid(visible=False, axis="y")
        return _svg(figure, description)


def bar_panel(bars: Sequence[tuple[Series, float, str]], x: Scale, description: str) -> str:
    """Draw one bar for each series, with its name above and its value at its end.

    Returns:
        SVG.
    """
    with mpl.rc_context(_STYLE):
        ticks = list(range(len(bars)))
        y = Scale(ticks=(ticks, ["" for _ in bars]), bounds=(len(bars) - 0.5, -0.75))
        height = max(1.2, 0.44 * len(bars) + 0.6)
        figure, axes = _axes(x, y, height)
        top = max((value for _series, value, _text in bars), default=0.0)
        for row, (series, value, text) in enumerate(bars):
            axes.barh(row + 0.12, value, height=0.36, color=color_of(series), lw=0)
            axes.text(value + 0.01 * top, row + 0.12, f" {text}", va="center", fontsize=8)
            axes.text(
                0,
                row - 0.1,
                series.label,
                va="bottom",
                fontsize=8,
                transform=axes.get_yaxis_transform(),
            )
        _finish(axes, x, y)
        axes.set_xlim(0, (top or 1.0) * 1.22)
        axes.grid(visible=False, axis="y")
        return _svg(figure, description)


# --- parts --------------------------------------------------------------------------------


def _axes(x: Scale, y: Scale, height_in: float = _SIZE_IN[1]) -> tuple[Figure, Axes]:
    # No pyplot: nothing global, and no window whatever the machine has.
    figure = Figure(figsize=(_SIZE_IN[0], height_in), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    if x.is_log:
        axes.set_xscale("log")
    if y.is_log:
        axes.set_yscale("log")
    return figure, axes


def _finish(axes: Axes, x: Scale, y: Scale) -> None:
    axes.grid(visible=True, which="major")
    axes.tick_params(which="both", length=0)
    axes.set_xlabel(x.title)
    axes.set_xlim(*x.bounds)
    axes.set_ylim(*y.bounds)
    for axis, scale, num_labels in ((axes.xaxis, x, 6), (axes.yaxis, y, 8)):
        if scale.ticks is not None:
            axis.set_ticks(list(scale.ticks[0]), list(scale.ticks[1]))
            axis.minorticks_off()
        elif scale.is_log:
            _ticks_of_log(axis, num_labels)
            axis.set_major_formatter(FuncFormatter(_tick_seconds if scale.is_seconds else _tick))
        else:
            axis.set_major_locator(MaxNLocator(5, integer=scale.is_count))
            axis.set_major_formatter(FuncFormatter(_tick_seconds if scale.is_seconds else _tick))
    _draw_limits(axes, x, y)


def _draw_limits(axes: Axes, x: Scale, y: Scale) -> None:
    """Draw limits that are in sight, and marks along x."""
    style: dict[str, Any] = {"color": _LIMIT, "fontsize": 7.5, "va": "bottom"}
    for position, text in x.marks:
        axes.axvline(position, color=_LIMIT, lw=1, ls=(0, (1, 1.5)))
        axes.text(position, 1.0, text, ha="center", transform=axes.get_xaxis_transform(), **style)
    low, high = sorted(axes.get_xlim())
    if x.limit is not None and low <= x.limit <= high:
        axes.axvline(x.limit, color=_LIMIT, lw=1, ls=(0, (4, 2)))
        axes.text(
            x.limit, 1.0, x.limit_label, ha="center", transform=axes.get_xaxis_transform(), **style
        )
    low, high = sorted(axes.get_ylim())
    if y.limit is not None and low <= y.limit <= high:
        axes.axhline(y.limit, color=_LIMIT, lw=1, ls=(0, (4, 2)))
        axes.text(0.01, y.limit, y.limit_label, transform=axes.get_yaxis_transform(), **style)


def _ticks_of_log(axis: Axis, num_labels: int) -> None:
    """Label as much of a logarithmic axis as there is room for."""
    low, high = sorted(axis.get_view_interval())
    fine = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    for subs in (fine, (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        locator = LogLocator(subs=subs, numticks=20)
        num_ticks = sum(low <= tick <= high for tick in locator.tick_values(low, high))
        if num_ticks <= num_labels:
            break
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())


def _tick(value: float, _position: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _tick_seconds(value: float, _position: int) -> str:
    if not value:
        return "0"
    return f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms"


def _marker(series: Series) -> str:
    return MARKERS[series.index % len(MARKERS)]


def _dash(line: Line) -> str:
    return _DASHES[line.series.index // NUM_COLORS % len(_DASHES)]


def _svg(figure: Figure, description: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = _COLOR.sub(r"var(--c\1)", text)
    return _named(text, description)


def _named(svg: str, description: str) -> str:
    """Make ids that are referred to unique in the page, and drop the others."""
    prefix = f"p{hashlib.sha256((description + svg).encode()).hexdigest()[:8]}-"
    referred = {match[2] for match in _REFERENCE.finditer(svg)}
    svg = _ID.sub(lambda m: f' id="{prefix}{m[1]}"' if m[1] in referred else "", svg)
    svg = _REFERENCE.sub(lambda m: f"{m[1]}{prefix}{m[2]}", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "the library writes one"
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head = (
        f'<svg role="img" aria-label="{label}" {box[0]} xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return head + svg[svg.index(">") + 1 :]
