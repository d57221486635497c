"""The objective that a deployment is sized for."""

from __future__ import annotations

import dataclasses
import math

from rayserve_paged.core.errors import InvalidInputError

_ACCEPTED = "bounds in seconds such as ttft=2.0,itl=0.05, or one of the two"


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """Bounds on the 99th percentiles; None where anything will do.

    Args:
        ttft_s: Of the times from a request's arrival to its first token.
        itl_s: Of the times from a token to the next of its stream.
    """

    ttft_s: float | None
    itl_s: float | None

    def __str__(self) -> str:
        """Write it as `read_slo` reads it."""
        bounds = (("ttft", self.ttft_s), ("itl", self.itl_s))
        return ",".join(f"{name}={bound:g}" for name, bound in bounds if bound is not None)

    def is_met_by(self, ttft_s: float | None, itl_s: float | None) -> bool:
        """Tell whether these percentiles keep the bounds; None is that of no time at all."""
        pairs = ((ttft_s, self.ttft_s), (itl_s, self.itl_s))
        return all(time is None or bound is None or time <= bound for time, bound in pairs)


def read_slo(text: str) -> Slo:
    """Read an objective, such as `ttft=2.0,itl=0.05`.

    Raises:
        InvalidInputError: It is none.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in ("ttft", "itl") or name in bounds:
            raise InvalidInputError("--slo", text, _ACCEPTED)
        try:
            bounds[name] = float(value)
        except ValueError as error:
            raise InvalidInputError("--slo", text, _ACCEPTED) from error
        if not 0 < bounds[name] < math.inf:
            raise InvalidInputError("--slo", text, f"{_ACCEPTED}, above 0")
    return Slo(bounds.get("ttft"), bounds.get("itl"))
