from hypothesis import given
from hypothesis import strategies as st

from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.prefix_index import PrefixIndex

A, B, C = (BlockKey(bytes([letter]) * 32) for letter in b"abc")


def test_a_fingerprint_is_the_first_64_bits_of_a_key() -> None:
    index = PrefixIndex(10)
    index.publish(BlockKey(bytes(range(1, 33))), BlockId(4))
    assert index.fingerprint_of(BlockId(4)) == 0x0807060504030201


def test_the_longest_leading_run_is_matched() -> None:
    index = PrefixIndex(10)
    index.publish(A, BlockId(4))
    index.publish(C, BlockId(6))
    assert index.match([A, B, C]) == [4]
    index.publish(B, BlockId(5))
    assert index.match([A, B, C]) == [4, 5, 6]
    assert index.match([B]) == [5]
    assert index.match([]) == []


def test_a_second_block_of_equal_content_stays_private() -> None:
    index = PrefixIndex(10)
    assert index.publish(A, BlockId(4))
    assert not index.publish(A, BlockId(5))
    assert index.match([A]) == [4]
    assert index.key_of(BlockId(5)) is None
    index.remove([BlockId(5)])
    assert index.match([A]) == [4]


def test_a_removed_block_is_not_matched() -> None:
    index = PrefixIndex(10)
    index.publish(A, BlockId(4))
    index.remove([BlockId(4), BlockId(9)])
    assert (index.match([A]), len(index), index.key_of(BlockId(4))) == ([], 0, None)


def test_changes_are_told_once_and_in_order() -> None:
    index = PrefixIndex(10)
    assert not index.has_changes
    index.publish(B, BlockId(1))
    index.publish(A, BlockId(2))
    assert index.has_changes
    assert index.take_changes() == ((B, A), ())
    assert index.take_changes() == ((), ())
    index.remove([BlockId(1)])
    assert index.has_changes
    assert index.take_changes() == ((), (B,))
    assert not index.has_changes
    assert index.take_changes() == ((), ())


def test_what_came_and_went_between_two_reports_is_not_told() -> None:
    index = PrefixIndex(10)
    index.publish(A, BlockId(1))
    index.remove([BlockId(1)])
    assert not index.has_changes
    index.publish(A, BlockId(1))
    index.take_changes()
    index.remove([BlockId(1)])
    index.publish(A, BlockId(2))
    assert not index.has_changes
    assert list(index.items()) == [(A, 2)]


def test_a_block_that_is_published_again_by_a_fork_has_not_changed() -> None:
    index = PrefixIndex(10)
    assert index.publish(A, BlockId(3))
    assert index.publish(A, BlockId(3))
    assert index.take_changes() == ((A,), ())
    assert index.publish(A, BlockId(3))
    assert not index.has_changes


def test_a_run_is_published_as_a_whole_or_not_at_all() -> None:
    index = PrefixIndex(10)
    assert index.publish_run([A, B], [BlockId(4), BlockId(5)])
    assert (index.match([A, B]), index.key_of(BlockId(5)), index.num_published) == ([4, 5], B, 2)
    assert index.take_changes() == ((A, B), ())
    assert not index.publish_run([C, B], [BlockId(6), BlockId(7)])
    assert (index.match([C]), index.key_of(BlockId(6)), index.num_published) == ([], None, 2)
    assert not index.has_changes


@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=1, unique=True),
            st.integers(0, 5),
            st.none(),
        )
    )
)
def test_a_run_changes_what_its_blocks_change_one_by_one(
    events: list[list[int] | int | None],
) -> None:
    """A list publishes keys, a number removes a block, None takes the changes."""
    keys = [BlockKey(bytes([number]) * 32) for number in range(6)]
    by_run, one_by_one = PrefixIndex(100), PrefixIndex(100)
    free = iter(range(100))
    for event in events:
        if event is None:
            assert by_run.take_changes() == one_by_one.take_changes()
        elif isinstance(event, int):
            block_id = one_by_one.block_of(keys[event])
            for index in (by_run, one_by_one):
                index.remove([] if block_id is None else [block_id])
        elif all(keys[number] not in one_by_one for number in event):
            block_ids = [BlockId(next(free)) for _ in event]
            assert by_run.publish_run([keys[number] for number in event], block_ids)
            for number, block_id in zip(event, block_ids, strict=True):
                assert one_by_one.publish(keys[number], block_id)
        else:
            assert not by_run.publish_run([keys[number] for number in event], [BlockId(99)] * 6)
        assert dict(by_run.items()) == dict(one_by_one.items())
        assert by_run.num_published == one_by_one.num_published
        assert by_run.has_changes == one_by_one.has_changes
    assert by_run.take_changes() == one_by_one.take_changes()
