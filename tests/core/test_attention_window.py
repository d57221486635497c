import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_paged.core.attention_window import (
    FULL_ATTENTION,
    AttentionWindow,
    group_key,
    longest_held,
    longest_hit,
    num_blocks_held,
)
from rayserve_paged.core.ids import BlockKey
from rayserve_paged.sim.fingerprint_rank import visible

WINDOWS = st.builds(AttentionWindow, st.integers(1, 20), st.integers(0, 12))
BLOCK_SIZES = st.integers(1, 6)


def places_read(num_computed: int, window: AttentionWindow, block_size: int) -> set[int]:
    """Blocks before the next token that some token to come reads, found one position at a time."""
    read = {
        position // block_size
        for query in range(num_computed, num_computed + 40)
        for position in visible(query + 1, window).tolist()
        if position < num_computed
    }
    # The last one is kept whatever the window.
    return read | {(num_computed - 1) // block_size} if num_computed else read


@given(window=WINDOWS, block_size=BLOCK_SIZES, num_computed=st.integers(0, 60))
def test_exactly_the_blocks_that_no_later_token_reads_are_unread(
    window: AttentionWindow, block_size: int, num_computed: int
) -> None:
    first = window.num_sink_blocks(block_size)
    unread = window.num_unread_blocks(num_computed, block_size)
    num_places = -(-num_computed // block_size)
    kept = {*range(min(first, num_places)), *range(first + unread, num_places)}
    assert kept >= places_read(num_computed, window, block_size)
    if unread:
        # One more would take a block that is read.
        assert first + unread in places_read(num_computed, window, block_size)


@given(window=WINDOWS, block_size=BLOCK_SIZES, num_trimmed=st.integers(0, 8))
def test_the_next_trim_is_due_at_the_first_length_that_has_more_to_trim(
    window: AttentionWindow, block_size: int, num_trimmed: int
) -> None:
    due = window.num_computed_to_trim(num_trimmed, block_size)
    assert due is not None
    assert window.num_unread_blocks(due, block_size) == num_trimmed + 1
    assert window.num_unread_blocks(due - 1, block_size) == num_trimmed


def test_full_attention_keeps_everything() -> None:
    assert FULL_ATTENTION.num_unread_blocks(10**6, 4) == 0
    assert FULL_ATTENTION.num_computed_to_trim(0, 4) is None
    assert FULL_ATTENTION.most_blocks(4) is None
    assert AttentionWindow(None, 3).num_sink_blocks(4) == 0


@pytest.mark.parametrize(
    ("size", "sinks", "block_size", "most"),
    [(16, 0, 4, 5), (17, 0, 4, 5), (18, 0, 4, 6), (16, 1, 4, 6), (16, 5, 4, 7), (1, 0, 4, 2)],
)
def test_a_window_bounds_the_blocks_of_a_sequence(
    size: int, sinks: int, block_size: int, most: int
) -> None:
    window = AttentionWindow(size, sinks)
    assert window.most_blocks(block_size) == most
    lengths = [num_blocks_held([window], n, block_size) for n in (0, 1, 4, 5, 10**6)]
    assert lengths == [0, 1, 1, 2, most]


def test_layer_groups_add_up() -> None:
    windows = [FULL_ATTENTION, AttentionWindow(16)]
    assert [num_blocks_held(windows, n, 4) for n in (4, 20, 24, 100)] == [2, 10, 11, 30]
    assert longest_held(windows, 11, 4, 1000) == 24
    assert longest_held(windows, 30, 4, 1000) == 100
    assert longest_held(windows, 30, 4, 50) == 50
    assert longest_held([AttentionWindow(16)], 5, 4, 1000) == 1000
    assert longest_held([AttentionWindow(16)], 4, 4, 1000) == 16
    assert longest_held([FULL_ATTENTION], 4, 4, 1000) == 16


def test_the_smaller_window_holds_with_its_own_sinks() -> None:
    model, request = AttentionWindow(8, 1), AttentionWindow(4, 2)
    assert model.tighter(request) is request
    assert request.tighter(model) is request
    assert FULL_ATTENTION.tighter(model) is model
    assert model.tighter(FULL_ATTENTION) is model
    assert FULL_ATTENTION.tighter(FULL_ATTENTION) is FULL_ATTENTION
    assert model.tighter(AttentionWindow(8, 5)) is model


@given(
    present=st.lists(st.booleans(), max_size=16),
    window=WINDOWS | st.just(FULL_ATTENTION),
    block_size=BLOCK_SIZES,
)
def test_a_hit_is_the_longest_prefix_of_which_all_that_is_read_is_there(
    present: list[bool], window: AttentionWindow, block_size: int
) -> None:
    def is_hit(num_blocks: int) -> bool:
        first = window.num_sink_blocks(block_size)
        unread = window.num_unread_blocks(num_blocks * block_size, block_size)
        needed = [*range(min(first, num_blocks)), *range(first + unread, num_blocks)]
        return all(present[place] for place in needed)

    for at_most in range(len(present) + 1):
        longest = max(n for n in range(at_most + 1) if is_hit(n))
        assert longest_hit(present, window, block_size, at_most) == longest


def test_nothing_is_hit_where_nothing_is_cached_however_small_the_window() -> None:
    assert longest_hit([False] * 5, AttentionWindow(1), 4, 5) == 0


def test_each_layer_group_has_keys_of_its_own() -> None:
    key = BlockKey(bytes(range(32)))
    keys = [group_key(key, group) for group in range(256)]
    assert keys[0] == key
    assert len(set(keys)) == 256
    assert {len(one) for one in keys} == {32}
