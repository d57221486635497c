"""Deliveries as plain items, one stream at a time."""

from collections.abc import Iterator

from rayserve_paged.core.messages import Delivery, StreamItem


def unfold(delivery: Delivery) -> Iterator[StreamItem]:
    """Every item of a delivery; a run of tokens as one item for each."""
    for item in delivery.items:
        if isinstance(item, StreamItem):
            yield item
            continue
        singles = zip(item.names, item.indices.tolist(), item.token_ids.tolist(), strict=True)
        for name, index, token_id in singles:
            yield StreamItem(name, index, (token_id,), (), 0, None, None)
