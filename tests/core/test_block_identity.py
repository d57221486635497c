import dataclasses
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import make_scope

from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.block_identity import (
    KEY_BYTES,
    Adapter,
    BlockScope,
    RequestScope,
    extend_chain,
    hash_block,
    token_payload,
)
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.token_ids import TokenIds

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


@pytest.mark.parametrize(
    "source",
    [
        [7, 0, 2**31 - 1],
        (7, 0, 2**31 - 1),
        array("i", [7, 0, 2**31 - 1]),
        array("q", [7, 0, 2**31 - 1]),
        np.array([7, 0, 2**31 - 1], np.int32),
        np.array([7, 0, 2**31 - 1], np.int64),
        np.array([7, 9, 0, 9, 2**31 - 1], np.int32)[::2],
        np.array([7, 0, 2**31 - 1], ">i4"),
        TokenIds.of([7, 0, 2**31 - 1]),
    ],
    ids=lambda source: getattr(source, "typecode", type(source).__name__),
)
def test_tokens_are_packed_as_little_endian_int32_whatever_holds_them(source: Any) -> None:  # noqa: ANN401
    assert token_payload(source) == b"\x07\0\0\0\0\0\0\0\xff\xff\xff\x7f"


def test_one_block_is_a_chain_of_one() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    first, second = extend_chain(ROOT, tokens, 4)
    assert hash_block(ROOT, token_payload(tokens[:4])) == first
    assert hash_block(first, token_payload(tokens[4:])) == second


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


@pytest.mark.parametrize("separator", ["", "-", ":", "1:", "2:", "%d:"])
def test_no_text_in_a_field_is_taken_for_the_end_of_it(separator: str) -> None:
    parts = ["a", "b", "c", "d"]
    # The same text is cut into two fields behind its first, second and third part.
    scopes = [
        RequestScope(adapter=Adapter(separator.join(parts[:cut]), separator.join(parts[cut:])))
        for cut in (1, 2, 3)
    ]
    assert len({SCOPE.root(scope) for scope in scopes}) == 3


def test_windows_and_sinks_change_the_root() -> None:
    windows = [None, *(AttentionWindow(*each) for each in [(4, 0), (4, 1), (5, 0), (41, 0)])]
    assert len({SCOPE.root(RequestScope(window=window)) for window in windows}) == 5


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
