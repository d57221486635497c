"""Puts the report together."""

import importlib.resources
from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import rayserve_paged
from rayserve_paged.experiments import report
from rayserve_paged.experiments.outcome import Outcome
from rayserve_paged.experiments.report.death_figures import death_answers, death_figures
from rayserve_paged.experiments.report.figures import FigureBuilder
from rayserve_paged.experiments.report.layout import Series
from rayserve_paged.experiments.report.line import NUM_COLORS
from rayserve_paged.experiments.report.measures import (
    GOODPUT,
    HITS,
    ITL_P99,
    KEPT,
    TOKENS,
    TTFT_P50,
    TTFT_P99,
)
from rayserve_paged.experiments.report.panels import MARKERS
from rayserve_paged.experiments.report.wording import finding, kept_finding, seconds

_GLYPHS = dict(zip(MARKERS, "●■▲◆▼✚✖⬟", strict=True))


def report_page(outcome: Outcome) -> str:
    """Return the report as HTML, whole in itself."""
    builder = FigureBuilder(outcome)
    layout, experiment = builder.layout, outcome.experiment
    figures = [
        {
            "name": part.name,
            "topic": part.topic,
            "finding": part.finding,
            "note": part.note,
            "panels": [(caption, Markup(svg)) for caption, svg in part.panels],
            "table": part.table,
        }
        for part in (*death_figures(builder), *builder.figures())
    ]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = importlib.resources.files(report).joinpath("page.html.j2").read_text("utf-8")
    return environment.from_string(template).render(
        title=experiment.title,
        question=experiment.question,
        answers=[
            kept_finding(layout, KEPT),
            finding(layout, TTFT_P99),
            *(death_answers(builder) or [finding(layout, TOKENS)]),
        ],
        facts=_facts(outcome),
        series=[
            (_color(s), _GLYPHS[MARKERS[s.index % len(MARKERS)]], s.label)
            for s in layout.series
            if s.label
        ],
        figures=figures,
        overview=builder.table([TTFT_P50, TTFT_P99, ITL_P99, TOKENS, GOODPUT, KEPT, HITS]),
        note_on_panels=_note_on_panels(outcome, builder),
        version=rayserve_paged.__version__,
    )


def _color(series: Series) -> str:
    return f"c{series.index % NUM_COLORS + 1:02x}"


def _facts(outcome: Outcome) -> Sequence[str]:
    experiment = outcome.experiment
    modes = sorted({cell.config.mode for cell in experiment.cells})
    num_requests = sum(len(result.requests) for result in outcome.results)
    words = {"simulate": "simulated", "live": "live"}
    facts = [
        f"{len(experiment.cells)} runs, {' and '.join(words[mode] for mode in modes)}",
        f"{num_requests:,} requests",
    ]
    if len(experiment.seeds) > 1:
        facts.append(f"{len(experiment.seeds)} seeds; bands span them")
    if experiment.slo.ttft_s is not None:
        facts.append(f"objective: first token within {seconds(experiment.slo.ttft_s)}")
    if experiment.slo.itl_s is not None:
        facts.append(f"objective: {seconds(experiment.slo.itl_s)} from token to token")
    return facts


def _note_on_panels(outcome: Outcome, builder: FigureBuilder) -> str:
    layout = builder.layout
    notes = []
    if len(layout.shown_places) < len(layout.places):
        shown, total = len(layout.shown_places), len(layout.places)
        notes.append(f"{shown} of {total} values are drawn; the tables have all")
    if len(outcome.experiment.seeds) > 1:
        notes.append(f"of seed {outcome.experiment.seeds[0]}")
    return "; ".join(notes)
