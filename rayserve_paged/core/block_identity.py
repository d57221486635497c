"""Identity of a sealed block: a SHA-256 chain over tokens and content, rooted in a scope.

A block may be shared only where its key matches. The scope (which weights and adapter, which
numerics, whose tenant) is hashed once, as the root; each block then hashes its parent's key, its
own tokens, and the digests of the content that stands behind these. The chain is the same in every
process and on every machine.

Source: the hash chain of prefix caching in PagedAttention servers (Kwon et al., SOSP 2023,
section 4.4), with a cryptographic digest in place of a 64-bit one.
"""

import dataclasses
import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.attachments import Attachment, content_by_block
from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.token_ids import TokenIds

KEY_BYTES = 32

_NO_CONTENT: Final[Mapping[int, bytes]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """Weights that are laid over a model's own.

    Both fields are part of every key, so an adapter that is loaded anew under its old id does not
    find the KV of its old weights.

    Args:
        adapter_id: Which adapter; a name that users call it by may be given to another one.
        version: Of its weights: whatever changes with them, such as their digest.

    Raises:
        InvalidInputError: A field is no text, or an empty one.
    """

    adapter_id: str
    version: str

    def __post_init__(self) -> None:
        """Check both fields."""
        for field in ("adapter_id", "version"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"adapter.{field}", value, "a text that is not empty")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestScope:
    """What a request adds to the scope of its replica.

    Args:
        tenant_salt: None is a tenant of its own, different from every string.
        adapter: None for the model as it is.
        window: What tokens attend to, where the request limits it: the KV of every layer but the
            first depends on what was attended to before.
    """

    tenant_salt: str | None = None
    adapter: Adapter | None = None
    window: AttentionWindow | None = None

    def windows(self, layer_groups: tuple[AttentionWindow, ...]) -> tuple[AttentionWindow, ...]:
        """Return what each layer group attends to for such a request: the smaller window, with
        its own sinks, where both the model and the request have one.
        """
        if self.window is None:
            return layer_groups
        return tuple(group.tighter(self.window) for group in layer_groups)


NO_SCOPE = RequestScope()


@dataclasses.dataclass(frozen=True, slots=True)
class BlockScope:
    """All that makes equal tokens give equal KV bytes, besides the tokens before them.

    Args:
        model_fingerprint: Digest of the weights and of the configuration that shapes the KV.
        dtype: Of the computation, such as "fp32".
        kv_dtype: Of the cache.
        numerics: Class of kernels and reductions whose results may be mixed.
        positions: Position semantics: rotary parameters and window policy.
        block_size: Slots per block; the chain advances once per block.
    """

    model_fingerprint: bytes
    dtype: str
    kv_dtype: str
    numerics: str
    positions: str
    block_size: int

    def root(self, of: RequestScope = NO_SCOPE) -> BlockKey:
        """Return the parent of every first block of the requests that have one scope.

        Args:
            of: What the requests add to this scope.
        """
        return _root(self, of)


@functools.lru_cache(maxsize=4096)
def _root(scope: BlockScope, of: RequestScope) -> BlockKey:
    digest = hashlib.sha256(b"rayserve-paged/block/2")
    adapter, window = of.adapter, of.window
    fields: list[bytes | None] = [
        scope.model_fingerprint,
        scope.dtype.encode(),
        scope.kv_dtype.encode(),
        scope.numerics.encode(),
        scope.positions.encode(),
        str(scope.block_size).encode(),
        _text(of.tenant_salt),
        _text(None if adapter is None else adapter.adapter_id),
        _text(None if adapter is None else adapter.version),
        None if window is None else f"{window.size}+{window.num_sink_tokens}".encode(),
    ]
    for field in fields:
        # Length first, so that no two lists of fields run together into the same bytes.
        digest.update(b"-" if field is None else b"%d:" % len(field))
        digest.update(field or b"")
    return BlockKey(digest.digest())


def _text(text: str | None) -> bytes | None:
    # What comes from JSON may hold half of a surrogate pair.
    return None if text is None else text.encode(errors="surrogatepass")


def extend_chain(
    parent: BlockKey,
    token_ids: Sequence[int] | npt.NDArray[np.int32],
    block_size: int,
    attachments: Sequence[Attachment] = (),
    first_token: int = 0,
) -> list[BlockKey]:
    """Return the keys of the full blocks of `token_ids`; a partial last block has none.

    Args:
        parent: Key of the block before `token_ids`, or the scope's root.
        token_ids: [num_tokens], beginning at a block's first slot.
        block_size: Tokens per block.
        attachments: Content behind tokens of the sequence, in their order.
        first_token: Place of `token_ids[0]` in the sequence, for the attachments' offsets.
    """
    payload = token_payload(token_ids)
    if not attachments:
        return hash_blocks(parent, payload, block_size)
    num_blocks = len(payload) // (4 * block_size)
    content = content_by_block(attachments, first_token, num_blocks, block_size)
    return hash_blocks(parent, payload, block_size, content)


def hash_blocks(
    parent: BlockKey, payload: bytes, block_size: int, content: Mapping[int, bytes] = _NO_CONTENT
) -> list[BlockKey]:
    """Return the keys of the full blocks of packed tokens; a partial last block has none.

    Args:
        parent: Key of the block before, or the scope's root.
        payload: As `token_payload` packs them.
        block_size: Tokens per block.
        content: By block, what stands behind its tokens, as `content_by_block` returns it.
    """
    stride = 4 * block_size
    blocks = struct.iter_unpack(f"{stride}s", payload[: len(payload) // stride * stride])
    sha256 = hashlib.sha256
    # One call over parent and tokens is twice as fast as two.
    digest: bytes = parent
    if content:
        # Behind tokens of fixed size, so that no block without content has the same bytes.
        keys = [
            digest := sha256(digest + tokens + content.get(block, b"")).digest()
            for block, (tokens,) in enumerate(blocks)
        ]
    else:
        keys = [digest := sha256(digest + tokens).digest() for (tokens,) in blocks]
    # Not made BlockKeys one by one: that is a call each.
    return cast("list[BlockKey]", keys)


def hash_block(parent: BlockKey, payload: bytes) -> BlockKey:
    """Return the key of one block without content behind its tokens.

    Args:
        parent: Key of the block before, or the scope's root.
        payload: Its packed tokens.
    """
    return BlockKey(hashlib.sha256(parent + payload).digest())


def token_payload(token_ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Return tokens as little-endian int32."""
    # An array first: that is what a sequence has, which decodes.
    if isinstance(token_ids, array) and token_ids.typecode == "i" and sys.byteorder == "little":
        return token_ids.tobytes()
    if isinstance(token_ids, np.ndarray):
        return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    if isinstance(token_ids, TokenIds):
        return token_ids.packed
    # Half the time that numpy takes for a list.
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
