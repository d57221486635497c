"""Takes in one delivery of a replica, stream by stream: what is new of each, in order, once."""

from collections.abc import Callable, Mapping, Sequence

from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.open_request import OpenRequest, Source, Stream
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_messages import Delivery, StreamItem, StreamName, TokenRun


class News:
    """What a delivery brings for one stream, gathered over its items.

    Args:
        name: The stream.
        known: Its request.
        stream: What is accepted of the sample.
        token_ids: New output tokens so far; the list is extended.
    """

    __slots__ = (
        "error",
        "finish",
        "known",
        "logprobs",
        "name",
        "prompt_logprobs",
        "stream",
        "token_ids",
    )

    def __init__(
        self, name: StreamName, known: OpenRequest, stream: Stream, token_ids: list[int]
    ) -> None:
        self.name = name
        self.known = known
        self.stream = stream
        self.token_ids = token_ids
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.finish: FinishReason | None = None
        self.error: str | None = None

    def extend(self, index: int, token_ids: Sequence[int]) -> int | None:
        """Take in tokens from an output index on, and extend the stream by those it lacks.

        Returns:
            How many it had of them; None where some are missing before them, which ends it.
        """
        accepted = self.stream.token_ids
        have = len(accepted) - index
        if have < 0:
            self.finish = FinishReason.ERROR
            self.error = f"its stream skips from token {len(accepted)} to token {index}"
            return None
        fresh = token_ids[have:] if have else token_ids
        self.token_ids += fresh
        accepted.extend(fresh)
        return have


Find = Callable[[StreamName, bool], OpenRequest | None]
"""Returns the request of a stream whose attempt is accepted from where the delivery came; the flag
says whether the item ends it."""


def take_in(
    delivery: Delivery, open_requests: Mapping[RequestId, OpenRequest], find: Find
) -> list[News]:
    """Gather what is new, and extend the streams by it; nothing follows the end of one.

    Args:
        delivery: What has come.
        open_requests: Of its consumer.
        find: Says what of them is accepted.

    Returns:
        One entry for each stream, in the order in which they come up.
    """
    source = delivery.replica_id, delivery.incarnation
    gathered: list[News] = []
    try:
        for item in delivery.items:
            if isinstance(item, TokenRun):
                _take_run(gathered, source, open_requests, find, item)
            else:
                _take_item(gathered, find, item)
    finally:
        for news in gathered:
            news.stream.news = None
    return gathered


def _take_run(
    gathered: list[News],
    source: Source,
    open_requests: Mapping[RequestId, OpenRequest],
    find: Find,
    run: TokenRun,
) -> None:
    columns = zip(run.names, run.indices.tolist(), run.token_ids.T.tolist(), strict=True)
    for name, index, token_ids in columns:
        # A stream that only goes on costs no call: this is done for every token that is delivered.
        known = open_requests.get(name.request_id)
        if known is not None and known.is_pinned and known.attempt == name.attempt:
            stream = known.streams.get(name.sibling)
            if stream is not None and stream.news is None and known.source == source:
                accepted = stream.token_ids
                if len(accepted) == index:
                    accepted.extend(token_ids)
                    fresh = stream.news = News(name, known, stream, token_ids)
                    gathered.append(fresh)
                    continue
        news = _news(gathered, find, name, is_end=False)
        if news is not None:
            news.extend(index, token_ids)


def _take_item(gathered: list[News], find: Find, item: StreamItem) -> None:
    news = _news(gathered, find, item.name, is_end=item.finish is not None)
    if news is None:
        return
    is_first = not news.stream.token_ids
    have = news.extend(item.index, item.token_ids)
    if have is None:
        return
    news.logprobs += item.logprobs[have:]
    if item.prompt_logprobs and not news.known.has_tokens:
        news.prompt_logprobs = item.prompt_logprobs
    if is_first:
        # Of the attempt that began the output; a later one finds the output cached too.
        news.stream.num_cached_tokens = item.num_cached_tokens
    news.finish, news.error = item.finish, item.error


def _news(gathered: list[News], find: Find, name: StreamName, *, is_end: bool) -> News | None:
    """Return what was gathered of a stream so far; None where no more of it is accepted."""
    known = find(name, is_end)
    if known is None:
        return None
    stream = known.streams.get(name.sibling)
    if stream is None:
        return None
    news = stream.news
    if news is None:
        # On the stream, which costs less than to look each name up.
        news = stream.news = News(name, known, stream, [])
        gathered.append(news)
    return None if news.finish is not None else news
