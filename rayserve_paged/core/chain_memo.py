"""Keys of recent prompts: of a prompt that begins like one of them only the rest is hashed.

What is kept are chains of blocks, each found by the key of its own first block:

    one prompt       a0 a1 a2 a3 a4      under key(a0): the tokens and the keys of a0 .. a4
    another          a0 a1 a2 b3 b4      under key(b3): the tokens and the keys of b3 and b4

When the second comes again, its block 0 is hashed, which finds the first chain. Their tokens are
compared: three blocks are equal, and so are their keys. Block 3 is hashed, which finds the chain
that begins with b3. Thus each chain along a prompt costs one hash, and the comparison. A prompt
that goes on where a chain ends makes it longer: a conversation is one chain, whatever its turns.

A chain is found by a key into which the scope enters and all tokens before it, and tokens are
compared byte by byte. So keys are those of `extend_chain`, whatever is remembered or forgotten.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import extend_chain, hash_block, hash_blocks, token_payload
from rayserve_paged.core.ids import BlockKey

MEMO_BYTES: Final = 2**25
"""Most bytes that are kept: of 230,000 blocks of 16 tokens, or 100,000 blocks of 64."""

BYTES_PER_KEY: Final = 80
"""Of an object with 32 bytes in it, and of the pointer to it."""

BYTES_PER_CHAIN: Final = 400
"""Of the objects that hold a chain, besides its keys and tokens."""


class _Chain:
    """Blocks that follow each other: their tokens as little-endian int32, and their keys."""

    __slots__ = ("keys", "payload")

    def __init__(self) -> None:
        self.payload = b""
        self.keys: list[BlockKey] = []

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_CHAIN + len(self.payload) + BYTES_PER_KEY * len(self.keys)


class ChainMemo:
    """The key chains of recent prompts; what was not asked for the longest is forgotten first.

    Args:
        block_size: Tokens per block.
        max_bytes: Most bytes that are kept between two calls.
    """

    def __init__(self, block_size: int, max_bytes: int = MEMO_BYTES) -> None:
        self._block_size = block_size
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # By the key of the first block.
        self._chains: OrderedDict[BlockKey, _Chain] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return self._num_bytes

    def keys(
        self,
        root: BlockKey,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        attachments: Sequence[Attachment] = (),
    ) -> list[BlockKey]:
        """Return the keys of a prompt's full blocks, as `extend_chain` does, and remember them.

        Blocks from the first attachment on are hashed each time.

        Args:
            root: Parent of the first block.
            token_ids: [num_tokens].
            attachments: Content behind tokens of the prompt, in their order.
        """
        block_size = self._block_size
        if not attachments:
            return self._plain_keys(root, token_payload(token_ids))
        start = attachments[0].offset // block_size * block_size
        keys = self._plain_keys(root, token_payload(token_ids[:start]))
        parent = keys[-1] if keys else root
        return keys + extend_chain(parent, token_ids[start:], block_size, attachments, start)

    def _plain_keys(self, root: BlockKey, payload: bytes) -> list[BlockKey]:
        """Return the keys of the full blocks of tokens that no content stands behind."""
        stride, chains = 4 * self._block_size, self._chains
        payload = payload[: len(payload) // stride * stride]
        keys: list[BlockKey] = []
        path: list[BlockKey] = []
        # The chain that the prompt has reached the end of.
        ended: _Chain | None = None
        start, parent = 0, root
        while start < len(payload):
            first = hash_block(parent, payload[start : start + stride])
            chain = chains.get(first)
            if chain is None:
                rest = [first, *hash_blocks(first, payload[start + stride :], self._block_size)]
                self._remember(rest, payload[start:], ended)
                keys += rest
                break
            path.append(first)
            num_common = _num_common_blocks(chain.payload, payload, start, stride)
            ended = chain if num_common == len(chain.keys) else None
            keys += chain.keys[:num_common]
            start += num_common * stride
            parent = keys[-1]
        # Backwards: a chain is of no use without the one that it branches off.
        for first in reversed(path):
            chains.move_to_end(first)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= chains.popitem(last=False)[1].num_bytes
        return keys

    def _remember(self, keys: list[BlockKey], payload: bytes, ended: _Chain | None) -> None:
        """Keep blocks as a chain of their own, or behind the one that they go on."""
        chain = ended
        if chain is None:
            chain = self._chains[keys[0]] = _Chain()
            self._num_bytes += BYTES_PER_CHAIN
        chain.payload += payload
        chain.keys += keys
        self._num_bytes += len(payload) + BYTES_PER_KEY * len(keys)


def _num_common_blocks(kept: bytes, payload: bytes, start: int, stride: int) -> int:
    """Return how many leading blocks of `kept` are those of `payload` from `start` on."""
    size = min(len(kept), len(payload) - start) // 4
    differs = np.frombuffer(kept, np.int32, size) != np.frombuffer(payload, np.int32, size, start)
    first = int(differs.argmax())
    return (4 * first if differs[first] else 4 * size) // stride
