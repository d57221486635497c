"""Which axis the pictures run along, and which lines are in them."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from rayserve_paged.experiments.matrix import Axis
from rayserve_paged.experiments.outcome import Outcome
from rayserve_paged.experiments.summary import Point

MAX_PANELS: Final = 3
"""Of pictures that have one panel for each value along x."""

_WORDS: Final = {
    "batch.max_num_batched_tokens": "token budget of a step",
    "batch.max_num_seqs": "sequences at once",
    "batch.max_num_waiting": "waiting limit",
    "batch.max_pending_tokens": "pending tokens limit",
    "batch.policy": "waiting policy",
    "cache.block_size": "block size",
    "parallel.num_replicas": "replicas",
    "parallel.tensor_parallel_size": "ranks of a replica",
    "simulation.gpu": "GPU",
    "simulation.model_shape": "model",
}

_COUNTED: Final = {
    "batch.max_num_batched_tokens": ("token a step", "tokens a step"),
    "batch.max_num_seqs": ("sequence at once", "sequences at once"),
    "parallel.num_replicas": ("replica", "replicas"),
    "parallel.tensor_parallel_size": ("rank a replica", "ranks a replica"),
    "cache.num_blocks": ("block", "blocks"),
}
"""Axes that count something: singular and plural."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One value along x.

    Args:
        label: Of the axis' value.
        position: Where it stands.
        text: What it is called, such as "12 requests/s".
    """

    label: str
    position: float
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One line of the pictures: a combination of the axes that are not x.

    Args:
        index: Decides colour and marker.
        label: Its name; empty where it is the only one.
    """

    index: int
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The points of the matrix, along x and by series.

    Args:
        x_title: What x is, with its unit; empty where there is no x.
        is_load: Whether x is the load.
        is_categorical: Whether x has names and no numbers.
        places: Along x, ascending; a single one where there is no x.
        series: The lines.
        series_title: What they are of.
        points: By series and place.
    """

    x_title: str
    is_load: bool
    is_categorical: bool
    places: tuple[Place, ...]
    series: tuple[Series, ...]
    series_title: str
    points: Mapping[tuple[int, str], Point]

    def point(self, series: Series, place: Place) -> Point:
        """Return the point of a line at a place."""
        return self.points[series.index, place.label]

    @property
    def shown_places(self) -> tuple[Place, ...]:
        """First, last and between, for pictures with a panel for each."""
        places = self.places
        if len(places) <= MAX_PANELS:
            return places
        steps = MAX_PANELS - 1
        return tuple(places[round(i * (len(places) - 1) / steps)] for i in range(MAX_PANELS))


def words_of(axis: str) -> str:
    """Return what an axis is called in a sentence."""
    last = axis.rpartition(".")[2]
    return _WORDS.get(axis, last.removeprefix("num_").replace("_", " "))


def lay_out(outcome: Outcome) -> Layout:
    """Decide what runs along x and what is a line."""
    experiment, points = outcome.experiment, outcome.points
    x = experiment.x
    others = [axis for axis in experiment.axes if axis is not x]
    labels: list[str] = []
    found: dict[tuple[int, str], Point] = {}
    for point in points:
        label = _series_label(others, point)
        if label not in labels:
            labels.append(label)
        found[labels.index(label), point.labels[x.name] if x else ""] = point
    places = (Place("", 0.0, ""),) if x is None else tuple(_places(x, points))
    is_load = x is not None and x.changes_load
    return Layout(
        x_title="" if x is None else ("offered load, requests/s" if is_load else words_of(x.name)),
        is_load=is_load,
        is_categorical=x is not None and not is_load and not x.is_numeric,
        places=places,
        series=tuple(Series(index, label) for index, label in enumerate(labels)),
        series_title=words_of(others[0].name) if len(others) == 1 else "variant",
        points=found,
    )


def _series_label(axes: list[Axis], point: Point) -> str:
    labels = []
    for axis in axes:
        label = point.labels[axis.name]
        (number,) = (value.number for value in axis.values if value.label == label)
        if number is not None:
            label = _text_of(axis.name, number)
        elif label in ("none", "true", "false"):
            label = f"{words_of(axis.name)} {label}"
        labels.append(label)
    return " · ".join(labels)


def _places(x: Axis, points: list[Point]) -> list[Place]:
    places = []
    for index, value in enumerate(x.values):
        if x.changes_load:
            position = _offered(x, value.label, points)
            text = f"{position:.3g} requests/s"
        elif value.number is not None and x.is_numeric:
            position, text = float(value.number), _text_of(x.name, value.number)
        else:
            position, text = float(index), value.label
        places.append(Place(value.label, position, text))
    return sorted(places, key=lambda place: place.position)


def _text_of(axis: str, number: float) -> str:
    if axis in _COUNTED:
        return f"{number:,g} {_COUNTED[axis][number != 1]}"
    return f"{words_of(axis)} {number:,g}"


def _offered(x: Axis, label: str, points: list[Point]) -> float:
    for point in points:
        spread = point.figures["offered_requests_per_s"]
        if point.labels[x.name] == label and spread is not None:
            return spread[0]
    return 0.0
