"""The tokens that may follow a beam, with the model's own log-probabilities of them."""

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.beam_search import num_candidates
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.model.logit_processors import process_logits
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.token_filters import Scratch, largest


def beam_candidates(
    logits: npt.NDArray[np.float64], row: SamplingRow, scratch: Scratch
) -> TokenLogprobs:
    """List the most likely tokens that may follow a beam, as many as the search may look at.

    A token that may not be chosen is left out, and the others are not made more likely by it.

    Args:
        logits: float64 [vocab_size], finite or -inf, with a finite maximum; overwritten.
        row: Of a request with a `beam_width`, which has neither bias nor penalties.
        scratch: For vocabularies of this size.

    Returns:
        The candidates as `top`: the most likely first, of equal ones the lower id; may be empty.
        `logprob` is of the first of them.
    """
    width = row.params.beam_width
    assert width is not None
    logits -= logits.max()
    logits -= np.log(np.exp(logits, out=scratch.weights[: len(logits)]).sum())
    process_logits(logits[None], [row])
    possible = np.flatnonzero(logits > -np.inf)
    if not len(possible):
        return TokenLogprobs(-np.inf, ())
    values = logits[possible]
    count = num_candidates(width, row.num_end_ids)
    top = possible[largest(values, None, count, scratch)]
    top = top[np.argsort(-logits[top], kind="stable")]
    found = tuple(zip(top.tolist(), logits[top].tolist(), strict=True))
    return TokenLogprobs(found[0][1], found)
