"""Writes names beside lines, and numbers along an axis, where there is room for them."""

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from rayserve_paged.experiments.report.line import Line, color_of

_LABEL_GAP_PX: Final = 4.0


def thin_labels(axes: Axes) -> None:
    """Leave out every other label along x until none runs into the next."""
    _laid_out(axes)
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    low, high = sorted(axes.get_xlim())
    labels = [label for label in labels if low <= label.get_position()[0] <= high]
    while len(labels) > 2 and _collide(labels):
        for label in labels[1::2]:
            label.set_visible(False)
        labels = labels[::2]


def _collide(labels: Sequence[Text]) -> bool:
    boxes = [label.get_window_extent() for label in labels]
    return any(after.x0 - before.x1 < _LABEL_GAP_PX for before, after in itertools.pairwise(boxes))


def label_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each line's name behind its last point; names are pushed apart."""
    ends = []
    for line in lines:
        known = np.flatnonzero(~np.isnan(line.y))
        if line.series.label and len(known):
            last = int(known[-1])
            ends.append((float(line.y[last]), float(line.x[last]), line.series))
    if not ends:
        return
    # Room for the longest name, then positions in points of that layout.
    longest = max((series.label for _y, _x, series in ends), key=len)
    spacer = axes.annotate(
        longest,
        (1, 0.5),
        xycoords="axes fraction",
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=8,
        alpha=0,
    )
    scale = 72 / _laid_out(axes).dpi
    heights = [float(axes.transData.transform((x, y))[1]) * scale for y, x, _series in ends]
    floor = float(axes.transAxes.transform((0, 0))[1]) * scale + 3
    places = _apart(heights, 9.5, floor)
    for (y, x, series), height, place in zip(ends, heights, places, strict=True):
        axes.annotate(
            series.label,
            (x, y),
            xytext=(6, place - height),
            va="center",
            textcoords="offset points",
            fontsize=8,
            color=color_of(series),
            annotation_clip=False,
        )
    spacer.set_text(longest)


def _apart(heights: Sequence[float], gap: float, floor: float) -> list[float]:
    """Return heights near those given, in the same order, at least so far apart and so high."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    for _round in range(50):
        moved = False
        for low, high in itertools.pairwise(order):
            overlap = gap - (placed[high] - placed[low])
            if overlap > 1e-6:
                placed[low] -= overlap / 2
                placed[high] += overlap / 2
                moved = True
        if not moved:
            break
    lowest = floor
    for index in order:
        placed[index] = max(placed[index], lowest)
        lowest = placed[index] + gap
    return placed


def label_peaks(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each curve's name at its highest point, where no other name is."""
    _laid_out(axes)
    taken: list[Text] = []
    for line in lines:
        known = ~np.isnan(line.y)
        if not line.series.label or not known.any():
            continue
        peak = int(np.nanargmax(line.y))
        text = axes.annotate(
            line.series.label,
            (float(line.x[peak]), float(line.y[peak])),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
            color=color_of(line.series),
            ha="center",
            va="bottom",
        )
        box = text.get_window_extent()
        if any(box.overlaps(other.get_window_extent()) for other in taken):
            text.remove()
        else:
            taken.append(text)


def label_sides(axes: Axes, lines: Sequence[Line]) -> None:
    """Write the names of the leftmost and the rightmost curve beside them, where they part most.

    The panel is laid out.
    """
    named = [line for line in lines if line.series.label and not np.isnan(line.y).any()]
    if len(named) < 2:
        return
    levels = np.array([30.0, 40.0, 50.0, 60.0, 70.0, 80.0])
    at = np.log(np.array([np.interp(levels, line.y, line.x) for line in named]))
    level = int(np.argmax(np.ptp(at, axis=0)))
    # Of curves that are alike two different ones.
    order = np.argsort(at[:, level], kind="stable")
    left, right = int(order[0]), int(order[-1])
    # Above a rising curve on its left, and below one on its right.
    for index, offset, side, end in ((left, -5, "right", "bottom"), (right, 5, "left", "top")):
        text = axes.annotate(
            named[index].series.label,
            (float(np.exp(at[index, level])), float(levels[level])),
            xytext=(offset, 0),
            textcoords="offset points",
            fontsize=8,
            color=color_of(named[index].series),
            ha=side,
            va=end,
        )
        box, room = text.get_window_extent(), axes.get_window_extent()
        if box.x0 < room.x0 or box.x1 > room.x1:
            text.remove()


def _laid_out(axes: Axes) -> Figure:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    return figure
