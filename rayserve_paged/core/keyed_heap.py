"""A priority queue of items whose keys may change and which may leave from anywhere."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = tuple[float, ...]

_T = TypeVar("_T", bound=Hashable)

MAX_ENTRIES_PER_ITEM = 2
MAX_SPARE_ENTRIES = 8


class KeyedHeap(Generic[_T]):
    """Items in the order of their keys, the smallest first; of equal ones, the one put first.

    A change or a removal leaves an entry behind that is passed over when it comes up. Once half
    of the entries are of that kind they are all swept out, so `put` and `remove` cost O(log n)
    amortised, and the memory is that of the items.
    """

    def __init__(self) -> None:
        self._keys: dict[_T, Key] = {}
        self._entries: list[tuple[Key, int, _T]] = []
        self._num_puts = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[_T]:
        """Yield the items, in no particular order."""
        return iter(self._keys)

    def __contains__(self, item: object) -> bool:
        return item in self._keys

    @property
    def num_entries(self) -> int:
        """Entries kept: never more than twice the items and a few."""
        return len(self._entries)

    def key(self, item: _T) -> Key:
        """Return the key of an item that is there."""
        return self._keys[item]

    def put(self, item: _T, key: Key) -> None:
        """Add an item, or change its key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        self._num_puts += 1
        heapq.heappush(self._entries, (key, self._num_puts, item))
        self._sweep()

    def remove(self, item: _T) -> None:
        """Take an item out; one that is not there is ignored."""
        if self._keys.pop(item, None) is not None:
            self._sweep()

    def first(self) -> _T | None:
        """Return the item with the smallest key; None where there is none."""
        entries, keys = self._entries, self._keys
        while entries:
            key, _order, item = entries[0]
            if keys.get(item) == key:
                return item
            heapq.heappop(entries)
        return None

    def _sweep(self) -> None:
        if len(self._entries) <= MAX_ENTRIES_PER_ITEM * len(self._keys) + MAX_SPARE_ENTRIES:
            return
        seen: set[_T] = set()
        kept = []
        for entry in sorted(self._entries):
            key, _order, item = entry
            if item not in seen and self._keys.get(item) == key:
                seen.add(item)
                kept.append(entry)
        self._entries = kept
