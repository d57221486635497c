"""What makes the KV of a row's tokens besides their ids and places: its adapter, attachments."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import Adapter

Salts = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class RowContent:
    """The adapter of a row, and the content behind tokens of its prompt.

    Args:
        adapter: None for the model as it is.
        attachments: In the order of their tokens.
    """

    adapter: Adapter | None
    attachments: tuple[Attachment, ...] = ()

    def salts(self, first_token: int, num_tokens: int) -> Salts:
        """Return a number for each token that changes with its adapter and with its content.

        Args:
            first_token: Place of the first one.
            num_tokens: Tokens from there on.

        Returns:
            int64 [num_tokens], 0 where a token has neither.
        """
        salts = np.zeros(num_tokens, np.int64)
        if self.adapter is not None:
            salts ^= _number(_join(self.adapter.adapter_id, self.adapter.version))
        for attachment in self.attachments:
            start = max(attachment.offset, first_token)
            end = min(attachment.end, first_token + num_tokens)
            for place in range(start, end):
                # Each token of a content has other embeddings, so place in it is part of them.
                part = attachment.digest + (place - attachment.offset).to_bytes(8, "little")
                salts[place - first_token] ^= _number(part)
        return salts


def _join(*texts: str) -> bytes:
    parts = [text.encode(errors="surrogatepass") for text in texts]
    return b"".join(b"%d:" % len(part) + part for part in parts)


def _number(content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
