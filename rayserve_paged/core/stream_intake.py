"""Takes in one delivery of a replica, stream by stream: what is new of each, in order, once."""

import dataclasses
from collections.abc import Callable, Sequence

from rayserve_paged.core.open_request import OpenRequest, Stream
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import Delivery, StreamItem, StreamName, TokenRun


@dataclasses.dataclass(slots=True)
class News:
    """What a delivery brings for one stream, gathered over its items."""

    known: OpenRequest
    stream: Stream
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None


Find = Callable[[StreamName, bool], OpenRequest | None]
"""Returns the request of a stream whose attempt is accepted from where the delivery came; the flag
says whether the item ends it."""


def take_in(delivery: Delivery, find: Find) -> dict[StreamName, News]:
    """Gather what is new, and extend the streams by it; nothing follows the end of one."""
    gathered: dict[StreamName, News] = {}
    for item in delivery.items:
        if isinstance(item, TokenRun):
            streams = zip(item.names, item.indices.tolist(), item.token_ids.T.tolist(), strict=True)
            for name, index, token_ids in streams:
                _gather(gathered, find, name, index, token_ids, None)
        else:
            _gather(gathered, find, item.name, item.index, item.token_ids, item)
    return gathered


def _gather(
    gathered: dict[StreamName, News],
    find: Find,
    name: StreamName,
    index: int,
    token_ids: Sequence[int],
    item: StreamItem | None,
) -> None:
    news = gathered.get(name)
    if news is None:
        known = find(name, item is not None and item.finish is not None)
        stream = None if known is None else known.streams.get(name.sibling)
        if known is None or stream is None:
            return
        news = gathered[name] = News(known, stream)
    if news.finish is not None:
        return
    stream = news.stream
    num_tokens = len(stream.token_ids)
    have = num_tokens - index
    if have < 0:
        news.finish = FinishReason.ERROR
        news.error = f"its stream skips from token {num_tokens} to token {index}"
        return
    fresh = token_ids[have:]
    news.token_ids += fresh
    stream.token_ids.extend(fresh)
    if item is None:
        return
    news.logprobs += item.logprobs[have:]
    if item.prompt_logprobs and not news.known.has_tokens:
        news.prompt_logprobs = item.prompt_logprobs
    if not num_tokens:
        # Of the attempt that began the output; a later one finds the output cached too.
        stream.num_cached_tokens = item.num_cached_tokens
    news.finish, news.error = item.finish, item.error
