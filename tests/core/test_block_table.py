import pytest

from rayserve_paged.core.block_table import BlockTable, num_blocks_for, num_tokens_in_last_block
from rayserve_paged.core.ids import BlockId


def test_a_slot_is_the_block_times_the_block_size_plus_the_offset() -> None:
    table = BlockTable(4, [BlockId(5), BlockId(1), BlockId(6)])
    slots = [table.slot(position) for position in (0, 3, 4, 7, 8, 11)]
    assert slots == [20, 23, 4, 7, 24, 27]


def test_a_position_without_a_block_has_no_slot() -> None:
    table = BlockTable(4, [BlockId(5)])
    with pytest.raises(IndexError):
        table.slot(4)


def test_a_table_says_how_many_blocks_it_lacks() -> None:
    table = BlockTable(4, [BlockId(5)])
    assert [table.num_missing(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_appended_blocks_come_at_the_end() -> None:
    table = BlockTable(2)
    assert table.num_slots == 0
    table.append([BlockId(3)])
    table.append([BlockId(0), BlockId(2)])
    assert table.block_ids == [3, 0, 2]
    assert table.num_slots == 6


def test_a_table_does_not_share_its_list_with_who_made_it() -> None:
    given = [BlockId(1)]
    table = BlockTable(2, given)
    table.append([BlockId(2)])
    assert given == [1]


def test_tokens_fill_blocks_and_the_last_one_in_part() -> None:
    for num_tokens in range(1, 40):
        for block_size in range(1, 9):
            num_blocks = num_blocks_for(num_tokens, block_size)
            last = num_tokens_in_last_block(num_tokens, block_size)
            assert 1 <= last <= block_size
            assert (num_blocks - 1) * block_size + last == num_tokens
