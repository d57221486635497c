"""Options of requests: one value, fields that replace parts of it, lists for several prompts."""

from typing import Any

import pytest

from rayserve_paged import Adapter, RequestOptions, RequestScope, RetentionRange
from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.request_options import NO_OPTIONS, options_for_each, with_fields

KEEP = (RetentionRange(priority=90),)


def test_salt_adapter_and_window_are_the_scope_of_a_request() -> None:
    adapter = Adapter("a", "1")
    assert NO_OPTIONS.scope == RequestScope()
    options = RequestOptions(tenant_salt="s", adapter=adapter, window=8, num_sink_tokens=2)
    assert options.scope == RequestScope("s", adapter, AttentionWindow(8, 2))


def test_fields_replace_those_of_the_options_and_leave_the_others() -> None:
    options = RequestOptions(priority=3, tenant="t", window=8)
    assert with_fields(options, {}) == options
    assert with_fields(None, {}) == RequestOptions()
    changed = with_fields(options, {"priority": 1, "window": None, "deadline_s": 2.5})
    assert changed == RequestOptions(priority=1, tenant="t", deadline_s=2.5)


def test_a_scope_stands_for_salt_adapter_and_window() -> None:
    scope = RequestScope("s", Adapter("a", "1"))
    assert with_fields(RequestOptions(window=8), {"scope": scope}) == RequestOptions(
        tenant_salt="s", adapter=Adapter("a", "1"), window=8
    )
    windowed = RequestScope(window=AttentionWindow(4, 1))
    assert with_fields(None, {"scope": windowed}) == RequestOptions(window=4, num_sink_tokens=1)
    assert with_fields(None, {"scope": None, "priority": 2}) == RequestOptions(priority=2)
    with pytest.raises(InvalidInputError, match=r"window=3 .* None where the scope has a window"):
        with_fields(None, {"scope": windowed, "window": 3})


def test_one_value_is_for_all_prompts_and_a_list_has_one_for_each() -> None:
    options = options_for_each(
        2,
        RequestOptions(tenant_salt="s"),
        {
            "priorities": 5,
            "tenants": ["a", None],
            "windows": [4, None],
            "retention": KEEP,
            "deadline_s": [1, 2.5],
            "request_ids": ["x", "y"],
            "scopes": None,
        },
    )
    assert options == [
        RequestOptions(
            request_id="x",
            priority=5,
            tenant="a",
            tenant_salt="s",
            window=4,
            retention=KEEP,
            deadline_s=1,
        ),
        RequestOptions(
            request_id="y",
            priority=5,
            tenant_salt="s",
            retention=KEEP,
            deadline_s=2.5,
        ),
    ]
    each = [RequestOptions(priority=1), RequestOptions(priority=2)]
    assert options_for_each(2, each, {}) == each
    assert options_for_each(2, None, {"retention": [KEEP, ()]})[0].retention == KEEP


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"priorities": [1]}, r"priorities=\[1\] .* one int, or a list of 2"),
        ({"priorities": "high"}, "priorities='high' .* one int, or a list of 2"),
        ({"priorities": [1, "high"]}, "priorities="),
        ({"tenants": ["a"]}, "tenants=.* one str or None, or a list of 2"),
        ({"windows": "4"}, "windows='4' .* one int or None, or a list of 2"),
        ({"deadline_s": [1.0, "2"]}, "deadline_s=.* one int or float or None, or a list of 2"),
        ({"retention": [KEEP]}, "retention=.* one tuple, or a list of 2"),
        ({"scopes": [None, None]}, "scopes=.* one RequestScope, or a list of 2"),
        ({"request_ids": [None, "x"]}, "request_ids=.* one str, or a list of 2"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_by_name(lists: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInputError, match=message):
        options_for_each(2, None, lists)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id='' .* a non-empty string, or None"),
        ({"request_id": 7}, "request_id=7 "),
        ({"priority": "high"}, "priority='high' .* an integer from"),
        ({"priority": True}, "priority=True "),
        ({"tenant": ""}, "tenant='' "),
        ({"tenant": 3}, "tenant=3 "),
        ({"tenant_salt": b"s"}, "tenant_salt=b's' "),
        ({"adapter": "a"}, "adapter='a' .* an Adapter, or None"),
        ({"window": 0}, "window=0 .* an integer from 1"),
        ({"window": 2.0}, "window=2.0 "),
        ({"num_sink_tokens": 2}, "num_sink_tokens=2 .* 0 where there is no window"),
        ({"window": 4, "num_sink_tokens": -1}, "num_sink_tokens=-1 "),
        ({"deadline_s": 0}, "deadline_s=0 .* seconds above 0"),
        ({"deadline_s": float("nan")}, "deadline_s=nan "),
        ({"deadline_s": "5"}, "deadline_s='5' "),
    ],
)
def test_a_value_that_is_none_is_refused_when_it_is_made(fields: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        RequestOptions(**fields)
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        with_fields(None, fields)


def test_a_refused_value_of_a_list_tells_whose_it_is() -> None:
    with pytest.raises(InvalidInputError, match="tenant=''") as refused:
        options_for_each(3, None, {"tenants": ["a", "", "c"]})
    assert refused.value.__notes__ == ["in prompts[1]"]


def test_what_is_no_option_is_refused_by_name() -> None:
    wrong: Any = {"widow": 3}
    with pytest.raises(TypeError, match="'widow'"):
        with_fields(None, wrong)
    with pytest.raises(TypeError, match="'widow'"):
        options_for_each(2, None, wrong)
    not_options: Any = {"priority": 3}
    with pytest.raises(InvalidInputError, match=r"options=.* RequestOptions, or None"):
        with_fields(not_options, {})
    with pytest.raises(InvalidInputError, match=r"options=.* one RequestOptions, or a list of 2"):
        options_for_each(2, [RequestOptions()], {})
