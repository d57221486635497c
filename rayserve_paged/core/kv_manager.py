"""What the batcher asks of the KV cache: match, open, grow, seal, close.

Pool, prefix index and tables change together here and nowhere else, so that a block that is
evicted stops being matchable in the same call, and a matched block is protected before anything
is allocated.
"""

from collections.abc import Sequence

from rayserve_paged.core.block_pool import BlockPool
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.prefix_index import PrefixIndex


class KVManager:
    """The block pool of one tier with its prefix index.

    Args:
        pool: The physical blocks.
        block_size: Slots per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.index = PrefixIndex()
        self.block_size = block_size

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> list[BlockId]:
        """Return cached blocks that hold a prefix of a sequence; changes nothing.

        Args:
            keys: Key chain of the sequence's full blocks.
            num_tokens: Known tokens. At most `num_tokens - 1` are taken from the cache, since
                the last one must be computed to have logits.
        """
        limit = max(0, num_tokens - 1) // self.block_size
        return self.index.match(keys[:limit])

    def open(self, matched: Sequence[BlockId]) -> BlockTable:
        """Begin a table on matched blocks, which are held from now on."""
        self.pool.share(matched)
        return BlockTable(self.block_size, matched)

    def grow(self, table: BlockTable, num_tokens: int) -> list[BlockId] | None:
        """Give a table room for this many tokens.

        Returns:
            The appended blocks, or None (and nothing changed) where too few are available.
        """
        allocation = self.pool.allocate(table.num_missing(num_tokens))
        if allocation is None:
            return None
        self.index.remove(allocation.evicted)
        table.append(allocation.block_ids)
        return allocation.block_ids

    def fork(self, table: BlockTable) -> BlockTable:
        """Begin another table on all blocks of a table, its unsealed tail included.

        Whoever writes into a shared tail next must `replace` it by a copy first.
        """
        return self.open(table.block_ids)

    def replace(self, table: BlockTable, block_index: int) -> tuple[BlockId, BlockId] | None:
        """Put a new block in the place of a shared one.

        Returns:
            The old and the new block, or None (and nothing changed) where none is available. The
            old one stays held on behalf of the caller, which releases it once it was copied.
        """
        allocation = self.pool.allocate(1)
        if allocation is None:
            return None
        self.index.remove(allocation.evicted)
        old, new = table.block_ids[block_index], allocation.block_ids[0]
        table.block_ids[block_index] = new
        return old, new

    def seal(self, block_id: BlockId, key: BlockKey) -> None:
        """Publish a full block whose KV a finished step has computed."""
        if self.index.publish(key, block_id):
            self.pool.seal(block_id)

    def close(self, table: BlockTable) -> None:
        """Let go of all blocks of a table; sealed ones stay cached."""
        self.pool.release(table.block_ids)
        table.block_ids = []

    def discard(self, table: BlockTable) -> None:
        """Let go of all blocks of a table whose content cannot be trusted.

        Blocks that others hold were matched before, computed by them or for them, and stay.
        """
        private = [block_id for block_id in table.block_ids if self.pool.count(block_id) == 1]
        self.index.remove(private)
        for block_id in private:
            self.pool.unseal(block_id)
        self.close(table)
