"""The figures of a simulation that fit on a screen."""

import numpy as np

from rayserve_paged.core.request import FinishReason
from rayserve_paged.sim.report import FINISHES, FloatArray, SimReport

PERCENTILES = (50, 90, 99)

Figures = dict[str, float | int | None]


def summarize(report: SimReport) -> dict[str, float | int | Figures | None]:
    """Return counts, rates and the distributions of times; None where there is no value."""
    requests = report.requests
    num_ended = len(requests.number)
    ended_well = np.isin(
        requests.finish, [FINISHES.index(FinishReason.LENGTH), FINISHES.index(FinishReason.STOP)]
    )
    gaps = report.token_gaps_s
    itl: Figures = {"mean": gaps.mean}
    itl |= {f"p{percent}": gaps.percentile(percent) for percent in PERCENTILES}
    span_s = report.end_s - float(requests.arrival_s.min()) if num_ended else 0.0
    return {
        "num_finished": int(ended_well.sum()),
        "num_failed": num_ended - int(ended_well.sum()),
        "simulated_s": report.end_s,
        "num_prompt_tokens": int(requests.num_prompt_tokens.sum()),
        "num_output_tokens": report.num_output_tokens,
        "output_tokens_per_s": report.output_tokens_per_s,
        "requests_per_s": int(ended_well.sum()) / span_s if span_s else 0.0,
        "token_hit_rate": report.token_hit_rate,
        "ttft_s": _distribution(requests.ttft_s),
        "itl_s": itl,
        "e2e_s": _distribution(requests.e2e_s[ended_well]),
        "num_preemptions": int(report.replicas.num_preemptions.sum()),
        "num_steps": int(report.replicas.num_steps.sum()),
        "busy_share": _busy_share(report),
        "num_replicas_used": int((report.replicas.num_plans > 0).sum()),
        "num_events": report.num_events,
    }


def _distribution(values: FloatArray) -> Figures:
    values = values[~np.isnan(values)]
    figures: Figures = dict.fromkeys(["mean", *(f"p{percent}" for percent in PERCENTILES)])
    if len(values):
        figures["mean"] = float(values.mean())
        figures |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return figures


def _busy_share(report: SimReport) -> float:
    """Return the share of the replicas' time in which a step ran."""
    if not report.end_s:
        return 0.0
    return float(report.replicas.busy_s.mean()) / report.end_s
