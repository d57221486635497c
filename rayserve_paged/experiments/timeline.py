"""What a run's replicas were like over time, all of them together."""

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from rayserve_paged.experiments.cell_result import CellResult

FloatArray = npt.NDArray[np.float64]

_SUMMED: Final = ("num_running", "num_waiting", "num_held_blocks", "num_cached_blocks")
_OPEN: Final = "num_open_slots"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Sums and shares over all replicas; each value holds until the next.

    Args:
        times_s: float64 [n], ascending; the last is when the run ended.
        values: By name float64 [n].
    """

    times_s: FloatArray
    values: Mapping[str, FloatArray]

    def mean(self, name: str) -> float | None:
        """Return the mean over time; None where there was none."""
        weights = np.diff(self.times_s)
        total = float(weights.sum()) if len(weights) else 0.0
        return float(self.values[name][:-1] @ weights) / total if total else None

    def peak(self, name: str) -> float | None:
        """Return the highest value; None where there is none."""
        return float(self.values[name].max()) if len(self.times_s) else None

    def thinned(self, name: str, num_points: int) -> tuple[FloatArray, FloatArray]:
        """Return times and values for a picture: means over equal spans where there are many."""
        times, values = self.times_s, self.values[name]
        if len(times) <= num_points:
            return times, values
        edges = np.linspace(times[0], times[-1], num_points + 1)
        area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
        means: FloatArray = np.diff(np.interp(edges, times, area)) / np.diff(edges)
        return edges[:-1], means


def timeline(result: CellResult) -> Timeline:
    """Add the replicas' states up, from the first arrival to the last end."""
    loads = result.loads
    begin_s = float(result.requests["arrival_s"].to_numpy().min(initial=0.0))
    end_s = float(result.requests["end_s"].to_numpy().max(initial=0.0))
    ticks = loads["time_s"].unique().to_numpy()
    times = np.concatenate([[begin_s], ticks[(ticks > begin_s) & (ticks < end_s)], [end_s]])
    totals = {name: np.zeros(len(times)) for name in (*_SUMMED, _OPEN)}
    for _key, mine in loads.group_by("replica", maintain_order=True):
        # The row that holds at each time; none before the first, when a replica has nothing.
        index = np.searchsorted(mine["time_s"].to_numpy(), times, side="right") - 1
        for name, total in totals.items():
            column = mine[name].to_numpy()
            total += np.where(index >= 0, column[np.maximum(index, 0)], 0)
    num_blocks = int(str(result.facts["num_blocks"])) * int(str(result.facts["num_replicas"]))
    slots = totals["num_held_blocks"] * int(str(result.facts["block_size"]))
    shares = {
        "held_share": totals["num_held_blocks"] / num_blocks,
        "cached_share": totals["num_cached_blocks"] / num_blocks,
        "waste_share": np.divide(totals[_OPEN], slots, out=np.zeros(len(times)), where=slots > 0),
    }
    return Timeline(times, totals | shares)


def tokens_by_replica(result: CellResult) -> FloatArray:
    """Return the prompt and output tokens of the requests that each replica served."""
    served = result.requests.filter(pl.col("replica").is_not_null())
    tokens = (served["num_prompt_tokens"] + served["num_output_tokens"]).to_numpy()
    num_replicas = int(str(result.facts["num_replicas"]))
    sums = np.bincount(
        served["replica"].to_numpy(), weights=tokens.astype(np.float64), minlength=num_replicas
    )
    return np.asarray(sums, np.float64)
