"""Made-up tokens: pure functions of a stream's number and a position, spread over the ids."""

import numpy as np

from rayserve_paged.sim.token_streams import (
    Segment,
    answer_stream,
    make_prompt,
    stream_number,
    tokens_at,
)


def test_a_segment_is_the_same_tokens_wherever_it_stands() -> None:
    story = Segment(stream_number(1, 2), 100)
    alone = make_prompt((story,), 50_000)
    later = make_prompt((Segment(7, 13), story), 50_000)
    rest = make_prompt((Segment(story.stream, 60, start=40),), 50_000)
    assert len(alone) == 100
    assert later[13:] == alone
    assert rest == alone[40:]


def test_ids_are_spread_evenly_and_all_inside_the_vocabulary() -> None:
    tokens = tokens_at(np.full(160_000, 5, np.uint64), np.arange(160_000), 16)
    assert tokens.dtype == np.int32
    counts = np.bincount(tokens, minlength=16)
    assert len(counts) == 16
    # Six standard deviations of a fair draw.
    assert np.abs(counts - 10_000).max() < 6 * 97


def test_streams_share_no_tokens_but_by_chance() -> None:
    numbers = [stream_number(0, i) for i in range(50)] + [answer_stream(i) for i in range(50)]
    assert len({make_prompt((Segment(number, 8),), 128_256) for number in numbers}) == 100
    assert len({answer_stream(3, sibling) for sibling in range(10)}) == 10


def test_tokens_are_the_upper_bits_of_the_published_generator() -> None:
    # The first numbers that SplitMix64 gives from the state 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    tokens = make_prompt((Segment(1234567, 3, start=1),), 2**31)
    assert list(tokens) == [number >> 33 for number in published]
