import dataclasses
import math
from typing import Any

import pytest
from replica_driver import make_limits, make_request

from rayserve_paged.core.block_identity import Adapter
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.request import admit
from rayserve_paged.core.sampling_params import MAX_SEED, SamplingParams

LIMITS = make_limits(num_blocks=8, block_size=4, vocab_size=100, max_model_len=40)


def test_the_defaults_are_those_that_users_expect() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.min_tokens) == (16, 0)
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert params.seed is None
    assert (params.stop, params.stop_token_ids) == ((), ())


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None, "min_tokens": 100},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 9_999_999},
        {"seed": MAX_SEED},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop": ["x"] * 16},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {}},
        {"logit_bias": dict.fromkeys(range(300), -100)},
        {"allowed_token_ids": [0]},
    ],
)
def test_values_at_the_edge_are_accepted(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


def test_a_single_stop_string_is_a_list_of_one_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert dataclasses.replace(params, max_tokens=5).stop == ("END",)


def test_too_many_stop_strings_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at most 16"):
        SamplingParams(stop=["x"] * 17)


def test_min_tokens_over_max_tokens_names_both() -> None:
    with pytest.raises(InvalidInputError, match=r"min_tokens=5 .* at most max_tokens=4"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "admitted"),
    [(10, 4, 4), (10, None, 23), (32, None, 1), (1, None, 32), (10, 23, 23), (33, 1, None)],
)
def test_max_tokens_is_what_prompt_pool_and_model_leave(
    num_prompt: int, max_tokens: int | None, admitted: int | None
) -> None:
    request = make_request([1] * num_prompt, max_tokens)
    if admitted is None:
        with pytest.raises(CapacityError):
            admit(request, LIMITS)
    else:
        assert admit(request, LIMITS).params.max_tokens == admitted


def test_min_tokens_is_clamped_with_max_tokens() -> None:
    limits = dataclasses.replace(LIMITS, max_model_len=12)
    params = admit(make_request([1] * 10, 8, min_tokens=5), limits).params
    assert (params.max_tokens, params.min_tokens) == (2, 2)


def test_admission_changes_nothing_but_the_clamped_numbers() -> None:
    request = make_request([1, 2, 3], 4, priority=3, tenant_salt="a", stop_token_ids=(99,))
    assert admit(request, LIMITS) == request


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least one token"):
        admit(make_request([]), LIMITS)


@pytest.mark.parametrize(
    "change",
    [
        {"priority": "high"},
        {"priority": 1.5},
        {"priority": True},
        {"priority": 2**31},
        {"tenant_salt": b"bytes"},
        {"tenant_salt": 7},
    ],
)
def test_a_priority_or_a_salt_of_another_type_is_refused(change: dict[str, Any]) -> None:
    request = make_request([1], **change)
    with pytest.raises(InvalidInputError) as refused:
        admit(request, LIMITS)
    assert [refused.value.field] == list(change)


ADAPTERS = (Adapter("a", "1"), Adapter("b", "1"))


@pytest.mark.parametrize(
    ("loaded", "adapter", "accepted"),
    [
        ((), Adapter("a", "1"), "None, or one that is loaded (there is none)"),
        (
            ADAPTERS,
            Adapter("a", "2"),
            "None, or one that is loaded ('a' of version '1', 'b' of version '1')",
        ),
        (ADAPTERS, "a", "an Adapter, or None"),
        (None, ("a", "1"), "an Adapter, or None"),
    ],
)
def test_an_adapter_that_is_not_loaded_is_refused(
    loaded: tuple[Adapter, ...] | None, adapter: object, accepted: str
) -> None:
    unchecked: Any = adapter
    request = make_request([1], adapter=unchecked)
    with pytest.raises(InvalidInputError) as refused:
        admit(request, dataclasses.replace(LIMITS, adapters=loaded))
    assert refused.value.args == ("adapter", adapter, accepted)


@pytest.mark.parametrize("loaded", [None, ADAPTERS])
def test_an_adapter_that_is_loaded_is_taken(loaded: tuple[Adapter, ...] | None) -> None:
    request = make_request([1], adapter=Adapter("b", "1"))
    admitted = admit(request, dataclasses.replace(LIMITS, adapters=loaded))
    assert admitted.scope.adapter == Adapter("b", "1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("min_p", value) for value in (-0.1, 2, 1.01, math.nan, True, "0.1", None)),
        *(("repetition_penalty", value) for value in (0, -1, math.nan, 0.009, 101, math.inf, "1")),
        *(("presence_penalty", value) for value in (1e9, -2.1, math.nan, False, "1")),
        *(("frequency_penalty", value) for value in (2.1, -1e9, math.nan, "1")),
        ("logit_bias", None),
        ("logit_bias", "5"),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("logit_bias", [(5, 1, 2)]),
        ("logit_bias", [(5, 1.0), (5, 2.0)]),
        ("logit_bias", dict.fromkeys(range(301), 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", 5),
    ],
)
def test_b88_nonsense_in_the_other_sampling_fields_is_refused(field: str, value: Any) -> None:  # noqa: ANN401
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidInputError) as refused:
        SamplingParams(**fields)
    assert refused.value.field == field
    assert f"{field}={value!r}"[:200] in str(refused.value)


