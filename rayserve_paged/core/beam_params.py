"""What beam search asks of a request: which parameters go with it, and the blocks that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.core.sampling_params import SamplingParams

MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0
MAX_BEAM_END_IDS = 64

_NEUTRAL = {
    "best_of": (None, "None with beam_width, which has its own order"),
    "top_p": (1.0, "1 with beam_width, which draws nothing"),
    "min_p": (0.0, "0 with beam_width, which draws nothing"),
    "repetition_penalty": (1.0, "1 with beam_width, whose scores are the model's own"),
    "presence_penalty": (0.0, "0 with beam_width, whose scores are the model's own"),
    "frequency_penalty": (0.0, "0 with beam_width, whose scores are the model's own"),
    "logit_bias": ((), "none with beam_width, whose scores are the model's own"),
    "stop": ((), "none with beam_width, whose search knows tokens alone: give stop_token_ids"),
}


def check_beams(params: SamplingParams) -> None:
    """Check the parameters of a request against each other, each already checked by itself.

    Raises:
        InvalidInputError: One does not go with `beam_width`, or goes with it alone.
    """
    early = params.early_stopping
    if not isinstance(early, bool) and early != "never":
        raise InvalidInputError("early_stopping", early, 'true, false or "never"')
    if params.beam_width is None:
        if params.length_penalty != 1.0:
            raise InvalidInputError("length_penalty", params.length_penalty, "1 without beam_width")
        if early is not False:
            raise InvalidInputError("early_stopping", early, "false without beam_width")
        return
    if params.n > params.beam_width:
        accepted = f"at most beam_width={params.beam_width}, the hypotheses that are kept"
        raise InvalidInputError("n", params.n, accepted)
    for field, (neutral, accepted) in _NEUTRAL.items():
        value = getattr(params, field)
        if value != neutral:
            raise InvalidInputError(field, value, accepted)
    if params.temperature not in (0.0, 1.0):
        accepted = "0 or 1 with beam_width, which draws nothing"
        raise InvalidInputError("temperature", params.temperature, accepted)
    if params.top_k > 0:
        accepted = "0 or -1 with beam_width, which draws nothing"
        raise InvalidInputError("top_k", params.top_k, accepted)
    if params.logprobs:
        accepted = "0 with beam_width, for the chosen tokens' alone, or None"
        raise InvalidInputError("logprobs", params.logprobs, accepted)
    if len(params.stop_token_ids) > MAX_BEAM_END_IDS:
        accepted = f"at most {MAX_BEAM_END_IDS} ids with beam_width"
        raise InvalidInputError("stop_token_ids", params.stop_token_ids, accepted)
    allowed = params.allowed_token_ids
    if allowed is not None and len(allowed) < params.n:
        accepted = f"at least n={params.n} ids with beam_width, so that n outputs differ"
        raise InvalidInputError("allowed_token_ids", allowed, accepted)


def most_blocks(num_prompt: int, max_tokens: int, width: int, block_size: int) -> int:
    """Return the most blocks that a search ever holds.

    The full blocks of the prompt are shared by all beams. What comes after them each beam may
    have to itself: where two part inside a block, one of them copies it. A search of one token
    ends before any beam is forked.

    Args:
        num_prompt: Tokens of the prompt.
        max_tokens: Output tokens; the last one needs no slot.
        width: Beams; 1 for a request without a search.
        block_size: Slots per block.
    """
    num_blocks = -(-(num_prompt + max_tokens - 1) // block_size)
    if max_tokens == 1:
        return num_blocks
    shared = num_prompt // block_size
    return shared + width * (num_blocks - shared)


def most_tokens(num_prompt: int, width: int, block_size: int, num_blocks: int) -> int:
    """Return the most output tokens of a search that a pool can hold; may be less than 1.

    Args:
        num_prompt: Tokens of the prompt.
        width: Beams; 1 for a request without a search.
        block_size: Slots per block.
        num_blocks: Of the pool.
    """
    shared = num_prompt // block_size
    num_own = (num_blocks - shared) // width
    # The last token sampled needs no slot, hence the one beyond the blocks.
    return (shared + num_own) * block_size + 1 - num_prompt
