"""Turns the token ids of one stream into text, without splitting characters or stop strings."""

import codecs
import dataclasses
from collections.abc import Callable, Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a stream.

    Args:
        text: What may be shown; never part of a stop string or of a character.
        num_tokens: Tokens taken of those handed in; fewer than all only where a stop string was
            completed before the last.
        stop: The stop string that ended the text, or None.
    """

    text: str
    num_tokens: int
    stop: str | None


class Detokenizer:
    """The text of one stream, token by token.

    The deltas of a stream, with what `finish` returns, are the decoded bytes of its tokens, cut
    before (or behind) the stop string if one ended it, however the tokens were chunked. Invalid
    bytes become U+FFFD as soon as they are known to be invalid, and not before.

    Stop strings are looked for after each token. Of those completed by the same token, the one
    with the earliest start ends the text. One that is completed by a token before the
    `min_tokens`-th does not end it.

    Args:
        token_bytes: The bytes that a token stands for (`Tokenizer.token_bytes`).
        stop: Strings that end the text and are no part of it.
        min_tokens: Fewest tokens of the stream.
        includes_stop: Show the stop string that ends the text after all.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        includes_stop: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._includes_stop = includes_stop
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The end of the decoded text that is the beginning of a stop string, not shown yet.
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Take the next tokens of the stream and return the text that they release."""
        shown: list[str] = []
        taken = 0
        for token_id in token_ids:
            taken += 1
            self._num_tokens += 1
            new = self._decoder.decode(self._token_bytes(token_id))
            if not new:
                continue
            text = self._held + new
            if self._num_tokens >= self._min_tokens:
                start, stop = self._first_stop(text)
                if stop is not None:
                    shown.append(text[: start + len(stop)] if self._includes_stop else text[:start])
                    self._held = ""
                    self._decoder.reset()
                    return TextDelta("".join(shown), taken, stop)
            cut = len(text) - self._num_held(text)
            shown.append(text[:cut])
            self._held = text[cut:]
        return TextDelta("".join(shown), taken, None)

    def finish(self) -> str:
        """Return what was held back; a character cut off by the end becomes one U+FFFD."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return text

    def _first_stop(self, text: str) -> tuple[int, str | None]:
        # Only matches that end behind the held text are new: what it holds was either looked at
        # before or came too early to count.
        num_old = len(self._held)
        start, found = len(text), None
        for stop in self._stop:
            place = text.find(stop, max(0, num_old - len(stop) + 1))
            if 0 <= place < start:
                start, found = place, stop
        return start, found

    def _num_held(self, text: str) -> int:
        # No complete match can begin before the longest suffix that begins a stop string.
        return max((_overlap(text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
