import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import make_limits, make_request, make_scope

from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.block_identity import extend_chain
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.request import admit

ROOT = make_scope(block_size=4).root()
LIMITS = make_limits()
DIGEST = bytes(range(16))
OTHER = bytes(range(15)) + b"!"
TOKENS = [7] * 23
PLAIN = extend_chain(ROOT, TOKENS, 4)


def keys(*attachments: Attachment) -> list[BlockKey]:
    return extend_chain(ROOT, TOKENS, 4, attachments)


def num_shared(first: list[BlockKey], second: list[BlockKey]) -> int:
    """Leading keys that are equal; none behind them may be."""
    shared = sum(a == b for a, b in zip(first, second, strict=True))
    assert first[:shared] == second[:shared]
    return shared


@pytest.mark.parametrize(
    ("offset", "num_tokens", "first_block"),
    [(0, 1, 0), (3, 1, 0), (4, 1, 1), (3, 2, 0), (6, 9, 1), (19, 1, 4), (20, 3, 5), (22, 1, 5)],
)
def test_keys_differ_from_the_first_block_that_content_reaches_into(
    offset: int, num_tokens: int, first_block: int
) -> None:
    own = keys(Attachment(DIGEST, offset, num_tokens))
    assert num_shared(own, PLAIN) == first_block
    other = keys(Attachment(OTHER, offset, num_tokens))
    assert num_shared(own, other) == first_block


def test_the_block_alone_that_content_reaches_into_holds_it() -> None:
    attachment = Attachment(DIGEST, 6, 5)
    own = keys(attachment)
    assert num_shared(own, PLAIN) == 1
    # Continued from the last block with content, the chain is that of tokens alone.
    assert extend_chain(own[2], TOKENS[12:], 4) == own[3:]
    assert extend_chain(own[1], TOKENS[8:], 4) != own[2:]


def test_offset_and_length_are_part_of_a_key_and_so_is_the_whole_digest() -> None:
    variants = [
        Attachment(DIGEST, 0, 8),
        Attachment(DIGEST, 1, 8),
        Attachment(DIGEST, 0, 7),
        Attachment(OTHER, 0, 8),
        Attachment(DIGEST + b"\0", 0, 8),
        Attachment(bytes(64), 0, 8),
    ]
    assert len({keys(variant)[0] for variant in variants}) == len(variants)


def test_each_of_several_contents_in_one_block_is_part_of_its_key() -> None:
    first, second = Attachment(DIGEST, 0, 2), Attachment(DIGEST, 2, 2)
    own = keys(first, second)[0]
    others = [
        keys(dataclasses.replace(first, digest=OTHER), second)[0],
        keys(first, dataclasses.replace(second, digest=OTHER))[0],
        keys(first)[0],
        keys(second)[0],
    ]
    assert len({own, *others}) == 5


def test_equal_content_at_equal_places_shares_its_blocks() -> None:
    first = keys(Attachment(DIGEST, 2, 6), Attachment(OTHER, 12, 3))
    second = keys(Attachment(DIGEST, 2, 6), Attachment(OTHER, 13, 2))
    assert num_shared(first, second) == 3


@given(
    cut=st.integers(0, 5),
    places=st.lists(st.integers(0, 22), unique=True, max_size=4).map(sorted),
)
def test_a_chain_with_content_can_be_continued_from_any_of_its_blocks(
    cut: int, places: list[int]
) -> None:
    spans = itertools.pairwise([*places, 23])
    attachments = [Attachment(DIGEST, place, end - place) for place, end in spans]
    whole = extend_chain(ROOT, TOKENS, 4, attachments)
    head = extend_chain(ROOT, TOKENS[: cut * 4], 4, attachments)
    parent = head[-1] if head else ROOT
    assert head + extend_chain(parent, TOKENS[cut * 4 :], 4, attachments, cut * 4) == whole


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", b"fifteen bytes.."),
        ("digest", b""),
        ("digest", bytes(65)),
        ("digest", None),
        ("digest", "0123456789abcdef"),
        ("offset", -1),
        ("offset", None),
        ("offset", 1.0),
        ("offset", True),
        ("num_tokens", 0),
        ("num_tokens", "3"),
    ],
)
def test_an_attachment_with_a_field_that_means_nothing_is_refused(
    field: str, value: object
) -> None:
    fields: dict[str, Any] = {"digest": DIGEST, "offset": 0, "num_tokens": 1} | {field: value}
    with pytest.raises(InvalidInputError) as refused:
        Attachment(**fields)
    assert (refused.value.field, refused.value.value) == (f"attachment.{field}", value)


@pytest.mark.parametrize(
    ("attachments", "field", "value"),
    [
        ((Attachment(DIGEST, 0, 4), Attachment(OTHER, 3, 1)), "attachments[1].offset", 3),
        ((Attachment(DIGEST, 4, 1), Attachment(OTHER, 0, 1)), "attachments[1].offset", 0),
        ((Attachment(DIGEST, 0, 9),), "attachments[0].num_tokens", 9),
        ((Attachment(DIGEST, 0, 1), Attachment(OTHER, 7, 2)), "attachments[1].num_tokens", 2),
        ((Attachment(DIGEST, 0, 1), Attachment(OTHER, 8, 1)), "attachments[1].offset", 8),
    ],
)
def test_attachments_that_overlap_or_lie_outside_the_prompt_are_refused(
    attachments: tuple[Attachment, ...], field: str, value: int
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        admit(make_request(range(8), attachments=attachments), LIMITS)
    assert (refused.value.field, refused.value.value) == (field, value)


def test_whoever_places_content_outside_the_prompt_is_told_where_it_ends() -> None:
    behind = make_request(range(8), attachments=(Attachment(DIGEST, 8, 1),))
    with pytest.raises(InvalidInputError, match="expected at most 7, a token of the prompt"):
        admit(behind, LIMITS)
    too_long = make_request(range(8), attachments=(Attachment(DIGEST, 5, 4),))
    with pytest.raises(InvalidInputError, match="expected at most 3, up to the end of the prompt"):
        admit(too_long, LIMITS)


def test_attachments_that_fill_the_prompt_are_taken() -> None:
    attachments = (Attachment(DIGEST, 0, 5), Attachment(DIGEST, 5, 3))
    request = make_request(range(8), attachments=attachments)
    assert admit(request, LIMITS) == request


@pytest.mark.parametrize("attachments", [[Attachment(DIGEST, 0, 1)], None, ((DIGEST, 0, 1),)])
def test_what_is_no_tuple_of_attachments_is_refused(attachments: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInputError, match="expected a tuple of Attachment"):
        admit(make_request(range(8), attachments=attachments), LIMITS)


def test_a_model_without_attachments_refuses_them() -> None:
    attachments = (Attachment(DIGEST, 0, 1),)
    limits = dataclasses.replace(LIMITS, takes_attachments=False)
    with pytest.raises(InvalidInputError) as refused:
        admit(make_request(range(8), attachments=attachments), limits)
    expected = ("attachments", attachments, "none, for a model that takes none")
    assert refused.value.args == expected
    assert admit(make_request(range(8)), limits).attachments == ()
