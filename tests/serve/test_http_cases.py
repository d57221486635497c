"""The load's requests: what they give is known, and whatever differs from it is a problem."""

import asyncio
import dataclasses
import random

import pytest
from http_endpoint import Endpoint

from rayserve_paged.experiments import http_cases
from rayserve_paged.experiments.http_cases import MODEL, Case, draw_bodies, learn_cases
from rayserve_paged.experiments.http_client import Answer, complete

CASE = Case({}, ("abc", "xyz"), ("length", "stop"), 6)
WHOLE = Answer(
    status=200, texts={0: "abc", 1: "xyz"}, reasons={0: "length", 1: "stop"}, is_whole=True
)


def test_cases_are_learnt_and_streams_give_the_same(endpoint: Endpoint) -> None:
    bodies = draw_bodies(random.Random(3), 10)
    assert {body["temperature"] for body in bodies} == {0, 1}
    assert any("stop" in body for body in bodies)
    assert any(body["n"] > 1 for body in bodies)

    async def run() -> None:
        for case in await learn_cases(endpoint.address, bodies):
            extra = {"stream": True, "stream_options": {"include_usage": True}}
            answer = await complete(*endpoint.address, case.body | extra)
            assert answer.is_whole
            assert case.problem(answer) is None
            assert answer.num_tokens == case.num_tokens

    asyncio.run(run())


def test_an_undisturbed_answer_that_is_not_the_models_is_refused(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 5, "n": 1, "temperature": 0}
    monkeypatch.setattr(http_cases, "greedy_text", lambda _body: "another")
    with pytest.raises(ValueError, match="and the model 'another'"):
        asyncio.run(learn_cases(endpoint.address, [body]))
    with pytest.raises(ValueError, match="does not exist"):
        asyncio.run(learn_cases(endpoint.address, [body | {"model": "none"}]))


def test_a_whole_answer_has_to_be_equal_and_one_that_was_cut_off_a_beginning() -> None:
    assert CASE.problem(WHOLE) is None
    for change in (
        {"texts": {0: "abc", 1: "xyZ"}},
        {"texts": {0: "abc"}},
        {"reasons": {0: "length", 1: "length"}},
        {"reasons": {0: "length"}},
    ):
        assert CASE.problem(dataclasses.replace(WHOLE, **change)) is not None
    cut = dataclasses.replace(WHOLE, is_whole=False, texts={1: "x"}, reasons={})
    assert CASE.problem(cut) is None
    assert CASE.problem(dataclasses.replace(cut, texts={1: "y"})) is not None
    assert CASE.problem(dataclasses.replace(cut, texts={1: "xyzx"})) is not None
