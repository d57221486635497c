"""min_p, top_k and top_p: which tokens of one row remain, without sorting the vocabulary."""

import math

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.sampling_params import SamplingParams

FloatArray = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_NUM_BINS = 2048
_NUM_SORTED = 512
"""So many values are sorted; more are first narrowed down by a histogram."""

_MIN_RANGE = 1e-290
"""Values this close are not told apart by bins; they sort fast."""


class Scratch:
    """Memory for the rows of one step, used again and again.

    Memory of a vocabulary's size, taken afresh, comes from the system page by page, which takes
    longer than the arithmetic on it.

    Args:
        vocab_size: Most elements that are needed of each array.
    """

    def __init__(self, vocab_size: int) -> None:
        self.weights: FloatArray = np.empty(vocab_size)
        self.floats: FloatArray = np.empty(vocab_size)
        self.bins: Indices = np.empty(vocab_size, np.intp)


def is_filtered(params: SamplingParams) -> bool:
    """Return whether any token is to be dropped for being too unlikely."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def weigh_likely(scaled: FloatArray, params: SamplingParams, scratch: Scratch) -> None:
    """Keep what min_p keeps, of these the top_k most likely, and of these top_p's share.

    Of equally likely tokens the lower id comes first.

    Args:
        scaled: float64 [vocab_size], log-probabilities up to a constant, their maximum 0. Becomes
            the weights: the probability of each kept token in units of that of the most likely
            one, 0 for the others.
        params: Of the row.
        scratch: For vocabularies of this size.
    """
    # Of the tokens that are left: their ids, None for all, and their log-probabilities.
    ids: Indices | None = None
    values = scaled
    if params.min_p > 0:
        ids = np.flatnonzero(scaled >= math.log(params.min_p))
        values = scaled[ids]
    elif scaled.min() == -np.inf:
        ids = np.flatnonzero(scaled > -np.inf)
        values = scaled[ids]
    if 0 < params.top_k < len(values):
        kept = np.flatnonzero(largest(values, None, params.top_k, scratch))
        ids = kept if ids is None else ids[kept]
        values = values[kept]
    weights = np.exp(values, out=scratch.weights[: len(values)])
    if params.top_p < 1.0:
        weights *= _nucleus(values, weights, params.top_p, scratch)
    if ids is None:
        scaled[:] = weights
    else:
        scaled.fill(0.0)
        scaled[ids] = weights


def _nucleus(
    values: FloatArray, weights: FloatArray, top_p: float, scratch: Scratch
) -> npt.NDArray[np.bool_]:
    total = weights.sum()
    # Tokens of at most this weight have at most 1 - top_p of the total between them: the others
    # reach top_p without them. The last factor covers for rounding.
    likely: npt.NDArray[np.bool_] = weights > (1.0 - top_p) * total / len(weights) * (1.0 - 1e-9)
    # To take out a large part of them would take longer than it saves.
    if 4 * np.count_nonzero(likely) > len(likely):
        return largest(values, weights, top_p * total, scratch)
    candidates = np.flatnonzero(likely)
    likely[candidates] = largest(values[candidates], weights[candidates], top_p * total, scratch)
    return likely


def largest(
    values: FloatArray, weights: FloatArray | None, target: float, scratch: Scratch
) -> npt.NDArray[np.bool_]:
    """Find the fewest of the largest values whose weights reach a target.

    A histogram tells in which bin the target is reached: the bins above it are kept, those below
    it dropped, and the bin itself is divided again or sorted.

    Args:
        values: float64 [n], finite; of equal ones the first are taken.
        weights: float64 [n], none negative; None for 1 each.
        target: Above 0. Where the weights do not reach it, all values are kept.
        scratch: Of at least n elements.

    Returns:
        bool [n], which they are.
    """
    kept = np.zeros(len(values), np.bool_)
    # Of the values in the bin: their indices, None for all.
    places: Indices | None = None
    while len(values) > _NUM_SORTED:
        high, low = values.max(), values.min()
        if high - low < _MIN_RANGE:
            break
        floats = np.subtract(high, values, out=scratch.floats[: len(values)])
        floats *= _NUM_BINS / (high - low)
        bins = scratch.bins[: len(values)]
        np.copyto(bins, floats, casting="unsafe")
        sums = np.cumsum(np.bincount(bins, weights))
        border = min(int(np.searchsorted(sums, target)), len(sums) - 1)
        above, within = bins < border, np.flatnonzero(bins == border)
        if places is None:
            kept, places = above, within
        else:
            kept[places[above]] = True
            places = places[within]
        target -= float(sums[border - 1]) if border else 0.0
        values = values[within]
        weights = None if weights is None else weights[within]
    order = np.argsort(-values, kind="stable")
    reached = np.arange(1, len(order) + 1) if weights is None else np.cumsum(weights[order])
    order = order[: int(np.searchsorted(reached, target)) + 1]
    kept[order if places is None else places[order]] = True
    return kept
