"""Token ids that are made up: streams of them, each a pure function of its number.

Equal prefixes must be equal tokens for the block keys to match, so a prompt is cut out of numbered
streams: a hash id of a trace is one, a system prompt is one, and the answer of a request is one,
which a later turn of the session quotes. Where a prompt's tokens come from is then a few numbers,
and they are made when the request arrives.

Source: the mixing function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.token_ids import TokenIds

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ANSWER = 0x616E73776572  # Keeps answers apart from what workloads number themselves.

_U64 = np.uint64
Streams = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A run of one stream's tokens.

    Args:
        stream: Which stream, as `stream_number` makes it.
        num_tokens: How many tokens.
        start: Position of the first.
    """

    stream: int
    num_tokens: int
    start: int = 0


def stream_number(*parts: int) -> int:
    """Return the number of the stream that these numbers name, 64 bits."""
    number = 0
    for part in parts:
        number = _mix(number ^ _mix((part + _GAMMA) & _MASK))
    return number


def answer_stream(seed: int, sibling: int = 0) -> int:
    """Return the stream that a simulated request answers with: it depends on its seed alone."""
    return stream_number(_ANSWER, seed, sibling)


def tokens_at(
    streams: Streams, positions: npt.NDArray[np.int64], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Return tokens of streams.

    Args:
        streams: uint64, streams.
        positions: int64, of a shape that broadcasts with it, from 0.
        vocab_size: Ids are from 0 to vocab_size - 1.

    Returns:
        int32, of the common shape.
    """
    mixed = streams + positions.astype(_U64) * _U64(_GAMMA)
    mixed = (mixed ^ (mixed >> _U64(30))) * _U64(_MIX_1)
    mixed = (mixed ^ (mixed >> _U64(27))) * _U64(_MIX_2)
    # The upper half times the size, shifted back: evenly spread, and no division.
    scaled: Streams = ((mixed >> _U64(32)) * _U64(vocab_size)) >> _U64(32)
    return scaled.astype(np.int32)


def make_prompt(segments: Sequence[Segment], vocab_size: int) -> TokenIds:
    """Return the token ids of a prompt, segment after segment."""
    lengths = np.array([segment.num_tokens for segment in segments], np.int64)
    streams = np.array([segment.stream for segment in segments], np.uint64)
    starts = np.array([segment.start for segment in segments], np.int64)
    ends = np.cumsum(lengths)
    positions = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
    return TokenIds.of(tokens_at(np.repeat(streams, lengths), positions, vocab_size))


def _mix(number: int) -> int:
    number = ((number ^ (number >> 30)) * _MIX_1) & _MASK
    number = ((number ^ (number >> 27)) * _MIX_2) & _MASK
    return number ^ (number >> 31)
