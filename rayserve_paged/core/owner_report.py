"""What one owner of a deployment, such as an ingress, tells the others by way of the controller."""

import dataclasses

from rayserve_paged.core.running_request import RunningRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnerReport:
    """The requests of one owner; each report replaces the one before.

    Args:
        owner: Who reports.
        running: Its live requests.
        num_output_tokens: Output tokens that it was given since it began.
        num_finished: Requests that ended well since then.
        num_failed: Requests that did not.
        ttft_s: Times to the first token of late, in seconds.
        itl_s: Times between tokens of late, in seconds.
    """

    owner: str
    running: tuple[RunningRequest, ...]
    num_output_tokens: int
    num_finished: int
    num_failed: int
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]


class OwnerReports:
    """The last report of each owner, until it is too old."""

    def __init__(self, kept_s: float) -> None:
        """Keep nothing yet.

        Args:
            kept_s: An owner that has not reported for this long is gone.
        """
        self._kept_s = kept_s
        self._reports: dict[str, tuple[float, OwnerReport]] = {}

    def put(self, report: OwnerReport, now: float) -> None:
        """Take in a report."""
        self._reports[report.owner] = now, report

    def latest(self, now: float) -> tuple[OwnerReport, ...]:
        """Return the last report of each owner that is there."""
        old = [owner for owner, (at, _) in self._reports.items() if at + self._kept_s < now]
        for owner in old:
            del self._reports[owner]
        return tuple(report for _, report in self._reports.values())