@pytest.mark.parametrize(
    ("bias", "value"),
    [
        ({-1: 5}, -1),
        ({True: 5}, True),
        ({"100": 5}, "100"),
        ({2.0: 5}, 2.0),
        ({5: 100.5}, 100.5),
        ({5: -101}, -101),
        ({5: math.inf}, math.inf),
        ({5: None}, None),
        ({5: "1"}, "1"),
    ],
)
def test_a_bias_or_an_id_that_is_none_is_named(bias: Any, value: object) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInputError) as refused:
        SamplingParams(logit_bias=bias)
    assert (refused.value.field, refused.value.value) == ("logit_bias", value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {100: 5}),
        ("logit_bias", {-1: 5}),
        ("stop_token_ids", [100]),
        ("allowed_token_ids", [100]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
    ],
)
def test_b87_ids_outside_the_vocabulary_are_refused_in_every_field(field: str, value: Any) -> None:  # noqa: ANN401
    fields: dict[str, Any] = {"min_tokens": 5, field: value}
    with pytest.raises(InvalidInputError) as refused:
        admit(make_request([5], 10, **fields), LIMITS)
    assert refused.value.field == field


def test_ids_at_the_edge_of_the_vocabulary_are_admitted() -> None:
    fields: dict[str, Any] = {"logit_bias": {99: 1, 0: 2}, "allowed_token_ids": [0, 99]}
    request = make_request([5], 10, **fields)
    assert admit(request, LIMITS) == request


def test_a_request_that_may_choose_nothing_before_min_tokens_is_refused() -> None:
    limits = dataclasses.replace(LIMITS, eos_token_ids=(2,))
    only_ends: dict[str, Any] = {"allowed_token_ids": [2, 3], "stop_token_ids": [3]}
    with pytest.raises(InvalidInputError, match=r"allowed_token_ids=.*min_tokens=2"):
        admit(make_request([5], 4, min_tokens=2, **only_ends), limits)
    for fields in ({"min_tokens": 1}, {"min_tokens": 2, "ignore_eos": True}):
        admit(make_request([5], 4, **fields, **only_ends), limits)


def test_biases_and_allowed_ids_compare_and_hash_whatever_their_order_and_type() -> None:
    params = SamplingParams(logit_bias={7: 1, 3: -2.5}, allowed_token_ids=[9, 4, 9])
    assert params.logit_bias == params.biases == ((3, -2.5), (7, 1.0))
    assert params.allowed_token_ids == (4, 9)
    same = SamplingParams(logit_bias=[(3, -2.5), (7, 1.0)], allowed_token_ids=(4, 9))
    assert (params, hash(params)) == (same, hash(same))
    assert dataclasses.replace(params, max_tokens=5).biases == params.biases


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"logit_bias": {1: 1}, "min_p": 0.5}, False),
        ({"repetition_penalty": 1.01}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalties_are_what_needs_the_history(fields: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**fields).has_penalties is expected


def test_a_number_too_large_for_a_float_is_refused_like_any_other() -> None:
    with pytest.raises(InvalidInputError):
        SamplingParams(temperature=10**400)


def test_the_served_length_is_the_smaller_of_model_and_pool() -> None:
    assert (LIMITS.num_slots, LIMITS.served_len) == (32, 32)
    assert dataclasses.replace(LIMITS, num_blocks=100).served_len == 40


@pytest.mark.parametrize("max_pinned_blocks", [0, 3])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("width", [None, 1, 2, 3])
@pytest.mark.parametrize("num_prompt", [1, 4, 6])
def test_without_max_tokens_a_request_may_have_as_many_as_there_are_blocks_for(
    max_pinned_blocks: int, window: int | None, width: int | None, num_prompt: int
) -> None:
    limits = dataclasses.replace(
        make_limits(num_blocks=12, max_model_len=40), max_pinned_blocks=max_pinned_blocks
    )

    def admitted(max_tokens: int | None) -> int | None:
        request = make_request(
            range(num_prompt), 1, window=window, temperature=0.0, beam_width=width
        )
        params = dataclasses.replace(request.params, max_tokens=max_tokens)
        return admit(dataclasses.replace(request, params=params), limits).params.max_tokens

    most = admitted(None)
    assert most is not None
    assert admitted(most) == most
    if most == 40 - num_prompt:
        return
    with pytest.raises(CapacityError) as refused:
        admitted(most + 1)
    assert refused.value.num_blocks == 12 - max_pinned_blocks
