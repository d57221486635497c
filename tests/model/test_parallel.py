import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.parallel import deal, deal_heads, working_widths


@pytest.mark.parametrize(
    ("total", "world_size", "lengths"),
    [(1536, 1, [1536]), (50, 3, [17, 17, 16]), (101, 4, [26, 25, 25, 25]), (2, 3, [1, 1, 0])],
)
def test_items_are_dealt_in_contiguous_shares_that_differ_by_one(
    total: int, world_size: int, lengths: list[int]
) -> None:
    shares = deal(total, world_size)
    assert [len(share) for share in shares] == lengths
    assert [item for share in shares for item in share] == list(range(total))


def kv_heads(num_heads: int, num_kv_heads: int, world_size: int) -> list[list[int]]:
    return [list(share.kv_heads) for share in deal_heads(num_heads, num_kv_heads, world_size)]


def query_heads(num_heads: int, num_kv_heads: int, world_size: int) -> list[list[int]]:
    return [list(share.query_heads) for share in deal_heads(num_heads, num_kv_heads, world_size)]


def test_b68_two_kv_heads_are_replicated_over_four_and_eight_ranks() -> None:
    assert kv_heads(8, 2, 1) == [[0, 1]]
    assert kv_heads(8, 2, 2) == [[0], [1]]
    assert kv_heads(8, 2, 4) == [[rank // 2] for rank in range(4)]
    assert kv_heads(8, 2, 8) == [[rank // 4] for rank in range(8)]
    assert query_heads(8, 2, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_b68_six_kv_heads_are_dealt_unevenly_over_four_ranks() -> None:
    assert kv_heads(12, 6, 4) == [[0, 1], [2, 3], [4], [5]]
    assert query_heads(12, 6, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]]


def test_b68_three_kv_heads_over_four_ranks_are_refused_with_the_widths_that_work() -> None:
    with pytest.raises(InvalidInputError) as caught:
        deal_heads(9, 3, 4)
    assert str(caught.value) == (
        "tensor_parallel_size=4 is not accepted: expected one of 1, 2, 3, 6, 9 for a model of "
        "9 query heads and 3 KV heads"
    )


def test_smollm2_heads_at_width_two_are_six_and_three() -> None:
    assert query_heads(9, 3, 2) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert kv_heads(9, 3, 2) == [[0, 1], [2]]


def test_two_ranks_that_share_a_kv_head_split_its_query_heads() -> None:
    assert kv_heads(9, 3, 6) == [[0], [0], [1], [1], [2], [2]]
    assert query_heads(9, 3, 6) == [[0, 1], [2], [3, 4], [5], [6, 7], [8]]


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="tensor_parallel_size=12"):
        deal_heads(9, 3, 12)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 2), (12, 6), (8, 8), (7, 1)])
def test_every_query_head_is_on_one_rank_beside_its_kv_head(
    num_heads: int, num_kv_heads: int
) -> None:
    group = num_heads // num_kv_heads
    for width in working_widths(num_heads, num_kv_heads):
        shares = deal_heads(num_heads, num_kv_heads, width)
        assert [head for share in shares for head in share.query_heads] == list(range(num_heads))
        for share in shares:
            assert {head // group for head in share.query_heads} == set(share.kv_heads)
            assert len(share.query_heads) % len(share.kv_heads) == 0
