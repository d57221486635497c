import dataclasses
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import make_scope

from rayserve_paged.core.block_identity import (
    KEY_BYTES,
    Adapter,
    BlockScope,
    RequestScope,
    extend_chain,
)
from rayserve_paged.core.errors import InvalidInputError

SCOPE = make_scope(block_size=4)
ROOT = SCOPE.root()
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_only_full_blocks_have_keys() -> None:
    lengths = [len(extend_chain(ROOT, list(range(n)), 4)) for n in (0, 1, 3, 4, 5, 8, 11, 12)]
    assert lengths == [0, 0, 0, 1, 1, 2, 2, 3]


def test_a_key_has_256_bits() -> None:
    (key,) = extend_chain(ROOT, [1, 2, 3, 4], 4)
    assert len(key) == len(ROOT) == KEY_BYTES == 32


@given(tokens=TOKENS, cut=st.integers(0, 10))
def test_a_chain_can_be_continued_from_any_of_its_blocks(tokens: list[int], cut: int) -> None:
    whole = extend_chain(ROOT, tokens, 4)
    head = extend_chain(ROOT, tokens[: cut * 4], 4)
    tail = extend_chain(head[-1] if head else ROOT, tokens[len(head) * 4 :], 4)
    assert head + tail == whole


@given(first=TOKENS, second=TOKENS)
def test_keys_are_equal_exactly_where_all_tokens_up_to_them_are(
    first: list[int], second: list[int]
) -> None:
    chains = extend_chain(ROOT, first, 4), extend_chain(ROOT, second, 4)
    for index, (a, b) in enumerate(zip(*chains, strict=False)):
        end = (index + 1) * 4
        assert (a == b) == (first[:end] == second[:end])


def test_lists_arrays_and_numpy_arrays_give_one_chain() -> None:
    tokens = [7, 0, 2**31 - 1, 5, 6]
    chain = extend_chain(ROOT, tokens, 4)
    assert extend_chain(ROOT, array("i", tokens), 4) == chain
    assert extend_chain(ROOT, np.array(tokens, np.int32), 4) == chain
    assert extend_chain(ROOT, np.array([*tokens, *tokens], np.int32)[:5], 4) == chain


def test_a_chain_is_the_same_for_ever() -> None:
    (key,) = extend_chain(ROOT, [1, 2, 3, 4], 4)
    assert ROOT.hex() == "cb7138af62d29c9dbf67928581f1b2a0ebb467350ebe8c20aed968cfea00b8b3"
    assert key.hex() == "a9ecca9eb962040aee28ac2a1b284e45539d13a056f24a29127e8e65d2bb5000"


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": b"other"},
        {"dtype": "bf16"},
        {"kv_dtype": "bf16"},
        {"numerics": "deterministic"},
        {"positions": "window"},
        {"block_size": 8},
    ],
)
def test_every_field_of_the_scope_changes_the_root(change: dict[str, Any]) -> None:
    other = dataclasses.replace(SCOPE, **change)
    assert other.root() != ROOT


def test_fields_do_not_run_together() -> None:
    first = BlockScope(b"ab", "c", "", "", "", 4)
    second = BlockScope(b"a", "bc", "", "", "", 4)
    assert first.root() != second.root()


def test_no_salt_is_a_tenant_different_from_every_string() -> None:
    salts = [None, "", "None", "-", "0:", "a", "\ud800"]
    assert len({SCOPE.root(RequestScope(salt)) for salt in salts}) == len(salts)
    assert SCOPE.root(RequestScope("a")) == SCOPE.root(RequestScope("a"))


def test_id_and_version_of_an_adapter_change_the_root() -> None:
    scopes = [
        RequestScope(),
        RequestScope(adapter=Adapter("a", "1")),
        RequestScope(adapter=Adapter("a", "2")),
        RequestScope(adapter=Adapter("b", "1")),
        RequestScope("a", Adapter("a", "1")),
        RequestScope("a"),
    ]
    assert len({SCOPE.root(scope) for scope in scopes}) == len(scopes)
    assert SCOPE.root(RequestScope(adapter=Adapter("a", "1"))) == SCOPE.root(scopes[1])


@pytest.mark.parametrize("field", ["adapter_id", "version"])
@pytest.mark.parametrize("value", ["", None, 1, b"a"])
def test_an_adapter_without_an_id_or_a_version_is_refused(field: str, value: object) -> None:
    fields: dict[str, Any] = {"adapter_id": "a", "version": "1"} | {field: value}
    with pytest.raises(InvalidInputError) as caught:
        Adapter(**fields)
    assert (caught.value.field, caught.value.value) == (f"adapter.{field}", value)
