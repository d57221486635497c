"""Chooses the next token of each row of a step; no row's result depends on another row."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.model.beam_candidates import beam_candidates
from rayserve_paged.model.logit_processors import process_logits
from rayserve_paged.model.philox import uniform_draws
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.token_filters import Scratch, is_filtered, largest, weigh_likely

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]

_CHUNK_ELEMENTS = 1 << 18
"""Logits that are held in float64 at once, at least one row: 2 MiB, which stay in a cache."""

_SUM_WIDTH = 256
"""Tokens whose weights are added up before their running sum is formed."""

_NO_TOKEN = "the logits hold NaN or infinity, or allow no token"


class Sampler:
    """Greedy and random choice over a batch of logits.

    A random choice depends on the row's logits, parameters and counts and on (seed, sibling,
    output position) alone: the draw is Philox of these, mapped through the inverse cumulative
    distribution in the order of token ids. First the logits are edited (bias, penalties, what
    grammars, allowed and withheld ids leave), then temperature scales them, then min_p drops
    tokens, then top_k keeps the k most likely of the rest, then top_p the fewest of these whose
    share reaches it; of equally likely tokens the lower id is kept and greedy picks it.
    Log-probabilities are those of the model, before all of this.
    """

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[IntArray, dict[int, TokenLogprobs], dict[int, str]]:
        """Choose one token for each row.

        Args:
            logits: fp32 [num_rows, vocab_size], on any device; not modified.
            rows: What each row of the logits is for.

        Returns:
            int32 [num_rows] token ids; log-probabilities by row index, for rows that ask for
            them, and of beams their candidates; reasons by row index, for rows without a choice.
            The token id of a row with a reason, or of a beam, means nothing.
        """
        num_rows, vocab_size = logits.shape
        assert num_rows == len(rows)
        errors = {
            index: reason
            for index, row in enumerate(rows)
            if (reason := row.refusal(vocab_size)) is not None
        }
        best, greedy_ids = logits.max(dim=-1)
        finite = torch.isfinite(best).cpu().numpy()
        for index in np.flatnonzero(~finite).tolist():
            errors.setdefault(index, _NO_TOKEN)
        token_ids = greedy_ids.cpu().numpy().astype(np.int32)

        random = [
            index
            for index, row in enumerate(rows)
            if row.params.temperature > 0 and index not in errors
        ]
        edited = [
            index
            for index, row in enumerate(rows)
            if row.params.temperature == 0
            and row.params.beam_width is None
            and row.is_edited
            and index not in errors
        ]
        for part, values in _edited_logits(logits, edited, rows, errors):
            token_ids[part] = values.argmax(axis=1)
        scratch = Scratch(vocab_size)
        for part, values in _edited_logits(logits, random, rows, errors):
            token_ids[part] = _draw(values, [rows[index] for index in part], scratch)
        reported = [
            index
            for index, row in enumerate(rows)
            if (row.params.logprobs is not None or row.params.beam_width is not None)
            and index not in errors
        ]
        logprobs: dict[int, TokenLogprobs] = {}
        for part, values in _chunks(logits, reported):
            for index, raw in zip(part, values, strict=True):
                if rows[index].params.beam_width is not None:
                    logprobs[index] = beam_candidates(raw, rows[index], scratch)
                    continue
                count = rows[index].params.logprobs
                logprobs[index] = token_logprobs(raw, int(token_ids[index]), count, scratch)
        return token_ids, logprobs, errors


def _edited_logits(
    logits: torch.Tensor, indices: list[int], rows: Sequence[SamplingRow], errors: dict[int, str]
) -> Iterator[tuple[list[int], FloatArray]]:
    """Yield what tokens are chosen from, for a few of the rows at a time.

    Args:
        logits: fp32 [num_rows, vocab_size].
        indices: Rows that are wanted; their logits hold neither NaN nor +inf.
        rows: What each row of the logits is for.
        errors: Where to note rows without a token to choose, which are left out.

    Yields:
        Row indices and their edited logits, float64 [n, vocab_size] with a finite maximum.
    """
    for part, values in _chunks(logits, indices):
        process_logits(values, [rows[index] for index in part])
        alive = values.max(axis=1) > -np.inf
        if alive.all():
            yield part, values
            continue
        errors.update((part[index], _NO_TOKEN) for index in np.flatnonzero(~alive).tolist())
        if alive.any():
            yield [part[index] for index in np.flatnonzero(alive).tolist()], values[alive]


def _chunks(logits: torch.Tensor, indices: list[int]) -> Iterator[tuple[list[int], FloatArray]]:
    """Yield row indices and their logits, float64 [n, vocab_size], which the next are written
    over.
    """
    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    buffer = np.empty((min(size, len(indices)), logits.shape[1]))
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        first, end = part[0], part[-1] + 1
        # A slice is no copy.
        wanted = logits[first:end] if len(part) == end - first else logits[part]
        values = buffer[: len(part)]
        np.copyto(values, wanted.cpu().numpy())
        yield part, values


def _draw(logits: FloatArray, rows: Sequence[SamplingRow], scratch: Scratch) -> IntArray:
    """Choose at random.

    Args:
        logits: float64 [n, vocab_size], finite or -inf, with a finite maximum; overwritten.
        rows: What each row of the logits is for.
        scratch: For vocabularies of this size.

    Returns:
        int32 [n].
    """
    logits -= logits.max(axis=1, keepdims=True)
    # A tiny temperature may overflow to -inf, which is a probability of 0 and meant.
    with np.errstate(over="ignore"):
        logits /= np.array([[row.params.temperature] for row in rows])
    for scaled, row in zip(logits, rows, strict=True):
        if is_filtered(row.params):
            weigh_likely(scaled, row.params, scratch)
        else:
            np.exp(scaled, out=scaled)
    draws = uniform_draws(
        np.array([row.params.seed for row in rows], dtype=np.uint64),
        np.array([row.sibling for row in rows], dtype=np.uint64),
        np.array([row.output_position for row in rows], dtype=np.uint64),
    )
    return _invert(logits, draws)


def _invert(weights: FloatArray, draws: FloatArray) -> IntArray:
    """Inverse of the cumulative distribution, in the order of token ids.

    The running sum over groups of tokens tells in which group a draw falls, so that only this
    one is summed token by token.

    Args:
        weights: float64 [n, vocab_size], none negative, their sum positive.
        draws: float64 [n], in [0, 1).

    Returns:
        int32 [n], each of positive weight.
    """
    n, vocab_size = weights.shape
    width = min(_SUM_WIDTH, vocab_size)
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, vocab_size, width), axis=1), axis=1)
    # A draw below 1 stays below the total after rounding, so that some group goes beyond it.
    targets = draws * sums[:, -1]
    groups = np.count_nonzero(sums <= targets[:, None], axis=1)
    before = np.where(groups > 0, sums[np.arange(n), groups - 1], 0.0)
    ids = groups[:, None] * width + np.arange(width)
    inner = weights[np.arange(n)[:, None], np.minimum(ids, vocab_size - 1)]
    inner[ids >= vocab_size] = 0.0
    reached = np.cumsum(inner, axis=1) + before[:, None]
    offsets = np.count_nonzero(reached <= targets[:, None], axis=1)
    # The sums of a group and of its tokens are rounded apart: the draw may lie beyond the latter.
    last = width - 1 - np.argmax(inner[:, ::-1] > 0, axis=1)
    chosen: IntArray = (groups * width + np.minimum(offsets, last)).astype(np.int32)
    return chosen


def token_logprobs(
    logits: FloatArray, token_id: int, count: int | None, scratch: Scratch
) -> TokenLogprobs:
    """Return the log-probabilities of one token and of the `count` most likely ones.

    Args:
        logits: float64 [vocab_size], finite or -inf, with a finite maximum; overwritten.
        token_id: The token.
        count: Tokens to report besides it.
        scratch: For vocabularies of this size.
    """
    logits -= logits.max()
    total = np.log(np.exp(logits, out=scratch.weights[: len(logits)]).sum())
    top = np.zeros(0, np.intp)
    if count:
        possible = np.flatnonzero(logits > -np.inf)
        values = logits[possible]
        top = possible[largest(values, None, count, scratch)]
        top = top[np.argsort(-logits[top], kind="stable")]
    return TokenLogprobs(
        logprob=float(logits[token_id] - total),
        top=tuple((int(index), float(logits[index] - total)) for index in top),
    )
