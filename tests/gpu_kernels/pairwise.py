"""Few cases that hold every pair of choices of two different axes."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]
_Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(axes: Mapping[str, Sequence[Any]], tries: int = 40, seed: int = 1) -> list[Case]:
    """Choose cases greedily: each is the best of `tries` at covering pairs not yet covered.

    Args:
        axes: Choices of each axis.
        tries: More make fewer cases.
        seed: The same one gives the same cases.
    """
    rng = random.Random(seed)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(axes, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    cases: list[Case] = []
    while open_pairs:
        # Starting from an open pair, each case covers at least one.
        start = min(open_pairs)
        drawn = [
            {axis: rng.randrange(len(choices)) for axis, choices in axes.items()} | dict(start)
            for _ in range(tries)
        ]
        best = max(drawn, key=lambda case: len(open_pairs & _pairs(case)))
        open_pairs -= _pairs(best)
        cases.append({axis: axes[axis][index] for axis, index in best.items()})
    return cases


def product(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every case."""
    return [dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values())]


def _pairs(case: Mapping[str, int]) -> set[_Pair]:
    return set(itertools.combinations(case.items(), 2))
