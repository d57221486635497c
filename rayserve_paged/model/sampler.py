"""Chooses the next token of each row of a step; no row's result depends on another row."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rayserve_paged.core.messages import TokenLogprobs
from rayserve_paged.core.request import SamplingParams
from rayserve_paged.model.philox import uniform_draws

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]

_MAX_CHUNK_ELEMENTS = 1 << 22
"""Bounds the float64 copies of a step's logits to 32 MiB each."""

_NUM_CANDIDATES = 1024
"""Most likely tokens that are sorted first for top_p; all are when they do not suffice."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingRow:
    """Whose logits a row holds.

    Args:
        params: Of the request; `seed` is set where `temperature` is above 0.
        output_position: Index of the token to choose among the output tokens, from 0.
        eos_token_ids: The model's end-of-sequence ids.
    """

    params: SamplingParams
    output_position: int
    eos_token_ids: tuple[int, ...] = ()

    def masked_ids(self) -> tuple[int, ...]:
        """Ids that would end the output before `min_tokens` and may not be chosen yet."""
        params = self.params
        if self.output_position + 1 >= params.min_tokens:
            return ()
        eos = () if params.ignore_eos else self.eos_token_ids
        return (*params.stop_token_ids, *eos)


class Sampler:
    """Greedy and random choice over a batch of logits.

    A random choice depends on the row's logits and parameters and on (seed, sibling, output
    position) alone: the draw is Philox of these, mapped through the inverse cumulative
    distribution in the order of token ids. temperature scales the logits, then top_k keeps the k
    most likely tokens, then top_p the fewest of these whose share reaches it; of equally likely
    tokens the lower id is kept and greedy picks it. Log-probabilities are those of the model:
    before masking, temperature, top_k and top_p.
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
            them; reasons by row index, for rows without a choice. The token id of a row with a
            reason means nothing.
        """
        num_rows, vocab_size = logits.shape
        assert num_rows == len(rows)
        errors = {
            index: reason
            for index, row in enumerate(rows)
            if (reason := _refusal(row, vocab_size)) is not None
        }
        masked = _mask(logits, rows, errors)
        best, greedy_ids = masked.max(dim=-1)
        finite = torch.isfinite(best).cpu().numpy()
        for index in np.flatnonzero(~finite).tolist():
            errors.setdefault(index, "the logits hold NaN or infinity, or allow no token")
        token_ids = greedy_ids.cpu().numpy().astype(np.int32)

        random = [
            index
            for index, row in enumerate(rows)
            if row.params.temperature > 0 and index not in errors
        ]
        chunk = max(1, _MAX_CHUNK_ELEMENTS // vocab_size)
        for start in range(0, len(random), chunk):
            part = random[start : start + chunk]
            token_ids[part] = _draw(_to_numpy(masked, part), [rows[index] for index in part])
        logprobs = {
            index: _logprobs(_to_numpy(logits, [index])[0], int(token_ids[index]), count)
            for index, row in enumerate(rows)
            if (count := row.params.logprobs) is not None and index not in errors
        }
        return token_ids, logprobs, errors


def _refusal(row: SamplingRow, vocab_size: int) -> str | None:
    if row.params.temperature > 0 and row.params.seed is None:
        return "a random choice needs a seed"
    if any(not 0 <= token_id < vocab_size for token_id in row.masked_ids()):
        return f"a stop id is outside the vocabulary of {vocab_size}"
    return None


def _mask(
    logits: torch.Tensor, rows: Sequence[SamplingRow], errors: dict[int, str]
) -> torch.Tensor:
    places = [
        (index, token_id)
        for index, row in enumerate(rows)
        if index not in errors
        for token_id in row.masked_ids()
    ]
    if not places:
        return logits
    # A NaN under the mask must still show, hence the sum instead of a plain assignment.
    row_indices, token_ids = torch.tensor(places, device=logits.device).unbind(dim=1)
    masked = logits.clone()
    masked[row_indices, token_ids] -= torch.inf
    return masked


def _to_numpy(logits: torch.Tensor, indices: list[int]) -> FloatArray:
    return logits[indices].cpu().numpy().astype(np.float64)


def _draw(logits: FloatArray, rows: Sequence[SamplingRow]) -> IntArray:
    """Inverse of the cumulative distribution at each row's draw.

    Args:
        logits: float64 [n, vocab_size], finite or -inf, with a finite maximum; overwritten.
        rows: Their parameters.

    Returns:
        int32 [n].
    """
    temperatures = np.array([[row.params.temperature] for row in rows])
    logits -= logits.max(axis=1, keepdims=True)
    # A tiny temperature may overflow to -inf, which is a probability of 0 and meant.
    with np.errstate(over="ignore"):
        logits /= temperatures
    for scaled, row in zip(logits, rows, strict=True):
        _keep_likely(scaled, row.params.top_k, row.params.top_p)
    cumulative = np.cumsum(np.exp(logits), axis=1)
    draws = uniform_draws(
        np.array([row.params.seed for row in rows], dtype=np.uint64),
        np.zeros(len(rows), dtype=np.uint64),
        np.array([row.output_position for row in rows], dtype=np.uint64),
    )
    # A draw below 1 stays below the total after rounding, so the count is a valid index, and of
    # a token of positive probability.
    targets = draws[:, None] * cumulative[:, -1:]
    chosen: IntArray = np.count_nonzero(cumulative <= targets, axis=1).astype(np.int32)
    return chosen


def _keep_likely(scaled: FloatArray, top_k: int, top_p: float) -> None:
    """Set all but the tokens that top_k and top_p keep to -inf, in place.

    Args:
        scaled: float64 [vocab_size], log-probabilities up to a constant, their maximum 0.
        top_k: Tokens to keep; below 1 or above the vocabulary for all.
        top_p: Share of the kept tokens' probability to keep.
    """
    vocab_size = len(scaled)
    num_kept = top_k if 0 < top_k < vocab_size else vocab_size
    if num_kept == vocab_size and top_p == 1.0:
        return
    kept = _most_likely(scaled, num_kept) if top_p == 1.0 else _nucleus(scaled, num_kept, top_p)
    values = scaled[kept]
    scaled.fill(-np.inf)
    scaled[kept] = values


def _nucleus(scaled: FloatArray, num_kept: int, top_p: float) -> npt.NDArray[np.intp]:
    if num_kept == len(scaled):
        total = np.exp(scaled).sum()
        candidates = _most_likely(scaled, min(_NUM_CANDIDATES, num_kept))
    else:
        candidates = _most_likely(scaled, num_kept)
        total = np.exp(scaled[candidates]).sum()
    shares = np.cumsum(np.exp(scaled[candidates])) / total
    if shares[-1] < top_p and len(candidates) < num_kept:
        candidates = _most_likely(scaled, num_kept)
        shares = np.cumsum(np.exp(scaled[candidates])) / total
    return candidates[: int(np.searchsorted(shares, top_p)) + 1]


def _most_likely(values: FloatArray, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest values, largest first, of equal ones the lower index."""
    vocab_size = len(values)
    if count < vocab_size:
        threshold = np.partition(values, vocab_size - count)[vocab_size - count]
        indices = np.flatnonzero(values >= threshold)
    else:
        indices = np.arange(vocab_size)
    return indices[np.argsort(-values[indices], kind="stable")[:count]]


def _logprobs(logits: FloatArray, token_id: int, count: int) -> TokenLogprobs:
    shifted = logits - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = _most_likely(logprobs, min(count, len(logprobs))) if count else ()
    return TokenLogprobs(
        logprob=float(logprobs[token_id]),
        top=tuple((int(index), float(logprobs[index])) for index in top),
    )
