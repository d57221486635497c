"""How many blocks a pool gets, and the numbers in the refusals."""

import pytest
import torch

from rayserve_cluster.cache_size import available_memory, choose_num_blocks
from rayserve_paged.core.config import CacheConfig
from rayserve_paged.core.errors import InvalidInputError


def choose(cache: CacheConfig, **sizes: int) -> int:
    given = {
        "block_bytes": 1000,
        "available_bytes": 50_000,
        "default_bytes": 20_000,
        "max_useful_blocks": 1000,
    }
    return choose_num_blocks(cache, **(given | sizes))


def test_blocks_asked_for_are_given_where_they_fit() -> None:
    assert choose(CacheConfig(num_blocks=50)) == 50


def test_memory_asked_for_becomes_whole_blocks() -> None:
    assert choose(CacheConfig.model_validate({"memory": "9999B"})) == 9


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [({}, 20), ({"available_bytes": 3500}, 3), ({"max_useful_blocks": 7}, 7)],
)
def test_the_default_is_bounded_by_memory_and_by_use(sizes: dict[str, int], expected: int) -> None:
    assert choose(CacheConfig(), **sizes) == expected


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"num_blocks": 51}, r"cache.num_blocks=51 .*at most 50 blocks of 1000 bytes.* 50000 "),
        ({"memory": 50_001}, r"cache.memory=50001 .*from 1000 bytes, .* to 50000,"),
        ({"memory": 999}, r"cache.memory=999 .*from 1000 bytes, which is one block"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_the_numbers(
    cache: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        choose(CacheConfig.model_validate(cache))


def test_a_machine_without_room_for_one_block_is_named_as_such() -> None:
    with pytest.raises(InvalidInputError, match="a block takes 1000 bytes and 999 are available"):
        choose(CacheConfig(), available_bytes=999)


def test_some_memory_is_available_here() -> None:
    assert available_memory(torch.device("cpu")) > 1 << 20
