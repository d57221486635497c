"""What the batcher asks of the KV cache: match, open, grow, seal, close.

Pool, prefix index and tables change together here and nowhere else, so that a block that is
evicted stops being matchable in the same call, and a matched block is protected before anything
is allocated.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rayserve_paged.core.attention_window import ONE_FULL_GROUP, AttentionWindow, group_key
from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_retention import BlockRetention
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.partial_index import BlockContent, PartialIndex
from rayserve_paged.core.prefix_index import PrefixIndex
from rayserve_paged.core.prefix_match import (
    PartialPrefix,
    Prefix,
    content_of_group,
    match_blocks,
    match_slots,
)
from rayserve_paged.core.retention import RetentionPlan


class _Duplicate(NamedTuple):
    """What a block holds that filled after another block of equal content was published.

    Args:
        key: Of its content.
        content: Given with partial reuse.
    """

    key: BlockKey
    content: BlockContent | None


class KVManager:
    """The block pool of one tier with its prefix index.

    Args:
        pool: The physical blocks.
        block_size: Slots per block.
        partial_reuse: Whether leading slots of blocks are found as well, for a copy.
        num_layer_groups: Layer groups of the model; each has blocks of its own in the pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        partial_reuse: bool = False,
        num_layer_groups: int = 1,
    ) -> None:
        self.pool = pool
        self.partials = PartialIndex(pool.num_blocks, block_size) if partial_reuse else None
        self.index = PrefixIndex(pool.num_blocks)
        self.retention = BlockRetention(pool)
        self.block_size = block_size
        self.num_layer_groups = num_layer_groups
        pool.remember_evicted(self.index.fingerprint_of)
        self._duplicates: dict[BlockId, _Duplicate] = {}
        # Resets so far.
        self._epoch = 0

    @property
    def duplicates(self) -> Mapping[BlockId, BlockKey]:
        """HELD blocks whose content another block was published for, and its key."""
        return {block_id: duplicate.key for block_id, duplicate in self._duplicates.items()}

    def is_current(self, table: BlockTable) -> bool:
        """Return whether what is computed over a table's blocks may be published: not where the
        cache was reset since the table began.
        """
        return table.epoch == self._epoch

    def reset(self) -> None:
        """Match nothing any more that has been computed so far, or will be over the blocks of
        tables that are open now. These keep their blocks.
        """
        self._epoch += 1
        self.pool.unseal_all()
        self._forget([block_id for _key, block_id in self.index.items()])
        if self.partials is not None:
            self.partials.remove([block_id for block_id, _content in self.partials.items()])
        self._duplicates.clear()

    def match(
        self,
        keys: Sequence[BlockKey],
        num_tokens: int,
        windows: Sequence[AttentionWindow] = ONE_FULL_GROUP,
    ) -> list[BlockId | None]:
        """Return cached blocks that hold a prefix of a sequence; changes nothing.

        Args:
            keys: Key chain of the sequence's full blocks.
            num_tokens: Known tokens. At most `num_tokens - 1` are taken from the cache, since
                the last one must be computed to have logits.
            windows: What each layer group attends to.

        Returns:
            For each place of the prefix one block of each layer group; None where no token after
            the prefix reads it.
        """
        limit = min(max(0, num_tokens - 1) // self.block_size, len(keys))
        return match_blocks(self.index, keys[:limit], windows, self.block_size)

    def match_partly(self, content: BlockContent) -> PartialPrefix | None:
        """Return the blocks of which most leading slots serve a sequence; changes nothing.

        Args:
            content: What the sequence needs behind its matched blocks, its last token excluded.

        Returns:
            As many slots as the blocks of all layer groups have; None where one group has none.
        """
        if self.partials is None:
            return None
        return match_slots(self.partials, content, self.num_layer_groups)

    def num_tokens_of(self, prefix: Prefix) -> int:
        """Return how many tokens of a cached prefix need not be computed."""
        num_copied = 0 if prefix.partial is None else prefix.partial.num_tokens
        return len(prefix.places) // self.num_layer_groups * self.block_size + num_copied

    def open(
        self,
        matched: Sequence[BlockId | None],
        partial: PartialPrefix | None = None,
        windows: Sequence[AttentionWindow] = ONE_FULL_GROUP,
        *,
        resumes: bool = False,
        retention: RetentionPlan | None = None,
    ) -> BlockTable:
        """Begin a table on matched blocks, which are held from now on.

        Args:
            matched: What `match` returned.
            partial: Held as well, on behalf of the caller, which releases it once its slots have
                been copied to the next block of the table.
            windows: What each layer group attends to.
            resumes: The sequence was here before, so that it says nothing of how often its blocks
                are asked for.
            retention: What its request asks for; None for nothing.
        """
        table = BlockTable(self.block_size, matched, windows, self._epoch)
        for chain in table.chains():
            if not resumes:
                self.pool.used(chain)
            self.pool.share(chain)
            if retention is None:
                self.retention.use(chain)
        if partial is not None:
            for block_id in partial.block_ids:
                self.pool.share([block_id])
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> list[BlockId] | None:
        """Give a table room for this many tokens.

        Returns:
            The appended blocks, for each place one of each layer group, or None (and nothing
            changed) where too few are available.
        """
        allocation = self.pool.allocate(table.num_missing(num_tokens))
        if allocation is None:
            return None
        if allocation.evicted:
            self._forget(allocation.evicted)
        table.append(allocation.block_ids)
        return allocation.block_ids

    def grow_all(
        self, tables: Sequence[BlockTable], lengths: Sequence[int]
    ) -> list[list[BlockId]] | None:
        """Give several tables room for so many tokens each, as `grow` does, or none of them."""
        missing = [table.num_missing(length) for table, length in zip(tables, lengths, strict=True)]
        allocation = self.pool.allocate(sum(missing))
        if allocation is None:
            return None
        if allocation.evicted:
            self._forget(allocation.evicted)
        appended, start = [], 0
        for table, num_missing in zip(tables, missing, strict=True):
            block_ids = allocation.block_ids[start : start + num_missing]
            start += num_missing
            table.append(block_ids)
            appended.append(block_ids)
        return appended

    def fork(self, table: BlockTable) -> BlockTable:
        """Begin another table on all blocks of a table, its unsealed tail included.

        Whoever writes into a shared tail next must `replace` it by a copy first.
        """
        child = table.copy()
        self.pool.share(child.block_ids)
        return child

    def trim(
        self, table: BlockTable, num_computed: int, retention: RetentionPlan | None = None
    ) -> None:
        """Let go of the blocks of a table that no token to come reads; sealed ones stay cached.

        Args:
            table: Of a sequence.
            num_computed: Tokens whose KV finished steps have written. A step in flight computes
                none before them, so it does not read those blocks either.
            retention: What its request asks for; None for nothing.
        """
        places = [group.num_sink_blocks + group.num_trimmed for group in table.groups]
        for place, trimmed in zip(places, table.trim(num_computed), strict=True):
            if self._duplicates:
                self._trade_duplicates(trimmed, range(place, place + len(trimmed)), retention)
            if retention is not None:
                self.retention.claim(trimmed, place, retention)
            self.pool.release(trimmed)

    def replace(
        self, table: BlockTable, place: int, layer_group: int = 0
    ) -> tuple[BlockId, BlockId] | None:
        """Put a new block in the place of a shared one.

        Returns:
            The old and the new block, or None (and nothing changed) where none is available. The
            old one stays held on behalf of the caller, which releases it once it was copied.
        """
        allocation = self.pool.allocate(1)
        if allocation is None:
            return None
        self._forget(allocation.evicted)
        group = table.groups[layer_group]
        index = group.index(place)
        old, new = group.block_ids[index], allocation.block_ids[0]
        group.block_ids[index] = new
        return old, new

    def seal(
        self,
        block_id: BlockId,
        key: BlockKey,
        content: BlockContent | None = None,
        layer_group: int = 0,
    ) -> bool:
        """Publish a full block whose KV a finished step has computed.

        Args:
            block_id: The block.
            key: Of its content.
            content: Given with partial reuse.
            layer_group: Whose KV it holds.

        Returns:
            Whether it can be matched from now on, and could not before.
        """
        if layer_group:
            key = group_key(key, layer_group)
            content = None if content is None else content_of_group(content, layer_group)
        if not self.index.publish(key, block_id):
            self._duplicates[block_id] = _Duplicate(key, content)
            return False
        if self._duplicates:
            self._duplicates.pop(block_id, None)
        is_new = self.pool.seal(block_id)
        if self.partials is None or content is None or block_id in self.partials:
            return is_new
        if content.token_ids:
            self._thaw(self.partials.add(block_id, content))
        return is_new

    def seal_run(self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        """Publish full blocks that follow each other, as `seal` does each, and at a fraction of
        the cost. For a pool without partial reuse.

        Args:
            block_ids: Of the first layer group.
            keys: One for each of them.
        """
        assert self.partials is None, "blocks are sealed with their content"
        if self._duplicates or not self.index.publish_run(keys, block_ids):
            for block_id, key in zip(block_ids, keys, strict=True):
                self.seal(block_id, key)
            return
        self.pool.seal_run(block_ids)

    def freeze(self, block_id: BlockId, content: BlockContent, layer_group: int = 0) -> None:
        """Keep the leading slots of a block that is not full, and that nobody will write again.

        Args:
            block_id: A block of a table that is about to be closed.
            content: What finished steps have computed of it, at least one token.
            layer_group: Whose KV it holds.
        """
        # One that others hold is written by them, or belongs to them to freeze.
        if self.partials is None or self.pool.count(block_id) > 1:
            return
        covered = self.partials.add(block_id, content_of_group(content, layer_group))
        if covered != block_id:
            self.pool.freeze(block_id)
            self._thaw(covered)

    def close(self, table: BlockTable, retention: RetentionPlan | None = None) -> None:
        """Let go of all blocks of a table; sealed and frozen ones stay cached.

        Args:
            table: Of a sequence.
            retention: What its request asks for; None for nothing.
        """
        if self._duplicates:
            for group in table.groups:
                self._trade_duplicates(group.block_ids, group.held_places(), retention)
        if retention is not None:
            self.retention.release(table, retention)
        self._release(table)

    def discard(self, table: BlockTable) -> None:
        """Let go of all blocks of a table whose content cannot be trusted.

        Blocks that others hold were matched before, computed by them or for them, and stay.
        """
        private = [block_id for block_id in table.block_ids if self.pool.count(block_id) == 1]
        self._forget(private)
        for block_id in private:
            self.pool.unseal(block_id)
            self._duplicates.pop(block_id, None)
        self._release(table)

    def _release(self, table: BlockTable) -> None:
        for chain in reversed(table.chains()):
            self.pool.release(chain)
        table.clear()

    def _thaw(self, covered: BlockId | None) -> None:
        """Keep a frozen block no longer that holds nothing which another one does not."""
        if covered is not None and self.pool.is_frozen(covered):
            self.pool.unseal(covered)

    def _forget(self, block_ids: list[BlockId]) -> None:
        """Match these blocks no more."""
        self.index.remove(block_ids)
        if self.partials is not None:
            self.partials.remove(block_ids)
        if self.retention:
            self.retention.forget(block_ids)

    def _trade_duplicates(
        self, block_ids: list[BlockId], places: Sequence[int], retention: RetentionPlan | None
    ) -> None:
        """Put the published blocks in the place of their duplicates, so that they are released
        with what follows them: a chain whose head lies there since another sequence let go of it
        would be evicted from its head on.

        Args:
            block_ids: HELD blocks of a table, changed in place.
            places: Of each of them in the chain.
            retention: What the table's request asks for; None for nothing.
        """
        for index, (duplicate, place) in enumerate(zip(block_ids, places, strict=True)):
            held = self._duplicates.get(duplicate)
            if held is None:
                continue
            published = self.index.block_of(held.key)
            if published is None:
                # It was evicted meanwhile.
                self.seal(duplicate, held.key, held.content)
                if retention is not None:
                    self.retention.seal(duplicate, place, retention)
                continue
            self.pool.share([published])
            block_ids[index] = published
            if self.pool.count(duplicate) == 1:
                del self._duplicates[duplicate]
            self.pool.release([duplicate])
        if retention is None:
            # Whoever computed a block that is published elsewhere shares it as of now.
            self.retention.use(block_ids)
