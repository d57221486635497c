"""Checks of single values that users give: integers, numbers and token ids within their bounds."""

from collections.abc import Sequence
from typing import cast

from rayserve_paged.core.errors import InvalidInputError


def check_integer(
    field: str, value: object, accepted: str, low: int, high: int | None = None
) -> int:
    """Return `value` as an integer from `low` to `high`, None for no bound.

    Raises:
        InvalidInputError: It is none; it names the field, the value and what is `accepted`.
    """
    # bool is an int to Python and never one to a user.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(field, value, accepted)
    if value < low or (high is not None and value > high):
        raise InvalidInputError(field, value, accepted)
    return value


def check_number(field: str, value: object, accepted: str, low: float, high: float) -> float:
    """Return `value` as a number from `low` to `high`.

    Raises:
        InvalidInputError: It is none; it names the field, the value and what is `accepted`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInputError(field, value, accepted)
    # Written so that NaN fails: every comparison with it is false.
    if not low <= value <= high:
        raise InvalidInputError(field, value, accepted)
    return float(value)


def check_token_ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    """Raise InvalidInputError for the first id that is not an integer in [0, vocab_size)."""
    # Three passes in C over a long prompt; what they do not vouch for is looked at one by one.
    if set(map(type, ids)) <= {int}:
        integers = cast("Sequence[int]", ids)
        if not integers or (min(integers) >= 0 and max(integers) < vocab_size):
            return
    accepted = f"integers from 0 to {vocab_size - 1}"
    for token_id in ids:
        check_integer(field, token_id, accepted, 0, vocab_size - 1)
