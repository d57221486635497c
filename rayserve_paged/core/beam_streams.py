"""What the streams of a beam search get: nothing before its end, then all at once."""

from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.beam_search import Hypothesis
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import StreamItem, StreamName


def beam_items(search: BeamGroup) -> list[StreamItem]:
    """Return one item for each of the request's `n` streams: the hypotheses, best first.

    Each carries all tokens and their log-probabilities. A search that failed or was cancelled has
    none to give.

    Args:
        search: One that has ended.
    """
    request, finish, scores = search.first.request, search.finish, search.prompt_scores
    num_cached_tokens = search.first.num_cached_tokens or 0
    assert finish is not None, "the search goes on"
    found = search.hypotheses if finish is FinishReason.STOP else ()
    items = []
    for rank in range(request.params.n):
        if rank in search.withdrawn:
            continue
        name = StreamName(request.request_id, request.attempt, rank)
        if rank < len(found):
            prompt_logprobs = scores.take() if scores is not None and rank == 0 else ()
            items.append(_item(name, found[rank], num_cached_tokens, prompt_logprobs))
            continue
        reason = finish, search.error
        if finish is FinishReason.STOP:
            error = f"the search found {len(found)} outputs, as no more tokens were possible"
            reason = FinishReason.ERROR, error
        items.append(StreamItem(name, 0, (), (), num_cached_tokens, *reason))
    return items


def _item(
    name: StreamName,
    hypothesis: Hypothesis,
    num_cached_tokens: int,
    prompt_logprobs: tuple[TokenLogprobs, ...],
) -> StreamItem:
    return StreamItem(
        name=name,
        index=0,
        token_ids=hypothesis.token_ids,
        logprobs=tuple(TokenLogprobs(logprob, ()) for logprob in hypothesis.logprobs),
        num_cached_tokens=num_cached_tokens,
        finish=FinishReason.STOP if hypothesis.ended else FinishReason.LENGTH,
        error=None,
        prompt_logprobs=prompt_logprobs,
    )
