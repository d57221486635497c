"""What a panel draws: lines with their colours, on scales."""

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rayserve_paged.experiments.report.layout import Series

FloatArray = npt.NDArray[np.float64]

NUM_COLORS: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel.

    Args:
        series: Whose.
        x: float64 [n].
        y: float64 [n]; NaN where there is no value.
        low: float64 [n], least over the seeds; None where there is one seed.
        high: float64 [n], most over the seeds.
    """

    series: Series
    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One direction of a panel.

    Args:
        title: Written at the axis.
        is_log: Whether it is logarithmic.
        ticks: Positions and labels; None for what the library chooses.
        limit: A line across, and
        limit_label: what it is.
        is_seconds: Whether its numbers are seconds, written as such.
        is_count: Whether they are whole, or means of such.
        bounds: Ends; None for those of the data.
        marks: Lines across, and what stands at each.
    """

    title: str = ""
    is_log: bool = False
    ticks: tuple[Sequence[float], Sequence[str]] | None = None
    limit: float | None = None
    limit_label: str = ""
    is_seconds: bool = False
    is_count: bool = False
    bounds: tuple[float | None, float | None] = (None, None)
    marks: Sequence[tuple[float, str]] = ()


def color_of(series: Series) -> str:
    """Return the placeholder of a series' colour."""
    return f"#fe00{series.index % NUM_COLORS + 1:02x}"
