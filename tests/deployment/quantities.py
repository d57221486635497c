"""Quantities of Kubernetes: `500m`, `16Gi`, `2`."""

import re
from fractions import Fraction

_SUFFIXES = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-zA-Z]{0,2})")


def amount(quantity: object) -> Fraction:
    """Return how much a quantity is.

    Raises:
        ValueError: It is none.
    """
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None or found[2] not in _SUFFIXES or isinstance(quantity, bool):
        raise ValueError(f"{quantity!r} is no quantity such as 500m, 2 or 16Gi")
    return Fraction(found[1]) * _SUFFIXES[found[2]]
