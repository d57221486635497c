from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.prefix_index import PrefixIndex

A, B, C = (BlockKey(bytes([letter]) * 32) for letter in b"abc")


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
    assert index.take_changes() == ((), (B,))


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
