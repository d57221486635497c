import pytest

from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
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
    assert (num_blocks_for(0, 4), num_tokens_in_last_block(0, 4)) == (0, 0)


def held(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


def test_trimming_takes_out_the_middle_and_keeps_every_position() -> None:
    table = BlockTable(2, held(5, 1, 6, 0, 3, 4), [AttentionWindow(4, 2)])
    assert table.next_trim() == 7
    assert table.trim(6) == [[]]
    assert table.trim(10) == [[1, 6]]
    assert table.block_ids == [5, 0, 3, 4]
    assert (table.num_places, table.num_slots) == (6, 12)
    assert [table.slot(position) for position in (0, 1, 6, 7, 11)] == [10, 11, 0, 1, 9]
    assert table.places() == [5, None, None, 0, 3, 4]
    assert table.next_trim() == 11
    with pytest.raises(IndexError, match="block 2 of the sequence was trimmed"):
        table.slot(4)


def test_a_run_is_found_behind_a_hole() -> None:
    table = BlockTable(2, held(*range(10, 20)), [AttentionWindow(5, 1)])
    table.trim(12)
    assert table.run(0, 1) == [10]
    with pytest.raises(IndexError, match="block 1 of the sequence was trimmed"):
        table.run(1, 3)
    assert table.run(6, 9) == [16, 17, 18]
    assert table.run(9, 9) == []


def test_a_table_with_a_hole_grows_and_is_copied_with_it() -> None:
    table = BlockTable(2, [BlockId(5), None, BlockId(3)], [AttentionWindow(2, 1)])
    assert table.num_missing(8) == 1
    table.append(held(7))
    child = table.copy()
    child.append(held(8))
    assert child.places() == [5, None, 3, 7, 8]
    assert table.places() == [5, None, 3, 7]
    assert child.trim(8) == [[3]]
    assert child.places() == [5, None, None, 7, 8]


def test_blocks_on_both_sides_of_a_hole_are_two_chains_and_each_knows_its_place() -> None:
    table = BlockTable(2, held(*range(10, 16)), [AttentionWindow(4, 3)])
    (group,) = table.groups
    assert table.chains() == [[10, 11, 12, 13, 14, 15]]
    assert group.held_places() == [0, 1, 2, 3, 4, 5]
    table.trim(11)
    assert table.chains() == [[10, 11], [14, 15]]
    assert group.held_places() == [0, 1, 4, 5]
    assert (table.at(1), table.at(4)) == ([11], [14])


def test_a_table_that_is_shorter_than_its_sinks_has_no_hole() -> None:
    table = BlockTable(2, held(7), [AttentionWindow(4, 6)])
    (group,) = table.groups
    assert (table.chains(), table.places(), group.held_places()) == ([[7]], [7], [0])
    assert table.at(0) == [7]


def test_without_sinks_a_hole_leads_and_what_is_behind_it_is_one_chain() -> None:
    table = BlockTable(2, held(*range(10, 16)), [AttentionWindow(4)])
    (group,) = table.groups
    assert table.trim(9) == [[10, 11, 12]]
    assert table.chains() == [[13, 14, 15]]
    assert (table.places(), group.held_places()) == ([None] * 3 + [13, 14, 15], [3, 4, 5])


def test_the_table_that_is_to_be_trimmed_first_decides_when() -> None:
    windows = [AttentionWindow(6), FULL_ATTENTION, AttentionWindow(2)]
    assert BlockTable(2, (), windows).next_trim() == 3
    assert BlockTable(2, (), windows[:2]).next_trim() == 7


def test_a_cleared_table_begins_anew() -> None:
    table = BlockTable(2, held(*range(10, 16)), [AttentionWindow(4)])
    table.trim(9)
    table.clear()
    assert (table.block_ids, table.places(), table.num_places) == ([], [], 0)
    table.append(held(3))
    assert table.places() == [3]


def test_a_run_is_of_the_first_layer_group() -> None:
    windows = [FULL_ATTENTION, AttentionWindow(2)]
    assert BlockTable(2, held(0, 1, 2, 3, 4, 5), windows).run(1, 3) == [2, 4]


def test_layer_groups_have_the_same_places_and_trim_for_themselves() -> None:
    windows = [FULL_ATTENTION, AttentionWindow(2)]
    table = BlockTable(2, (), windows)
    assert table.num_missing(5) == 6
    table.append(held(0, 1, 2, 3, 4, 5))
    assert table.at(1) == [2, 3]
    assert table.trim(5) == [[], [1, 3]]
    assert table.block_ids == [0, 2, 4, 5]
    assert table.places() == [0, None, 2, None, 4, 5]
    assert (table.slot(2, 0), table.slot(4, 0), table.slot(4, 1)) == (4, 8, 10)
    assert [group.num_live(5) for group in table.groups] == [5, 1]
    assert BlockTable(2, table.places(), windows).places() == table.places()


def test_a_windowed_table_grows_by_no_more_than_its_window_needs() -> None:
    table = BlockTable(4, held(0, 1), [AttentionWindow(16)])
    assert [table.num_growing(n) for n in (8, 9, 12, 20, 1000)] == [0, 1, 1, 3, 3]
    full = BlockTable(4, held(0, 1))
    assert [full.num_growing(n) for n in (8, 9, 12, 20, 1000)] == [0, 1, 1, 3, 248]
    assert not full.has_window
    assert full.next_trim() is None
    assert full.trim(1000) == [[]]
