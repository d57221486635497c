"""Deals the layers of a model into groups of equal size, so that one pool of blocks serves all.

A block holds the layers of one group. Layers that keep the same range of tokens go together; where
the ranges are kept by different numbers of layers (five windowed ones for each full one, say), they
are split into as many groups as it takes.
"""

import dataclasses
import math
from collections.abc import Sequence

from rayserve_paged.core.attention_window import AttentionWindow


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV lies in the same blocks.

    Args:
        window: What each of them attends to.
        layers: Their indices in the model, ascending; as many as in every other group.
    """

    window: AttentionWindow
    layers: tuple[int, ...]


def group_layers(windows: Sequence[AttentionWindow]) -> tuple[LayerGroup, ...]:
    """Return as few groups as there can be.

    Args:
        windows: What each layer attends to; at least one.
    """
    layers_of: dict[AttentionWindow, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    size = math.gcd(*map(len, layers_of.values()))
    return tuple(
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in layers_of.items()
        for first in range(0, len(layers), size)
    )


def places_of(groups: Sequence[LayerGroup]) -> tuple[tuple[int, int], ...]:
    """Return, for each layer of the model, its group and its index in the group's blocks."""
    places = {
        layer: (number, index)
        for number, group in enumerate(groups)
        for index, layer in enumerate(group.layers)
    }
    return tuple(places[layer] for layer in range(len(places)))
