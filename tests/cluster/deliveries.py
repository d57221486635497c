"""Deliveries as plain items, one stream at a time."""

from collections.abc import Iterator

from rayserve_paged.core.stream_messages import Delivery, StreamItem


def unfold(delivery: Delivery) -> Iterator[StreamItem]:
    """Every item of a delivery; a run of tokens as one item for each stream."""
    for item in delivery.items:
        if isinstance(item, StreamItem):
            yield item
            continue
        streams = zip(item.names, item.indices.tolist(), item.token_ids.T.tolist(), strict=True)
        for name, index, token_ids in streams:
            yield StreamItem(name, index, tuple(token_ids), (), 0, None, None)
