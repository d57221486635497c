"""Which cached block shares the most leading tokens with a prompt that diverges inside a block.

A block holds what its tokens and all before them give, so that its leading slots serve any
sequence with the same blocks before it and the same leading tokens. Two kinds are found here:
full blocks that are sealed, and *frozen partial* ones, the last blocks of finished sequences.

The blocks behind one parent are kept in the order of their tokens. Whatever shares the most with
a prompt is a neighbour of the place where the prompt belongs.
"""

import bisect
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayserve_paged.core.ids import BlockId, BlockKey

_TOKEN_BYTES = 4


class BlockContent(NamedTuple):
    """What a block holds, and behind which block.

    Args:
        parent: Key of the block before it, or the scope's root.
        token_ids: Of its leading slots, which are computed.
    """

    parent: BlockKey
    token_ids: Sequence[int]


class PartialMatch(NamedTuple):
    """A block whose leading slots can be copied.

    Args:
        block_id: The block; it is not to be written.
        num_tokens: Slots that serve.
    """

    block_id: BlockId
    num_tokens: int


class PartialIndex:
    """Blocks by parent and tokens.

    Args:
        num_blocks: Blocks of the pool; ids run from 0.
        block_size: Slots per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._stride = _TOKEN_BYTES * block_size
        # Big-endian, so that bytes are in the order of tokens, which are not negative.
        self._payload = memoryview(bytearray(num_blocks * self._stride))
        self._num_bytes = array("i", bytes(4 * num_blocks))
        self._parent: list[BlockKey | None] = [None] * num_blocks
        self._children: dict[BlockKey, list[BlockId]] = {}

    def __contains__(self, block_id: BlockId) -> bool:
        return self._parent[block_id] is not None

    @property
    def num_parents(self) -> int:
        """Blocks, or roots, behind which something is found."""
        return len(self._children)

    def add(self, block_id: BlockId, content: BlockContent) -> BlockId | None:
        """Let a block be found, unless another one holds all of it already.

        Args:
            block_id: Not in here.
            content: At least one token.

        Returns:
            A block that is not in here any more, since it holds nothing that this one does not:
            the block itself where it was not let in. None where there is none.
        """
        payload = _payload(content.token_ids)
        children = self._children.setdefault(content.parent, [])
        place = bisect.bisect_left(children, payload, key=self._payload_of)
        if place < len(children) and self._payload_of(children[place]).startswith(payload):
            return block_id
        covered = None
        # All that begin with the tokens of one block come right after it: nothing lies between.
        if place and payload.startswith(self._payload_of(children[place - 1])):
            covered = children[place - 1]
            self.remove([covered])
            children = self._children.setdefault(content.parent, children)
            place -= 1
        children.insert(place, block_id)
        start = block_id * self._stride
        self._payload[start : start + len(payload)] = payload
        self._num_bytes[block_id] = len(payload)
        self._parent[block_id] = content.parent
        return covered

    def remove(self, block_ids: Iterable[BlockId]) -> None:
        """Find these blocks no more; those that are not in here are left alone."""
        for block_id in block_ids:
            parent = self._parent[block_id]
            if parent is None:
                continue
            children = self._children[parent]
            payload = self._payload_of(block_id)
            del children[bisect.bisect_left(children, payload, key=self._payload_of)]
            if not children:
                del self._children[parent]
            self._parent[block_id] = None

    def find(self, content: BlockContent) -> PartialMatch | None:
        """Return the block that shares the most leading tokens; None where none shares any."""
        children = self._children.get(content.parent)
        if children is None:
            return None
        payload = _payload(content.token_ids)
        place = bisect.bisect_left(children, payload, key=self._payload_of)
        best = None
        for block_id in children[max(0, place - 1) : place + 1]:
            num_tokens = _num_common_tokens(payload, self._payload_of(block_id))
            if num_tokens > (best.num_tokens if best else 0):
                best = PartialMatch(block_id, num_tokens)
        return best

    def items(self) -> Iterator[tuple[BlockId, BlockContent]]:
        """Return every block with what it holds."""
        for parent, children in self._children.items():
            for block_id in children:
                token_ids = np.frombuffer(self._payload_of(block_id), ">i4").tolist()
                yield block_id, BlockContent(parent, token_ids)

    def _payload_of(self, block_id: BlockId) -> bytes:
        start = block_id * self._stride
        return bytes(self._payload[start : start + self._num_bytes[block_id]])


def _payload(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, ">i4").tobytes()


def _num_common_tokens(a: bytes, b: bytes) -> int:
    """Return how many leading tokens two payloads share."""
    size = min(len(a), len(b))
    different = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (different.bit_length() + 7) // 8) // _TOKEN_BYTES
