"""What a consumer has of a request from attempts before: checked at the door, then taken up."""

import dataclasses
from collections.abc import Collection, Sequence

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.field_checks import check_integer, check_token_ids
from rayserve_paged.core.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class DeliveredSample:
    """The output of a sample that has not finished, as far as its consumer has it.

    Args:
        sibling: The sample.
        token_ids: Its output tokens, from the first on.
    """

    sibling: int
    token_ids: tuple[int, ...] = ()


def check_delivered(
    delivered: Sequence[object],
    params: SamplingParams,
    end_ids: Collection[int],
    vocab_size: int,
) -> None:
    """Check what a consumer says it has of the samples that have not finished.

    The last token of a sample may be one that ends it, as where the notice of its end was lost.

    Args:
        delivered: Samples in the order of their numbers; none for a first attempt.
        params: Of the request; `max_tokens` is set.
        end_ids: Ids that end a sample.
        vocab_size: Of the model.

    Raises:
        InvalidInputError: A sample that the request does not have, or twice; ids outside the
            vocabulary; more tokens than `max_tokens`; tokens behind one that ends the sample;
            tokens of a beam, which are delivered with its end alone; tokens where scores of the
            prompt are asked for, which were delivered with the first of them.
    """
    accepted = f"samples from 0 to {params.num_siblings - 1}, in their order and each once"
    next_one = 0
    for sample in delivered:
        if not isinstance(sample, DeliveredSample):
            raise InvalidInputError("delivered", sample, "a DeliveredSample")
        high = params.num_siblings - 1
        check_integer("delivered.sibling", sample.sibling, accepted, next_one, high)
        next_one = sample.sibling + 1
        _check_tokens(sample, params, end_ids, vocab_size)


def _check_tokens(
    sample: DeliveredSample, params: SamplingParams, end_ids: Collection[int], vocab_size: int
) -> None:
    token_ids, field = sample.token_ids, "delivered.token_ids"
    assert params.max_tokens is not None
    if params.beam_width is not None and token_ids:
        raise InvalidInputError(field, token_ids, "none with beam_width")
    if params.prompt_logprobs is not None and token_ids:
        accepted = "None, since they came with the tokens that were delivered"
        raise InvalidInputError("prompt_logprobs", params.prompt_logprobs, accepted)
    check_token_ids(field, token_ids, vocab_size)
    if len(token_ids) > params.max_tokens:
        accepted = f"at most max_tokens={params.max_tokens} of sample {sample.sibling}"
        raise InvalidInputError(field, f"{len(token_ids)} tokens", accepted)
    for index in range(max(0, params.min_tokens - 1), len(token_ids) - 1):
        if token_ids[index] in end_ids:
            accepted = f"none after token {index} of sample {sample.sibling}, which ends it"
            raise InvalidInputError(field, f"{len(token_ids)} tokens", accepted)
