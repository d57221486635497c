"""Perplexity of a text under KV caches of several dtypes, through the whole path of a request."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from rayserve_paged.core.config import Dtype, KvDtype
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.llm import LLM
from rayserve_paged.load_config import user_cache_dir
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.tokenizer import load_tokenizer

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Perplexity:
    """What a text costs under one dtype of the cache.

    Args:
        kv_dtype: Of the cache.
        value: Perplexity: e to the mean negative log-probability of a token.
        ratio: To that under fp32.
        num_scored: Tokens that it is the mean of: all but the first of each window.
    """

    kv_dtype: KvDtype
    value: float
    ratio: float
    num_scored: int


def reference_manual() -> str:
    """Return the manual of the language that comes with Python for `help`, in one piece.

    English of some 460,000 characters, in the order of its topics' names. It differs a little from
    one version of Python to the next.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows_of(text: str, model: str, num_tokens: int, window: int) -> list[list[int]]:
    """Cut the first tokens of a text into windows, the last of which may be shorter.

    Args:
        text: At least `num_tokens` long.
        model: Whose tokenizer reads it.
        num_tokens: Of the text.
        window: Tokens of each but the last; at least 2, since the first is not scored.

    Raises:
        InvalidInputError: A size that is too small, a text that is too short, or no such model.
    """
    if window < 2:
        raise InvalidInputError("window", window, "at least 2 tokens")
    if num_tokens < 2:
        raise InvalidInputError("num_tokens", num_tokens, "at least 2")
    token_ids = load_tokenizer(resolve_model(model, user_cache_dir())).encode(text)
    if len(token_ids) < num_tokens:
        accepted = f"at most the {len(token_ids)} tokens of the text"
        raise InvalidInputError("num_tokens", num_tokens, accepted)
    starts = range(0, num_tokens, window)
    cut = [token_ids[start : min(start + window, num_tokens)] for start in starts]
    return [each for each in cut if len(each) > 1]


def perplexities(
    windows: Sequence[Sequence[int]], model: str, kv_dtypes: Sequence[KvDtype], dtype: Dtype
) -> Iterator[Perplexity]:
    """Score windows with each dtype of the cache; one rank in this process computes them.

    A window is a request of its own, whose prompt is computed in chunks of a step: each token
    attends to keys and values as the cache stores them, its own included.

    Args:
        windows: Token ids, at least 2 each.
        model: As `LLM` takes it.
        kv_dtypes: Of the cache, fp32 first.
        dtype: Of weights and activations.

    Yields:
        One for each dtype, in their order.

    Raises:
        InvalidInputError: A model that takes no dtype of the cache, or no window so long.
    """
    assert kv_dtypes[0] == "fp32", "ratios are to fp32"
    exact = math.nan
    for kv_dtype in kv_dtypes:
        mean, num_scored = _mean_logprob(windows, model, kv_dtype, dtype)
        if kv_dtype == "fp32":
            exact = mean
        yield Perplexity(kv_dtype, math.exp(-mean), math.exp(exact - mean), num_scored)


def _mean_logprob(
    windows: Sequence[Sequence[int]], model: str, kv_dtype: KvDtype, dtype: Dtype
) -> tuple[float, int]:
    longest = max(map(len, windows))
    with LLM(
        model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        shell="inprocess",
        block_size=BLOCK_SIZE,
        # With the output token.
        num_blocks=longest // BLOCK_SIZE + 1,
    ) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = llm.generate([list(window) for window in windows], params)
    logprobs = [
        score.logprob
        for output in outputs
        for score in output.prompt_logprobs or ()
        if score is not None
    ]
    assert len(logprobs) == sum(map(len, windows)) - len(windows)
    return math.fsum(logprobs) / len(logprobs), len(logprobs)
