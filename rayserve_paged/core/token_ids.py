"""The token ids of a prompt: a sequence of integers that never changes, four bytes each.

A prompt of many thousands of ids goes from its consumer to the controller, to a replica and, in an
event log, to a file. As one run of bytes it is sent, compared, checked and hashed at once, where a
tuple would cost a step of Python for each id and each time.
"""

import contextlib
import dataclasses
import operator
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, SupportsIndex, cast, overload

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.errors import InvalidInputError

MAX_VOCAB_SIZE: Final = 2**31

_BYTES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TokenIds(Sequence[int]):
    """Ids from 0 to MAX_VOCAB_SIZE - 1. Equal to another one of equal ids, and to nothing else.

    Args:
        packed: As little-endian int32, the form in which block keys hash them; `of` packs ids.
    """

    packed: bytes

    @classmethod
    def of(
        cls,
        token_ids: Sequence[object] | npt.NDArray[np.integer],
        vocab_size: int = MAX_VOCAB_SIZE,
        field: str = "prompt_token_ids",
    ) -> "TokenIds":
        """Check ids and pack them.

        Args:
            token_ids: [num_tokens].
            vocab_size: Ids are below it.
            field: Name of what holds them, for an error.

        Raises:
            InvalidInputError: With the first that is not an integer in [0, vocab_size).
        """
        if isinstance(token_ids, TokenIds):
            token_ids.check(vocab_size, field)
            return token_ids
        if isinstance(token_ids, np.ndarray):
            if token_ids.dtype == np.int32:
                packed = cls(token_ids.astype("<i4", copy=False).tobytes())
                packed.check(vocab_size, field)
                return packed
            token_ids = cast("list[object]", token_ids.tolist())
        ids: TokenIds | None = None
        # What is no integer, or needs more than four bytes, is an error.
        with contextlib.suppress(struct.error):
            ids = cls(struct.pack(f"<{len(token_ids)}i", *token_ids))
        if ids is None or not ids._is_below(vocab_size) or ids._was_bool(token_ids):
            first = next(each for each in token_ids if not _is_id(each, vocab_size))
            raise _refusal(field, first, vocab_size)
        return ids

    def check(self, vocab_size: int, field: str = "prompt_token_ids") -> None:
        """Check that all ids are below the size of a vocabulary.

        Raises:
            InvalidInputError: With the first that is not.
        """
        if not self._is_below(vocab_size):
            first = next(each for each in self if not _is_id(each, vocab_size))
            raise _refusal(field, first, vocab_size)

    def _is_below(self, vocab_size: int) -> bool:
        # Unsigned, so that what is below 0 is large.
        return not self.packed or bool(np.frombuffer(self.packed, "<u4").max() < vocab_size)

    def _was_bool(self, token_ids: Sequence[object]) -> bool:
        """Return whether any of the ids that these were packed from was no number to a user."""
        small = np.flatnonzero(self.view <= 1).tolist()
        return any(isinstance(token_ids[index], bool) for index in small)

    @property
    def view(self) -> npt.NDArray[np.int32]:
        """A view that cannot be written, int32 [num_tokens]."""
        return np.frombuffer(self.packed, "<i4")

    def unpacked(self) -> "array[int]":
        """Return a copy that can be changed, of type "i"."""
        ids = array("i")
        ids.frombytes(self.packed)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids

    def __len__(self) -> int:
        return len(self.packed) // _BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "TokenIds": ...

    def __getitem__(self, index: int | slice) -> "int | TokenIds":
        if isinstance(index, slice):
            return TokenIds(self.view[index].tobytes())
        return int(self.view[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.view.tolist())

    def __repr__(self) -> str:
        return f"TokenIds({self.view.tolist()})"


def _is_id(value: object, vocab_size: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return False
    return 0 <= operator.index(value) < vocab_size


def _refusal(field: str, value: object, vocab_size: int) -> InvalidInputError:
    return InvalidInputError(field, value, f"integers from 0 to {vocab_size - 1}")
