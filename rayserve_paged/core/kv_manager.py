"""What the batcher asks of the KV cache: match, open, grow, seal, close.

Pool, prefix index and tables change together here and nowhere else, so that a block that is
evicted stops being matchable in the same call, and a matched block is protected before anything
is allocated.
"""

from collections.abc import Mapping, Sequence

from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.partial_index import BlockContent, PartialIndex, PartialMatch
from rayserve_paged.core.prefix_index import PrefixIndex


class KVManager:
    """The block pool of one tier with its prefix index.

    Args:
        pool: The physical blocks.
        block_size: Slots per block.
        partial_reuse: Whether leading slots of blocks are found as well, for a copy.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, partial_reuse: bool = False) -> None:
        self.pool = pool
        self.partials = PartialIndex(pool.num_blocks, block_size) if partial_reuse else None
        self.index = PrefixIndex(pool.num_blocks)
        self.block_size = block_size
        pool.remember_evicted(self.index.fingerprint_of)
        # HELD blocks that filled after another block of equal content was published.
        self._duplicates: dict[BlockId, BlockKey] = {}

    @property
    def duplicates(self) -> Mapping[BlockId, BlockKey]:
        """HELD blocks whose content another block was published for, and its key."""
        return self._duplicates

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> list[BlockId]:
        """Return cached blocks that hold a prefix of a sequence; changes nothing.

        Args:
            keys: Key chain of the sequence's full blocks.
            num_tokens: Known tokens. At most `num_tokens - 1` are taken from the cache, since
                the last one must be computed to have logits.
        """
        limit = max(0, num_tokens - 1) // self.block_size
        return self.index.match(keys[:limit])

    def match_partly(self, content: BlockContent) -> PartialMatch | None:
        """Return the block of which most leading slots serve a sequence; changes nothing.

        Args:
            content: What the sequence needs behind its matched blocks, its last token excluded.
        """
        return None if self.partials is None else self.partials.find(content)

    def open(
        self,
        matched: Sequence[BlockId],
        partial: PartialMatch | None = None,
        *,
        resumes: bool = False,
    ) -> BlockTable:
        """Begin a table on matched blocks, which are held from now on.

        Args:
            matched: The blocks.
            partial: Held as well, on behalf of the caller, which releases it once its slots have
                been copied to the next block of the table.
            resumes: The sequence was here before, so that it says nothing of how often its blocks
                are asked for.
        """
        if not resumes:
            self.pool.used(matched)
        self.pool.share(matched)
        if partial is not None:
            self.pool.share([partial.block_id])
        return BlockTable(self.block_size, matched)

    def grow(self, table: BlockTable, num_tokens: int) -> list[BlockId] | None:
        """Give a table room for this many tokens.

        Returns:
            The appended blocks, or None (and nothing changed) where too few are available.
        """
        allocation = self.pool.allocate(table.num_missing(num_tokens))
        if allocation is None:
            return None
        self._forget(allocation.evicted)
        table.append(allocation.block_ids)
        return allocation.block_ids

    def fork(self, table: BlockTable) -> BlockTable:
        """Begin another table on all blocks of a table, its unsealed tail included.

        Whoever writes into a shared tail next must `replace` it by a copy first.
        """
        return self.open(table.block_ids, resumes=True)

    def replace(self, table: BlockTable, block_index: int) -> tuple[BlockId, BlockId] | None:
        """Put a new block in the place of a shared one.

        Returns:
            The old and the new block, or None (and nothing changed) where none is available. The
            old one stays held on behalf of the caller, which releases it once it was copied.
        """
        allocation = self.pool.allocate(1)
        if allocation is None:
            return None
        self._forget(allocation.evicted)
        old, new = table.block_ids[block_index], allocation.block_ids[0]
        table.block_ids[block_index] = new
        return old, new

    def seal(self, block_id: BlockId, key: BlockKey, content: BlockContent | None = None) -> None:
        """Publish a full block whose KV a finished step has computed.

        Args:
            block_id: The block.
            key: Of its content.
            content: Given with partial reuse.
        """
        if not self.index.publish(key, block_id):
            self._duplicates[block_id] = key
            return
        if self._duplicates:
            self._duplicates.pop(block_id, None)
        self.pool.seal(block_id)
        if self.partials is None or content is None or block_id in self.partials:
            return
        if content.token_ids:
            self._thaw(self.partials.add(block_id, content))

    def freeze(self, block_id: BlockId, content: BlockContent) -> None:
        """Keep the leading slots of a block that is not full, and that nobody will write again.

        Args:
            block_id: A block of a table that is about to be closed.
            content: What finished steps have computed of it, at least one token.
        """
        # One that others hold is written by them, or belongs to them to freeze.
        if self.partials is None or self.pool.count(block_id) > 1:
            return
        covered = self.partials.add(block_id, content)
        if covered != block_id:
            self.pool.freeze(block_id)
            self._thaw(covered)

    def close(self, table: BlockTable) -> None:
        """Let go of all blocks of a table; sealed and frozen ones stay cached."""
        if self._duplicates:
            self._trade_duplicates(table.block_ids)
        self.pool.release(table.block_ids)
        table.block_ids = []

    def discard(self, table: BlockTable) -> None:
        """Let go of all blocks of a table whose content cannot be trusted.

        Blocks that others hold were matched before, computed by them or for them, and stay.
        """
        private = [block_id for block_id in table.block_ids if self.pool.count(block_id) == 1]
        self._forget(private)
        for block_id in private:
            self.pool.unseal(block_id)
            self._duplicates.pop(block_id, None)
        self.pool.release(table.block_ids)
        table.block_ids = []

    def _thaw(self, covered: BlockId | None) -> None:
        """Keep a frozen block no longer that holds nothing which another one does not."""
        if covered is not None and self.pool.is_frozen(covered):
            self.pool.unseal(covered)

    def _forget(self, block_ids: list[BlockId]) -> None:
        """Match these blocks no more."""
        self.index.remove(block_ids)
        if self.partials is not None:
            self.partials.remove(block_ids)

    def _trade_duplicates(self, block_ids: list[BlockId]) -> None:
        """Put the published blocks in the place of their duplicates, so that they are released
        with what follows them: a chain whose head lies there since another sequence let go of it
        would be evicted from its head on.
        """
        for index, duplicate in enumerate(block_ids):
            key = self._duplicates.get(duplicate)
            if key is None:
                continue
            published = self.index.block_of(key)
            if published is None:
                # It was evicted meanwhile.
                self.seal(duplicate, key)
                continue
            self.pool.share([published])
            block_ids[index] = published
            if self.pool.count(duplicate) == 1:
                del self._duplicates[duplicate]
            self.pool.release([duplicate])
