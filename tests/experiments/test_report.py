"""The report: every picture, each with what is seen and its numbers, and nothing from elsewhere."""

import dataclasses
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from small_experiment import write

from rayserve_paged.experiments.matrix import read_experiment
from rayserve_paged.experiments.outcome import Outcome, gather
from rayserve_paged.experiments.report.figures import FigureBuilder
from rayserve_paged.experiments.report.layout import Layout, Place, lay_out
from rayserve_paged.experiments.report.measures import KEPT, TOKENS, TTFT_P99
from rayserve_paged.experiments.report.page import report_page
from rayserve_paged.experiments.report.wording import finding, kept_finding, seconds

TOPICS = {
    "latency": "Latency",
    "ttft": "Distribution of the time to first token",
    "itl": "Distribution of the time between tokens",
    "throughput": "Throughput",
    "goodput": "Goodput",
    "hits": "Prefix cache",
    "preemptions": "Preemptions",
    "occupancy": "KV occupancy over time",
    "waste": "KV waste over time",
    "queue": "Queue depth over time",
    "replicas": "Load of the replicas",
}


class Page(HTMLParser):
    """Notes tags with their attributes, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.fixture(scope="module")
def outcome(out: Path) -> Outcome:
    return gather(read_experiment(out.parent / "experiment.yaml"), out)


@pytest.fixture(scope="module")
def text(out: Path) -> str:
    return (out / "report.html").read_text()


def test_every_picture_is_there_with_what_is_seen_and_a_table(text: str) -> None:
    parts = re.split(r'<figure id="(\w+)">', text)
    figures = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(figures) == [*TOPICS, "overview"]
    for name, topic in TOPICS.items():
        part = figures[name]
        assert f'<div class="topic">{topic}</div>' in part
        assert re.search(r"<h2>[^<]{10,}</h2>", part)
        drawings = re.findall(r'<svg role="img" aria-label="([^"]+)"', part)
        assert drawings
        assert all(len(label) > 20 for label in drawings)
        assert part.count("<tr>") == 1 + 4
        marks = " ".join(re.findall(r"<(?:path|use) [^>]*>", part))
        assert "var(--c01)" in marks
        assert "var(--c02)" in marks


def test_the_page_is_whole_in_itself_and_well_formed(text: str) -> None:
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _attrs in page.tags}
    for _tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    ids = [attributes["id"] for _tag, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for reference in re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', text):
        assert reference in ids


def test_colours_are_the_pages_alone_in_light_and_in_dark(text: str) -> None:
    style, _, body = text.partition("</style>")
    assert "prefers-color-scheme: dark" in style
    light, dark = style.split("prefers-color-scheme: dark")
    for variable in set(re.findall(r"var\((--\w+)\)", text)):
        assert f"{variable}:" in light
        assert f"{variable}:" in dark
    assert not re.findall(r"#[0-9a-f]{6}\b", re.sub(r'(id|href)="[^"]*"|url\([^)]*\)', "", body))


def contrast(one: str, other: str) -> float:
    """WCAG 2: from 1 to 21."""

    def luminance(color: str) -> float:
        parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_can_be_read_on_its_background(text: str) -> None:
    style = text.partition("</style>")[0]
    for scheme in style.split("prefers-color-scheme: dark"):
        colors = dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", scheme))
        for name in ("--ink", "--soft", "--cf0", *(f"--c0{index}" for index in range(1, 9))):
            assert contrast(colors[name], colors["--bg"]) >= 4.5, (name, colors[name])


def test_the_same_results_give_the_same_page(outcome: Outcome, text: str) -> None:
    assert report_page(outcome) == text


def test_words_of_the_file_cannot_become_markup(outcome: Outcome) -> None:
    named = dataclasses.replace(outcome.experiment, title="<script>alert(1)</script>")
    page = report_page(dataclasses.replace(outcome, experiment=named))
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page


# --- layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "x_title", "num_places", "labels"),
    [
        (
            {"placement": ["round-robin", "prefix-aware"], "workload.time_scale": [1, 0.25]},
            "offered load, requests/s",
            2,
            ["round-robin", "prefix-aware"],
        ),
        ({"placement": ["round-robin", "prefix-aware"]}, "", 1, ["round-robin", "prefix-aware"]),
        ({"workload.time_scale": [1, 0.25]}, "offered load, requests/s", 2, [""]),
    ],
)
def test_a_report_is_drawn_of_any_axes(
    out: Path,
    axes: dict[str, list[object]],
    x_title: str,
    num_places: int,
    labels: list[str],
    tmp_path: Path,
) -> None:
    # The cells that the full matrix has run hold what these need.
    experiment = read_experiment(write(tmp_path, axes=axes))
    outcome = gather(experiment, out)
    layout = lay_out(outcome)
    assert layout.x_title == x_title
    assert len(layout.places) == num_places
    assert [series.label for series in layout.series] == labels
    assert len(FigureBuilder(outcome).figures()) == len(TOPICS)


def test_places_ascend_with_the_load(outcome: Outcome) -> None:
    layout = lay_out(outcome)
    loads = [place.position for place in layout.places]
    assert loads == sorted(loads)
    assert [place.label for place in layout.places] == ["1", "0.25"]
    assert loads[1] == pytest.approx(4 * loads[0])


# --- sentences ------------------------------------------------------------------------------


def altered(layout: Layout, name: str, values: Mapping[tuple[int, str], float | None]) -> Layout:
    """Give the points other values of one figure."""
    points = {
        key: dataclasses.replace(
            point,
            figures={
                **point.figures,
                name: None if values[key] is None else (values[key],) * 3,  # type: ignore[dict-item]
            },
        )
        for key, point in layout.points.items()
    }
    return dataclasses.replace(layout, points=points)


def test_a_finding_names_the_best_and_the_worst_where_they_differ_most(outcome: Outcome) -> None:
    layout = lay_out(outcome)
    low, high = (place.text for place in layout.places)
    told = finding(
        altered(layout, "ttft_s_p99", {(0, "1"): 3, (1, "1"): 1, (0, "0.25"): 2, (1, "0.25"): 8}),
        TTFT_P99,
    )
    assert told == f"P99 time to first token at {high}: 2 s with round-robin, 8 s with prefix-aware"
    told = finding(
        altered(
            layout,
            "output_tokens_per_s",
            {(0, "1"): 100, (1, "1"): 400, (0, "0.25"): 90, (1, "0.25"): 100},
        ),
        TOKENS,
    )
    assert (
        told
        == f"Throughput at {low}: 400 tokens/s with prefix-aware, 100 tokens/s with round-robin"
    )


def test_a_finding_says_when_there_is_none(outcome: Outcome) -> None:
    layout = lay_out(outcome)
    keys = layout.points
    low = layout.places[0].text
    alike = altered(layout, "ttft_s_p99", dict.fromkeys(keys, 0.5))
    assert finding(alike, TTFT_P99) == (
        f"P99 time to first token: much the same whatever the placement, 500 ms at {low}"
    )
    absent = altered(layout, "ttft_s_p99", dict.fromkeys(keys))
    assert finding(absent, TTFT_P99) == "P99 time to first token: no values to compare"


def test_how_far_the_objective_is_kept_is_told_by_load(outcome: Outcome) -> None:
    layout = lay_out(outcome)
    low, high = (place.text for place in layout.places)
    kept = {(0, "1"): 0.95, (1, "1"): 1.0, (0, "0.25"): 0.5, (1, "0.25"): 0.9}
    assert kept_finding(altered(layout, "slo_share", kept), KEPT) == (
        f"90% of the requests keep the objective up to {high} with prefix-aware, "
        f"up to {low} with round-robin"
    )
    kept = dict.fromkeys(kept, 0.1)
    assert kept_finding(altered(layout, "slo_share", kept), KEPT) == (
        "90% of the requests keep the objective at no load with round-robin and prefix-aware"
    )


def test_along_any_other_x_each_line_is_compared_with_itself(outcome: Outcome) -> None:
    layout = dataclasses.replace(lay_out(outcome), is_load=False, x_title="block size")
    low, high = (place.text for place in layout.places)
    values = {(0, "1"): 3, (1, "1"): 1, (0, "0.25"): 2, (1, "0.25"): 8}
    told = finding(altered(layout, "ttft_s_p99", values), TTFT_P99)
    assert told == f"P99 time to first token with prefix-aware: 1 s at {low}, 8 s at {high}"
    alike = altered(layout, "ttft_s_p99", dict.fromkeys(layout.points, 0.5))
    assert finding(alike, TTFT_P99) == (
        "P99 time to first token: much the same whatever the block size, 500 ms with round-robin"
    )


def test_distributions_that_are_alike_and_upright_are_drawn_and_named(text: str) -> None:
    """Of the small experiment nearly all tokens come at the same pace under both placements."""
    (part,) = re.findall(r'<figure id="itl">.*?</figure>', text, re.DOTALL)
    drawings = re.findall(r"<svg.*?</svg>", part, re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        names = re.findall(r">(round-robin|prefix-aware)</text>", drawing)
        assert sorted(names) == ["prefix-aware", "round-robin"]
        curves = re.findall(r'<path d="([^"]*)" [^>]*stroke-width: 1.4;', drawing)
        assert len(curves) == 2
        for curve in curves:
            ys = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", curve)]
            assert max(ys) - min(ys) > 140


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ((0.1, 0.1, 0.1, 0.1), "nowhere"),
        ((1.0, 1.0, 1.0, 1.0), "everywhere"),
        ((1.0, 0.9, 0.1, 0.1), "up to b"),
        ((0.1, 0.1, 1.0, 1.0), "from c on"),
        ((0.1, 1.0, 1.0, 0.1), "from b to c"),
        ((0.1, 1.0, 0.1, 0.1), "at b"),
        ((0.1, 0.1, 0.1, 1.0), "from d on"),
        ((1.0, 0.1, 1.0, 0.1), "at a and c"),
    ],
)
def test_where_the_objective_is_kept_is_said_as_it_is(
    outcome: Outcome, kept: tuple[float, ...], text: str
) -> None:
    places = tuple(Place(name, float(index), name) for index, name in enumerate("abcd"))
    layout = lay_out(outcome)
    some = next(iter(layout.points.values()))
    alone = dataclasses.replace(
        layout,
        is_load=False,
        places=places,
        series=layout.series[:1],
        points=dict.fromkeys([(0, place.label) for place in places], some),
    )
    values = {(0, place.label): value for place, value in zip(places, kept, strict=True)}
    told = kept_finding(altered(alone, "slo_share", values), KEPT)
    assert told == f"90% of the requests keep the objective {text} with round-robin"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00042, "0.42 ms"), (0.0123, "12 ms"), (0.99996, "1 s"), (2.345, "2.3 s"), (123.4, "123 s")],
)
def test_times_are_written_with_two_digits_and_a_unit(value: float, text: str) -> None:
    assert seconds(value) == text
