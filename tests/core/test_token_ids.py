import copy
import pickle
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.token_ids import MAX_VOCAB_SIZE, TokenIds

IDS = st.lists(st.integers(0, MAX_VOCAB_SIZE - 1), max_size=20)
PLACES = st.integers(-25, 25)


@given(
    ids=IDS, start=st.integers(-25, 25), stop=st.integers(-25, 25), step=st.sampled_from([1, 2, -1])
)
def test_it_is_the_sequence_of_its_ids(ids: list[int], start: int, stop: int, step: int) -> None:
    packed = TokenIds.of(ids)
    assert list(packed) == ids
    assert len(packed) == len(ids)
    assert [packed[index] for index in range(-len(ids), len(ids))] == ids + ids
    assert list(packed[start:stop:step]) == ids[start:stop:step]
    assert packed.view.tolist() == packed.unpacked().tolist() == ids
    assert repr(packed) == f"TokenIds({ids})"
    for index in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            packed[index]


@given(first=IDS, second=IDS)
def test_equal_ids_are_equal_and_hash_alike(first: list[int], second: list[int]) -> None:
    a, b = TokenIds.of(first), TokenIds.of(second)
    assert (a == b) == (first == second)
    assert hash(a) == hash(TokenIds.of(tuple(first)))
    # As a list is no tuple.
    assert a != tuple(first)


@given(ids=IDS)
def test_all_sources_give_the_same(ids: list[int]) -> None:
    packed = TokenIds.of(ids)
    for source in (
        tuple(ids),
        array("q", ids),
        list(np.array(ids, np.int64)),
        np.array(ids, np.int64),
        np.array(ids, np.uint32),
        np.array([*ids, *ids], np.int32)[: len(ids)],
        packed,
    ):
        assert TokenIds.of(source) == packed
    for same in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert same == packed
        assert type(same) is TokenIds


def test_it_holds_little_endian_int32() -> None:
    assert TokenIds.of([1, 2**31 - 1]).packed == b"\x01\0\0\0\xff\xff\xff\x7f"


def test_nothing_changes_it() -> None:
    ids: Any = TokenIds.of([1, 2, 3])
    copied = ids.unpacked()
    copied[0] = 9
    with pytest.raises(TypeError):
        ids[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        ids.view[0] = 9
    with pytest.raises(AttributeError):
        ids.packed = b""
    assert list(ids) == [1, 2, 3]


@pytest.mark.parametrize(
    "bad", [-1, 100, 2**31, 2**32, 2**32 + 1, -(2**40), True, 3.0, 3.5, "3", None]
)
def test_what_is_no_id_of_the_vocabulary_is_refused(bad: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        TokenIds.of([5, bad, 100], 100, "ids")
    assert refused.value.args[:2] == ("ids", bad)
    assert "integers from 0 to 99" in str(refused.value)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, 100])
def test_an_array_of_integers_is_refused_for_the_first_that_is_no_id(
    bad: int, dtype: type[np.signedinteger[Any]]
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        TokenIds.of(np.array([5, bad, 100], dtype), 100, "ids")
    assert refused.value.args[:2] == ("ids", bad)


@pytest.mark.parametrize("bad", [-1, 100, 2**31, 2**32 + 1, 3.5, float("nan")])
def test_what_is_no_id_is_refused_in_an_array(bad: float) -> None:
    with pytest.raises(InvalidInputError):
        TokenIds.of(np.array([5, bad, 7]), 100)
    if isinstance(bad, int):
        assert list(TokenIds.of(np.array([5, 99, 7]), 100)) == [5, 99, 7]


def test_a_smaller_vocabulary_refuses_the_first_id_that_it_does_not_have() -> None:
    ids = TokenIds.of([3, 7, 9, 8])
    ids.check(10)
    TokenIds.of([]).check(1)
    for vocab_size in (9, 8):
        with pytest.raises(
            InvalidInputError, match=rf"prompt_token_ids=9 .* 0 to {vocab_size - 1}"
        ):
            ids.check(vocab_size)
    with pytest.raises(InvalidInputError, match="prompt_token_ids=7"):
        TokenIds.of(ids, 7)
