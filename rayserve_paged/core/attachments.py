"""Content that stands behind placeholder tokens of a prompt: what it is, and where it lies."""

import dataclasses
import struct
from collections.abc import Iterable

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.field_checks import check_integer

MIN_DIGEST_BYTES = 16
MAX_DIGEST_BYTES = 64

_HEADER = struct.Struct("<Iqq")  # digest bytes, offset from the block's first slot, num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Attachment:
    """One piece of content, such as an image, that stands behind tokens of a prompt.

    Args:
        digest: Of the content and of whatever shapes its embeddings, by a cryptographic hash; 16
            to 64 bytes. Two contents of one digest are one.
        offset: Prompt token that is the first of it, from 0.
        num_tokens: Tokens that stand for it, at least 1.

    Raises:
        InvalidInputError: A field is of another type or range.
    """

    digest: bytes
    offset: int
    num_tokens: int

    def __post_init__(self) -> None:
        """Check each field by itself."""
        digest: object = self.digest
        accepted = f"{MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} bytes"
        if not isinstance(digest, bytes):
            raise InvalidInputError("attachment.digest", digest, accepted)
        if not MIN_DIGEST_BYTES <= len(digest) <= MAX_DIGEST_BYTES:
            raise InvalidInputError("attachment.digest", digest, accepted)
        check_integer("attachment.offset", self.offset, "an integer of at least 0", 0)
        check_integer("attachment.num_tokens", self.num_tokens, "an integer of at least 1", 1)

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.offset + self.num_tokens


def check_attachments(attachments: object, num_prompt: int, *, supported: bool) -> None:
    """Check a request's attachments against its prompt and its model.

    Args:
        attachments: As the request holds them.
        num_prompt: Tokens of the prompt.
        supported: Whether the model takes any.

    Raises:
        InvalidInputError: They are no tuple of attachments in the order of their tokens, two of
            them overlap, one lies outside the prompt, or the model takes none.
    """
    if not isinstance(attachments, tuple) or not all(
        isinstance(attachment, Attachment) for attachment in attachments
    ):
        raise InvalidInputError("attachments", attachments, "a tuple of Attachment")
    if attachments and not supported:
        raise InvalidInputError("attachments", attachments, "none, for a model that takes none")
    end = 0
    for index, attachment in enumerate(attachments):
        if attachment.offset < end:
            accepted = f"at least {end}: attachments follow one another and do not overlap"
            raise InvalidInputError(f"attachments[{index}].offset", attachment.offset, accepted)
        if attachment.offset >= num_prompt:
            accepted = f"at most {num_prompt - 1}, a token of the prompt"
            raise InvalidInputError(f"attachments[{index}].offset", attachment.offset, accepted)
        end = attachment.end
        if end > num_prompt:
            accepted = f"at most {num_prompt - attachment.offset}, up to the end of the prompt"
            field = f"attachments[{index}].num_tokens"
            raise InvalidInputError(field, attachment.num_tokens, accepted)


def content_by_block(
    attachments: Iterable[Attachment], first_token: int, num_blocks: int, block_size: int
) -> dict[int, bytes]:
    """Return what the keys of blocks must hold of the content behind their tokens.

    Args:
        attachments: In the order of their tokens.
        first_token: Of the first block.
        num_blocks: Blocks from there on.
        block_size: Tokens per block.

    Returns:
        For each of these blocks that some attachment reaches into: the whole digest of each one,
        where it begins as seen from the block, and its length.
    """
    content: dict[int, bytes] = {}
    for attachment in attachments:
        offset = attachment.offset - first_token
        end = -(-(offset + attachment.num_tokens) // block_size)
        for block in range(max(0, offset // block_size), min(num_blocks, end)):
            header = _HEADER.pack(
                len(attachment.digest), offset - block * block_size, attachment.num_tokens
            )
            content[block] = content.get(block, b"") + header + attachment.digest
    return content
