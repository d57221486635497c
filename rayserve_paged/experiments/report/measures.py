"""The figures that a report is about, with their names and units."""

from typing import Final

from rayserve_paged.experiments.report.wording import (
    Measure,
    count,
    percent,
    requests_rate,
    seconds,
    tokens_rate,
)

TTFT_P50: Final = Measure("ttft_s_p50", "Median time to first token", "s", seconds, "low")
TTFT_P99: Final = Measure("ttft_s_p99", "P99 time to first token", "s", seconds, "low")
ITL_P50: Final = Measure("itl_s_p50", "Median time between tokens", "ms", seconds, "low", 1000)
ITL_P99: Final = Measure("itl_s_p99", "P99 time between tokens", "ms", seconds, "low", 1000)
TOKENS: Final = Measure("output_tokens_per_s", "Throughput", "output tokens/s", tokens_rate, "high")
REQUESTS: Final = Measure(
    "requests_per_s", "Requests finished", "requests/s", requests_rate, "high"
)
GOODPUT: Final = Measure("goodput_requests_per_s", "Goodput", "requests/s", requests_rate, "high")
KEPT: Final = Measure("slo_share", "Requests that keep it", "%", percent, "high", 100)
HITS: Final = Measure("hit_rate", "Prompt tokens found in cache", "%", percent, "high", 100)
PREEMPTIONS: Final = Measure("num_preemptions", "Preemptions", "", count, "low")
FAILED: Final = Measure("num_failed", "Requests refused or failed", "", count, "low")
HELD: Final = Measure("held_share_mean", "Mean KV occupancy", "%", percent, None, 100)
HELD_MAX: Final = Measure("held_share_max", "Highest KV occupancy", "%", percent, None, 100)
WASTE: Final = Measure("waste_share_mean", "Mean KV waste", "%", percent, "low", 100)
WAITING: Final = Measure("num_waiting_mean", "Mean queue", "requests", count, "low")
WAITING_MAX: Final = Measure("num_waiting_max", "Longest queue", "requests", count, "low")
BALANCE: Final = Measure(
    "load_max_over_mean",
    "Work of the busiest replica over the mean",
    "",
    lambda v: f"{v:.2f}x",
    "low",
)
DEATHS: Final = Measure("num_deaths", "Deaths", "", count)
RESUMED: Final = Measure("num_resumed", "Requests that went on elsewhere", "", count, "low")
RECOMPUTED: Final = Measure("num_recomputed_tokens", "Tokens computed again", "", count, "low")
PAUSE: Final = Measure("itl_s_max", "Longest time between tokens", "s", seconds, "low")
SLOWEST: Final = Measure("ttft_s_max", "Slowest first token", "s", seconds, "low")
