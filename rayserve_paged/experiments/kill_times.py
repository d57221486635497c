"""When a killed process was missed, replaced, and its streams went on."""

import dataclasses
import statistics


@dataclasses.dataclass(slots=True)
class KillTimes:
    """One kill of live chaos, in seconds since it.

    Args:
        what: The signal and its victim, for a person.
        at: When, on the monotonic clock.
        num_hit: Requests that the victim's replica served.
        detect_s: When the controller had given the replica up; None where it has not yet. Of a
            controller, when the next one answered.
        restart_s: When the next life had registered; None as above.
        continue_s: When each of the requests had its next token, and of a controller, when it knew
            all replicas again. Requests whose last tokens were on their way already are left out.
    """

    what: str
    at: float
    num_hit: int
    detect_s: float | None = None
    restart_s: float | None = None
    continue_s: list[float] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        parts = [self.what]
        if self.detect_s is not None:
            parts.append(f"noticed after {self.detect_s:.2f} s")
        if self.restart_s is not None:
            parts.append(f"started again after {self.restart_s:.2f} s")
        if self.continue_s:
            parts.append(
                f"{len(self.continue_s)} went on after {statistics.median(self.continue_s):.2f} s "
                f"(the last after {max(self.continue_s):.2f} s)"
            )
        return ", ".join(parts)
