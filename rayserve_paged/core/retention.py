"""How long requests want their blocks to stay cached: ranges of tokens, priorities and durations.

What is wanted of one block falls over time, and is written as *steps*:

    ((10.0, 80), (60.0, 50))    80 for 10 seconds, then 50 until a minute is over, then the default
    ()                          the default priority at all times

The last blocks of a chain are evicted first, whatever is asked for: a block that is kept is of no
use without those that precede it. So each block is given the highest of what it and all that
follow it in its chain are to have.
"""

import dataclasses
import math
from functools import reduce
from typing import Final

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.field_checks import check_integer, check_number

DEFAULT_PRIORITY: Final = 35
MAX_PRIORITY: Final = 100
MAX_RANGES: Final = 64
MAX_DURATION_S: Final = 1e9

Steps = tuple[tuple[float, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RetentionRange:
    """How long the KV of some tokens of a request is to stay cached once nobody holds it.

    Args:
        start: First token, from 0.
        end: First token after them, in the prompt; None for all that follow, the prompt's and
            those of the outputs.
        priority: From 0 to 100. Blocks of a lower one are evicted first.
        duration_s: Seconds from the release of a block after which it has the default priority
            again; None for as long as it is cached.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None

    @property
    def steps(self) -> Steps:
        """What it asks for, in seconds from the release."""
        if self.priority == DEFAULT_PRIORITY:
            return ()
        return ((math.inf if self.duration_s is None else self.duration_s, self.priority),)


def check_retention(ranges: object, num_prompt: int) -> None:
    """Check a request's ranges against its prompt.

    Args:
        ranges: As the request holds them.
        num_prompt: Tokens of the prompt.

    Raises:
        InvalidInputError: They are no tuple of ranges in the order of their tokens, two of them
            overlap, one is empty or ends behind the prompt, or a field of one is out of range.
    """
    accepted = f"a tuple of at most {MAX_RANGES} RetentionRange"
    if not isinstance(ranges, tuple) or len(ranges) > MAX_RANGES:
        raise InvalidInputError("retention", ranges, accepted)
    end = 0
    for index, each in enumerate(ranges):
        if not isinstance(each, RetentionRange):
            raise InvalidInputError("retention", ranges, accepted)
        name = f"retention[{index}]"
        accepted = (
            f"an integer from {end} to {num_prompt - 1}: ranges follow one another, do not "
            "overlap and begin in the prompt"
        )
        check_integer(f"{name}.start", each.start, accepted, end, num_prompt - 1)
        end = num_prompt
        if each.end is not None:
            accepted = f"an integer from {each.start + 1} to {num_prompt}, or None"
            check_integer(f"{name}.end", each.end, accepted, each.start + 1, num_prompt)
            end = each.end
        accepted = f"an integer from 0 to {MAX_PRIORITY}"
        check_integer(f"{name}.priority", each.priority, accepted, 0, MAX_PRIORITY)
        _check_duration(f"{name}.duration_s", each.duration_s)


def _check_duration(field: str, value: object) -> None:
    accepted = f"a number of seconds above 0 and up to {MAX_DURATION_S:g}, or None"
    if value is not None and check_number(field, value, accepted, 0.0, MAX_DURATION_S) == 0.0:
        raise InvalidInputError(field, value, accepted)


def highest(a: Steps, b: Steps) -> Steps:
    """Return at each time the higher of two priorities."""
    if a == b:
        return a
    steps: list[tuple[float, int]] = []
    following = DEFAULT_PRIORITY
    for until in sorted({until for until, _priority in (*a, *b)}, reverse=True):
        priority = max(_priority_before(a, until), _priority_before(b, until))
        if priority != following:
            steps.append((until, priority))
            following = priority
    return tuple(reversed(steps))


def _priority_before(steps: Steps, until: float) -> int:
    return next((priority for end, priority in steps if end >= until), DEFAULT_PRIORITY)


class RetentionPlan:
    """What a request asks for each block of its sequences.

    Args:
        ranges: Checked.
        block_size: Tokens per block.
    """

    def __init__(self, ranges: tuple[RetentionRange, ...], block_size: int) -> None:
        self._ranges = ranges
        self._block_size = block_size

    def at(self, place: int) -> Steps:
        """Return what the tokens of one block ask for: the highest of them, in seconds from its
        release. Tokens of no range ask for the default.
        """
        start, end = place * self._block_size, (place + 1) * self._block_size
        num_named = 0
        asked: list[Steps] = []
        for each in self._ranges:
            last = end if each.end is None else min(each.end, end)
            num_tokens = last - max(each.start, start)
            if num_tokens > 0:
                num_named += num_tokens
                asked.append(each.steps)
        if num_named < self._block_size:
            asked.append(())
        return reduce(highest, asked)
