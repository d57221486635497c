"""`largest` against sorting everything, on values that are hard for a histogram."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_paged.model.token_filters import Scratch, largest

SCRATCH = Scratch(5000)


def naive(values: np.ndarray, weights: np.ndarray | None, target: float) -> list[int]:
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    return sorted(order[: int(np.searchsorted(reached, target)) + 1].tolist())


def found(values: np.ndarray, weights: np.ndarray | None, target: float) -> list[int]:
    return np.flatnonzero(largest(values, weights, target, SCRATCH)).tolist()


def shaped(shape: str, rng: np.random.Generator) -> np.ndarray:
    count = int(rng.integers(1, 5000))
    values = rng.standard_normal(count)
    match shape:
        case "ties":
            return np.round(values)
        case "constant":
            return np.full(count, -3.5)
        case "clustered":
            return -1e6 * rng.integers(0, 3, count) + values * 1e-9
        case "geometric":
            return -(10.0 ** rng.integers(-300, 300, count))
        case "denormal":
            return -rng.integers(0, 9, count) * 5e-324
        case _:
            return values


@pytest.mark.parametrize(
    "shape", ["normal", "ties", "constant", "clustered", "geometric", "denormal"]
)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_the_fewest_largest_values_are_found(shape: str, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    values = shaped(shape, rng)
    count = max(1, int(share * len(values)))
    assert found(values, None, count) == naive(values, None, count)
    # Whole numbers, so that sums are exact in any order.
    weights = rng.integers(0, 9, len(values)).astype(float)
    target = max(1.0, round(share * float(weights.sum())))
    assert found(values, weights, target) == naive(values, weights, target)


def test_all_are_kept_where_the_target_is_out_of_reach() -> None:
    values = np.arange(3000.0)
    assert found(values, None, 3001) == list(range(3000))
    assert found(values, np.full(3000, 0.5), 1500.5) == list(range(3000))
