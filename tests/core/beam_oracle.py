"""Beam search over plain lists of tokens: no blocks, no rows, no candidates cut off.

Written down from the description of the method alone, apart from the code under test: every
child of every beam over the whole vocabulary is looked at in each step.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from rayserve_paged.core.request import FinishReason, ModelLimits, Request, admit
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.sim.fingerprint_rank import seen, token_logprobs


@dataclasses.dataclass(frozen=True)
class Found:
    """A finished output."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    cumulative: float
    score: float


def beam_search(
    next_logprobs: Callable[[Sequence[int]], Sequence[float]],
    prompt: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int],
) -> tuple[list[Found], int]:
    """Return all hypotheses of a search, best first, and how many steps it took.

    Args:
        next_logprobs: Of every token of the vocabulary, behind a history.
        prompt: Token ids.
        params: With `beam_width` and `max_tokens`.
        eos_token_ids: Of the model.
    """
    width, longest = params.beam_width, params.max_tokens
    assert width is not None
    assert longest is not None
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[Found] = []
    length = 0
    while True:
        length += 1
        family = []
        for rank, (total, outputs) in enumerate(live):
            for token, logprob in enumerate(next_logprobs([*prompt, *outputs])):
                if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
                    continue
                if token in ends and length < params.min_tokens:
                    continue
                family.append((-(total + logprob), rank, token, [*outputs, token]))
        family.sort()
        live = []
        for place, (loss, _rank, token, outputs) in enumerate(family):
            stops = token in ends and length >= params.min_tokens
            if not stops and length < longest:
                live.append((-loss, outputs))
            elif place < width:
                why = FinishReason.STOP if stops else FinishReason.LENGTH
                done.append(
                    Found(tuple(outputs), why, -loss, -loss / length**params.length_penalty)
                )
        live = live[:width]
        done = sorted(done, key=lambda found: found.score, reverse=True)[:width]
        if not live or (len(done) == width and params.early_stopping is True):
            break
        if len(done) == width:
            far = params.early_stopping == "never" and params.length_penalty > 0
            best = live[0][0] / (longest if far else length) ** params.length_penalty
            if not best > done[-1].score:
                break
    return done, length


def toy_beams(request: Request, limits: ModelLimits) -> tuple[list[Found], int]:
    """Return the `n` outputs that a request with beams must have on the toy rank, and the steps
    that its search takes.
    """
    params = admit(request, limits).params

    def next_logprobs(token_ids: Sequence[int]) -> list[float]:
        return token_logprobs(seen(request, token_ids, windows), limits.vocab_size)

    windows = request.windows(limits.layer_groups)
    eos = limits.eos_token_ids
    found, num_steps = beam_search(next_logprobs, request.prompt_token_ids, params, eos)
    assert all(math.isfinite(one.score) for one in found)
    return found[: params.n], num_steps
