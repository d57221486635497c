"""The block that shares the most leading tokens is found, and nothing is kept twice."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rayserve_paged.core.ids import BlockId, BlockKey
from rayserve_paged.core.partial_index import BlockContent, PartialIndex, PartialMatch

ROOT, OTHER = BlockKey(b"root"), BlockKey(b"other")
TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 2**31 - 1]), min_size=1, max_size=4)


def holding(*blocks: list[int], parent: BlockKey = ROOT) -> PartialIndex:
    index = PartialIndex(num_blocks=8, block_size=4)
    for block_id, tokens in enumerate(blocks):
        index.add(BlockId(block_id), BlockContent(parent, tokens))
    return index


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _pair in equal)


def found(index: PartialIndex, *tokens: int, parent: BlockKey = ROOT) -> tuple[int, int] | None:
    return index.find(BlockContent(parent, tokens))


def test_the_most_common_leading_tokens_win() -> None:
    index = holding([1, 2, 3, 4], [1, 2, 9], [1, 8, 8, 8], [5])
    assert found(index, 1, 2, 9, 9) == (1, 3)
    assert found(index, 1, 2, 3) == (0, 3)
    assert found(index, 1, 8) == (2, 2)
    assert found(index, 5, 5, 5, 5) == (3, 1)
    assert found(index, 6) is None
    assert found(index) is None


def test_blocks_behind_another_parent_are_not_found() -> None:
    index = holding([1, 2, 3, 4])
    assert found(index, 1, 2, parent=OTHER) is None


def test_a_block_that_holds_nothing_new_is_not_let_in() -> None:
    index = holding([1, 2, 3])
    for tokens in ([1], [1, 2], [1, 2, 3]):
        assert index.add(BlockId(5), BlockContent(ROOT, tokens)) == 5
        assert BlockId(5) not in index
    assert index.add(BlockId(5), BlockContent(OTHER, [1, 2])) is None


def test_a_block_puts_out_the_one_that_it_covers() -> None:
    index = holding([1, 2], [1, 3])
    assert index.add(BlockId(5), BlockContent(ROOT, [1, 2, 3, 4])) == 0
    assert BlockId(0) not in index
    assert found(index, 1, 2) == (5, 2)
    assert found(index, 1, 3) == (1, 2)
    alone = holding([1])
    assert alone.add(BlockId(5), BlockContent(ROOT, [1, 2])) == 0
    assert dict(alone.items()) == {5: (ROOT, [1, 2])}
    assert alone.num_parents == 1


def test_what_is_removed_is_not_found_and_may_come_back_with_other_tokens() -> None:
    index = holding([1, 2, 3, 4], [1, 2, 5])
    index.remove([BlockId(0), BlockId(7)])
    assert found(index, 1, 2, 3, 4) == (1, 2)
    index.remove([BlockId(1)])
    assert found(index, 1, 2) is None
    assert list(index.items()) == []
    assert index.num_parents == 0
    index.add(BlockId(0), BlockContent(OTHER, [7]))
    assert found(index, 7, 7, parent=OTHER) == (0, 1)


@given(
    operations=st.lists(st.tuples(st.integers(0, 7), st.booleans(), TOKENS), max_size=60),
    queries=st.lists(TOKENS, min_size=1, max_size=10),
)
def test_it_agrees_with_a_search_through_all_blocks(
    operations: list[tuple[int, bool, list[int]]], queries: list[list[int]]
) -> None:
    index = PartialIndex(num_blocks=8, block_size=4)
    kept: dict[tuple[int, BlockKey], list[int]] = {}
    for number, elsewhere, tokens in operations:
        block_id, parent = BlockId(number), OTHER if elsewhere else ROOT
        if block_id in index:
            index.remove([block_id])
            kept = {place: held for place, held in kept.items() if place[0] != block_id}
        covered = index.add(block_id, BlockContent(parent, tokens))
        siblings = {place: held for place, held in kept.items() if place[1] == parent}
        if any(held[: len(tokens)] == tokens for held in siblings.values()):
            assert covered == block_id
            continue
        within = [place for place, held in siblings.items() if tokens[: len(held)] == held]
        assert [covered] == ([place[0] for place in within] or [None])
        for place in within:
            del kept[place]
        kept[block_id, parent] = tokens
    assert {(block_id, c.parent): c.token_ids for block_id, c in index.items()} == kept
    for query in queries:
        for parent in (ROOT, OTHER):
            shared = [
                num_common(held, query) for (_block_id, of), held in kept.items() if of == parent
            ]
            match = index.find(BlockContent(parent, query))
            assert (match.num_tokens if match else 0) == max(shared, default=0)
            if match is not None:
                held = kept[match.block_id, parent]
                assert held[: match.num_tokens] == query[: match.num_tokens]


def test_a_match_is_a_block_and_a_number_of_tokens() -> None:
    assert found(holding([4, 4]), 4) == PartialMatch(BlockId(0), 1)
