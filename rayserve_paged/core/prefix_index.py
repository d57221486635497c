"""Which block holds the content of a key, in one tier; and what changed since last asked."""

from collections.abc import Iterable, Sequence
from typing import Final

from rayserve_paged.core.ids import BlockId, BlockKey

_FINGERPRINT_BYTES: Final = 8


class PrefixIndex:
    """A one-to-one map of keys to blocks whose KV has been computed.

    Args:
        num_blocks: Blocks of the pool; ids run from 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[BlockKey, BlockId] = {}
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._published: dict[BlockKey, None] = {}
        self._evicted: dict[BlockKey, None] = {}
        # Over the index's life: whoever waits for a key need not look before this has changed.
        self.num_published = 0

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def items(self) -> Iterable[tuple[BlockKey, BlockId]]:
        """Return every (key, block)."""
        return self._block_of.items()

    def key_of(self, block_id: BlockId) -> BlockKey | None:
        """Return the key under which a block can be matched."""
        return self._key_of[block_id]

    def block_of(self, key: BlockKey) -> BlockId | None:
        """Return the block that holds the content of a key."""
        return self._block_of.get(key)

    def fingerprint_of(self, block_id: BlockId) -> int:
        """Return 64 bits that stand for the content of a block that has a key."""
        key = self._key_of[block_id]
        assert key is not None, f"block {block_id} has no key"
        return int.from_bytes(key[:_FINGERPRINT_BYTES], "little")

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Return the blocks of the longest leading run of keys that are present."""
        block_ids = []
        block_of = self._block_of
        for key in keys:
            block_id = block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, key: BlockKey, block_id: BlockId) -> bool:
        """Make a block matchable.

        Returns:
            False where another block holds the same content already; this one stays private.
        """
        if self._block_of.setdefault(key, block_id) != block_id:
            return False
        if self._key_of[block_id] is not None:
            # A fork shares it, and fills it too.
            return True
        self._key_of[block_id] = key
        self.num_published += 1
        self._note_published(key)
        return True

    def publish_run(self, keys: Sequence[BlockKey], block_ids: Sequence[BlockId]) -> bool:
        """Make several blocks matchable, all of them or none.

        Args:
            keys: All different.
            block_ids: For each of them a block that has no key yet.

        Returns:
            False where another block holds the same content as one of these.
        """
        block_of, key_of = self._block_of, self._key_of
        if not block_of.keys().isdisjoint(keys):
            return False
        block_of.update(zip(keys, block_ids, strict=True))
        for key, block_id in zip(keys, block_ids, strict=True):
            key_of[block_id] = key
        self.num_published += len(keys)
        if self._evicted.keys().isdisjoint(keys):
            self._published.update(dict.fromkeys(keys))
        else:
            for key in keys:
                self._note_published(key)
        return True

    def remove(self, block_ids: Iterable[BlockId]) -> None:
        """Stop matching these blocks; those that have no key are left alone."""
        key_of, block_of = self._key_of, self._block_of
        published, evicted = self._published, self._evicted
        for block_id in block_ids:
            key = key_of[block_id]
            if key is None:
                continue
            key_of[block_id] = None
            del block_of[key]
            if key in published:
                del published[key]
            else:
                evicted[key] = None

    def _note_published(self, key: BlockKey) -> None:
        # A key that went and came back since the last report has not changed.
        if key in self._evicted:
            del self._evicted[key]
        else:
            self._published[key] = None

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would report anything."""
        return bool(self._published or self._evicted)

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Return the keys (published, evicted) since the last call."""
        changes = tuple(self._published), tuple(self._evicted)
        self._published = {}
        self._evicted = {}
        return changes
