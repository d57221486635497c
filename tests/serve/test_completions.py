"""Completions through the official client; outputs are the oracle's."""

import asyncio
import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from http_endpoint import (
    MODEL,
    VOCAB_SIZE,
    Endpoint,
    Gate,
    Stream,
    endpoint_of,
    greedy,
    greedy_ids,
    text_of,
    token_text,
    wait_for,
)

from rayserve_paged import LLM, SamplingParams


def create(endpoint: Endpoint, **fields: Any) -> Any:  # noqa: ANN401
    return endpoint.client.completions.create(
        **{"model": MODEL, "temperature": 0.0, "max_tokens": 6, **fields}
    )


# --- models ---------------------------------------------------------------------------------


def test_the_model_is_listed_and_can_be_retrieved(endpoint: Endpoint) -> None:
    (listed,) = endpoint.client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "rayserve-paged")
    assert listed.model_extra is not None
    assert listed.model_extra["max_model_len"] == endpoint.shell.limits.served_len
    assert endpoint.client.models.retrieve(MODEL) == listed


@pytest.mark.parametrize("name", ["gpt-5", "a/b", "fingerprint/", "\N{SNOWMAN}"])
def test_another_model_is_not_found(endpoint: Endpoint, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        endpoint.client.models.retrieve(name)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match=f'model="{name}" does not exist'):
        create(endpoint, model=name, prompt="x")


def test_a_model_may_have_another_name() -> None:
    with endpoint_of({"serve.served_model_name": "a model/v1"}) as endpoint:
        assert [model.id for model in endpoint.client.models.list()] == ["a model/v1"]
        assert endpoint.client.models.retrieve("a model/v1").id == "a model/v1"
        answer = create(endpoint, model="a model/v1", prompt="x")
        assert (answer.model, answer.choices[0].text) == ("a model/v1", greedy("x", 6))
        with pytest.raises(openai.NotFoundError, match='expected "a model/v1"'):
            create(endpoint, prompt="x")


# --- prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a ferry", ["a ferry"]),
        (["a", "ferry"], ["a", "ferry"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several(
    endpoint: Endpoint, prompt: object, texts: list[str]
) -> None:
    answer = create(endpoint, prompt=prompt)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert [choice.text for choice in answer.choices] == [greedy(text, 6) for text in texts]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    assert answer.usage.completion_tokens == 6 * len(texts)
    assert answer.usage.total_tokens == sum(map(len, texts)) + 6 * len(texts)


def test_prompts_and_their_samples_are_numbered_in_order(endpoint: Endpoint) -> None:
    answer = create(endpoint, prompt=["a", "ferry"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [greedy("a", 6)] * 2 + [greedy("ferry", 6)] * 2
    assert [choice.text for choice in answer.choices] == expected


def test_more_prompts_than_may_be_are_refused() -> None:
    with endpoint_of({"serve.max_prompts": 2}) as endpoint:
        assert len(create(endpoint, prompt=["a", "b"]).choices) == 2
        error = endpoint.refused(prompt=["a", "b", "c"])
        assert error["param"] == "prompt"
        assert error["message"] == 'prompt="3 prompts" is not accepted: expected at most 2'


def test_one_refused_prompt_keeps_all_from_being_submitted(endpoint: Endpoint) -> None:
    before = endpoint.ledger()
    error = endpoint.refused(prompt=[[1, 2, 3, 4, 5], [1, VOCAB_SIZE]], max_tokens=1)
    accepted = "integers from 0 to 999"
    assert error["message"] == (f"prompt=1000 is not accepted: expected {accepted} (in prompt[1])")
    assert endpoint.ledger().num_cached_blocks - before.num_cached_blocks <= 1


def test_the_default_is_16_tokens_and_null_is_all_that_are_left() -> None:
    with endpoint_of({"model.max_model_len": 40}) as endpoint:
        answer = endpoint.client.completions.create(model=MODEL, prompt="x", temperature=0)
        assert answer.choices[0].text == greedy("x", 16)
        answer = create(endpoint, prompt="x" * 20, max_tokens=None)
        assert answer.choices[0].text == greedy("x" * 20, 20)
        assert answer.choices[0].finish_reason == "length"


def test_cached_tokens_are_those_of_whole_blocks(endpoint: Endpoint) -> None:
    prompt = "twenty-one characters"
    cached = [
        create(endpoint, prompt=prompt).usage.prompt_tokens_details.cached_tokens for _ in range(2)
    ]
    assert cached == [0, 20]


# --- sampling -------------------------------------------------------------------------------


def test_a_seed_gives_what_llm_gives(endpoint: Endpoint) -> None:
    fields = {"n": 2, "seed": 3, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}
    params = SamplingParams(max_tokens=6, frequency_penalty=0.25, top_k=50, **fields)  # type: ignore[arg-type]
    with LLM(MODEL, shell="inprocess", num_blocks=32) as llm:
        (expected,) = llm.generate("a ferry", params)
    for _ in range(2):
        answer = create(
            endpoint,
            prompt="a ferry",
            frequency_penalty=0.25,
            extra_body={"top_k": 50},
            **fields,
        )
        assert [one.text for one in answer.choices] == [one.text for one in expected.samples]


def test_best_of_returns_the_most_likely_and_counts_what_it_returns(endpoint: Endpoint) -> None:
    fields = {"temperature": 1.0, "seed": 5, "logprobs": 0, "max_tokens": 4}
    drawn = create(endpoint, prompt="a ferry", n=4, **fields)
    ranked = sorted(drawn.choices, key=lambda one: -sum(one.logprobs.token_logprobs))
    best = create(endpoint, prompt="a ferry", n=2, best_of=4, **fields)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == 8
    with pytest.raises(openai.BadRequestError, match="expected n=2 for a stream"):
        create(endpoint, prompt="a ferry", n=2, best_of=4, stream=True, **fields)


def test_a_biased_token_is_chosen(endpoint: Endpoint) -> None:
    answer = create(endpoint, prompt="x", logit_bias={"66": 100}, max_tokens=3)
    assert answer.choices[0].text == "BBB"


@pytest.mark.parametrize("stop", ["BB", ["zz", "BB"]])
def test_a_stop_string_ends_the_text_before_it(endpoint: Endpoint, stop: object) -> None:
    fields = {"prompt": "x", "logit_bias": {"66": 100}, "max_tokens": 9}
    answer = create(endpoint, stop=stop, **fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    kept = create(endpoint, stop=stop, extra_body={"include_stop_str_in_output": True}, **fields)
    assert kept.choices[0].text == "BB"
    late = create(endpoint, stop=stop, extra_body={"min_tokens": 5}, **fields)
    assert (late.choices[0].text, late.usage.completion_tokens) == ("BBB", 5)


def test_the_fields_of_other_servers_work(endpoint: Endpoint) -> None:
    first, second = greedy_ids("x", 2)
    stopped = create(endpoint, prompt="x", extra_body={"stop_token_ids": [second]})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == 2
    allowed = create(endpoint, prompt="x", extra_body={"allowed_token_ids": [65]}, temperature=1.0)
    assert allowed.choices[0].text == "A" * 6
    for fields in (
        {"top_k": 1, "temperature": 1.0},
        {"min_p": 1.0, "temperature": 1.0},
        {"ignore_eos": True},
        {"repetition_penalty": 1.0},
    ):
        temperature = fields.pop("temperature", 0.0)
        answer = create(endpoint, prompt="x", extra_body=fields, temperature=temperature)
        assert answer.choices[0].text == greedy("x", 6)
    assert first != second


# --- log-probabilities ----------------------------------------------------------------------


def test_logprobs_are_those_of_llm(endpoint: Endpoint) -> None:
    with LLM(MODEL, shell="inprocess", num_blocks=32) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
        (expected,) = llm.generate("a ferry", params)
    assert expected.logprobs is not None
    found = create(endpoint, prompt="a ferry", max_tokens=4, logprobs=3).choices[0].logprobs
    assert found.tokens == [token_text(i) for i in expected.token_ids]
    assert found.token_logprobs == [one.logprob for one in expected.logprobs]
    assert found.top_logprobs == [
        {token_text(i): value for i, value in one.top} for one in expected.logprobs
    ]
    assert found.text_offset == [
        len(text_of(expected.token_ids[:place])) for place in range(len(expected.token_ids))
    ]


def test_logprobs_of_0_lists_the_chosen_tokens_alone(endpoint: Endpoint) -> None:
    found = create(endpoint, prompt="x", logprobs=0).choices[0].logprobs
    assert len(found.token_logprobs) == 6
    assert found.top_logprobs is None


def test_an_echo_has_the_prompt_and_its_logprobs(endpoint: Endpoint) -> None:
    with LLM(MODEL, shell="inprocess", num_blocks=32) as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, prompt_logprobs=1)
        (expected,) = llm.generate("abc", params)
    assert expected.prompt_logprobs is not None
    choice = create(endpoint, prompt="abc", max_tokens=2, echo=True, logprobs=1).choices[0]
    assert choice.text == "abc" + greedy("abc", 2)
    assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:3] == [
        one.logprob for one in expected.prompt_logprobs[1:] if one is not None
    ]
    assert choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    plain = create(endpoint, prompt="abc", max_tokens=2, echo=True).choices[0]
    assert (plain.text, plain.logprobs) == (choice.text, None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_output_scores_the_prompt(endpoint: Endpoint, stream: bool) -> None:
    fields = {"prompt": ["abc", "de"], "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = create(endpoint, stream=stream, **fields)
    choices = answer.choices if not stream else [one for part in answer for one in part.choices]
    choices = sorted((one for one in choices if one.text), key=lambda one: one.index)
    assert [one.text for one in choices] == ["abc", "de"]
    assert [len(one.logprobs.tokens) for one in choices] == [3, 2]
    whole = create(endpoint, **fields)
    assert {one.finish_reason for one in whole.choices} == {"length"}
    assert whole.usage.completion_tokens == 0
    plain = create(endpoint, prompt="abc", max_tokens=0, echo=True).choices[0]
    assert (plain.text, plain.logprobs) == ("abc", None)


def test_an_echo_without_output_never_says_that_it_was_stopped(endpoint: Endpoint) -> None:
    (first,) = greedy_ids("abc", 1)
    fields = {"prompt": "abc", "max_tokens": 0, "echo": True}
    answer = create(endpoint, extra_body={"stop_token_ids": [first]}, **fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")


def test_offsets_of_an_echo_count_the_characters_that_are_there(endpoint: Endpoint) -> None:
    # The prompt ends in the middle of a character, which the output does not end.
    ids = [*"a\N{EURO SIGN}".encode()[:-1]]
    choice = create(endpoint, prompt=ids, max_tokens=2, echo=True, logprobs=0).choices[0]
    assert choice.text.startswith("a\N{REPLACEMENT CHARACTER}")
    assert choice.logprobs.tokens[:3] == ["a", "bytes:\\xe2", "bytes:\\x82"]
    assert choice.logprobs.text_offset[:4] == [0, 1, 1, 2]


def test_prompt_logprobs_are_listed_by_id(endpoint: Endpoint) -> None:
    answer = create(endpoint, prompt="abc", extra_body={"prompt_logprobs": 2})
    found = answer.choices[0].model_extra["prompt_logprobs"]
    assert (len(found), found[0]) == (3, None)
    assert [len(one["top_logprobs"]) for one in found[1:]] == [2, 2]
    assert set(found[1]["top_logprobs"][0]) == {"token_id", "token", "logprob"}
    echoed = create(
        endpoint, prompt="abc", echo=True, logprobs=1, extra_body={"prompt_logprobs": 2}
    ).choices[0]
    assert echoed.model_extra["prompt_logprobs"] == found
    assert [len(one) for one in echoed.logprobs.top_logprobs[1:]] == [1] * 8


# --- extensions -----------------------------------------------------------------------------


def test_a_salt_keeps_prefixes_apart(endpoint: Endpoint) -> None:
    def cached(salt: str | None) -> int:
        extra = {"rayserve": {"salt": salt}}
        usage = create(endpoint, prompt="salted prompt", extra_body=extra).usage
        found: int = usage.prompt_tokens_details.cached_tokens
        return found

    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 12, 12, 12]


def test_a_request_id_is_the_end_of_the_answers_id(endpoint: Endpoint) -> None:
    extra = {"rayserve": {"request_id": "mine/1"}}
    assert create(endpoint, prompt="x", extra_body=extra).id == "cmpl-mine/1"
    assert create(endpoint, prompt=["x", "y"], extra_body=extra).id == "cmpl-mine/1"


def test_a_window_with_sinks_gives_what_llm_gives(endpoint: Endpoint) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM(MODEL, shell="inprocess", block_size=4, num_blocks=32) as llm:
        (expected,) = llm.generate("a rather long prompt", params, windows=6, num_sink_tokens=2)
    extra = {"rayserve": {"window": 6, "num_sink_tokens": 2}}
    answer = create(endpoint, prompt="a rather long prompt", extra_body=extra)
    assert answer.choices[0].text == expected.text != greedy("a rather long prompt", 6)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_and_says_so(endpoint: Endpoint, stream: bool) -> None:
    extra = {"rayserve": {"deadline_s": 0.05}}
    answer = create(endpoint, prompt="x", max_tokens=1000, extra_body=extra, stream=stream)
    if stream:
        parts = [part.choices[0] for part in answer]
        text, reason = "".join(part.text for part in parts), parts[-1].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert reason == "deadline"
    assert greedy("x", 1000).startswith(text)


def test_the_first_in_priority_is_served_first(gate: Gate) -> None:
    with endpoint_of({"batch.max_num_seqs": 1, "batch.max_prefix_wait_steps": 0}) as endpoint:
        client = openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0)
        ended: list[int] = []

        async def run(priority: int) -> None:
            extra = {"rayserve": {"priority": priority}}
            await client.completions.create(
                model=MODEL, prompt=f"priority {priority}", max_tokens=2, extra_body=extra
            )
            ended.append(priority)

        async def run_all() -> None:
            tasks = [asyncio.create_task(run(0))]
            await asyncio.to_thread(wait_for, lambda: gate.num_waiting, "the first runs")
            for number, priority in enumerate((5, -5), start=2):
                tasks.append(asyncio.create_task(run(priority)))
                await asyncio.to_thread(
                    wait_for, lambda n=number: endpoint.shell.num_submitted == n, "it is queued"
                )
            gate.open()
            await asyncio.gather(*tasks)
            await client.close()

        gate.close()
        asyncio.run(run_all())
        # The first one gives way to the more urgent one.
        assert ended == [-5, 0, 5]


def test_retention_keeps_blocks_that_would_be_evicted() -> None:
    with endpoint_of({"cache.num_blocks": 16}) as endpoint:

        def cached(prompt: str, **rayserve: object) -> int:
            extra = {"rayserve": rayserve}
            usage = create(endpoint, prompt=prompt, max_tokens=1, extra_body=extra).usage
            found: int = usage.prompt_tokens_details.cached_tokens
            return found

        keep = [{"start": 0, "end": 8, "priority": 100}]
        assert cached("kept for good", retention=keep) == 0
        assert cached("kept for now ") == 8
        cached("x" * 56)
        assert cached("kept for good") == 8
        cached("y" * 56)
        assert cached("kept for good") == 8


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"temperature": 101},
            "temperature",
            "101.0 is not accepted: expected a number from 0 to 1",
        ),
        ({"n": 0}, "n", "0 is not accepted: expected an integer from 1 to 128"),
        ({"n": 65}, "n", "65 is not accepted: expected at most 64"),
        ({"best_of": 1, "n": 2}, "best_of", "or null for n"),
        ({"max_tokens": 0}, "max_tokens", "0 is not accepted: expected an integer of at least 1"),
        ({"min_tokens": 99}, "min_tokens", "99 is not accepted: expected at most max_tokens=6"),
        ({"logprobs": 21}, "logprobs", "21 is not accepted: expected an integer from 0 to 20"),
        ({"logprobs": True}, "logprobs", "true is not accepted: expected an integer"),
        ({"echo": "yes"}, "echo", '"yes" is not accepted: expected true or false'),
        ({"stop": ""}, "stop", '"" is not accepted: expected a non-empty string'),
        ({"stop": ["x"] * 17}, "stop", "at most 16 of them"),
        ({"stop": 5}, "stop", "5 is not accepted: expected a text, or a list of texts"),
        ({"stop": ["a", 5]}, "stop", '["a", 5] is not accepted: expected a text, or a list'),
        ({"seed": -1}, "seed", "-1 is not accepted: expected an integer from 0"),
        ({"seed": 2**63}, "seed", "9223372036854775808 is not accepted"),
        ({"suffix": "x"}, "suffix", '"x" is not accepted: expected null'),
        ({"prompt": None}, "prompt", "null is not accepted: expected a text, a list of token ids"),
        ({"prompt": {"a": 1}}, "prompt", '{"a": 1} is not accepted'),
        ({"prompt": ["a", [5]]}, "prompt", '["a", [5]] is not accepted'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "nothing without stream"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", '"1_0" is not accepted: expected token ids'),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias", "expected each token id once"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "101.0 is not accepted"),
        ({"logit_bias": [5]}, "logit_bias", "[5] is not accepted: expected an object"),
        ({"tools": []}, "tools", "tools is not a field of this request, or not supported"),
        ({"rayserve": {"salt": ""}}, "rayserve.salt", 'rayserve.salt="" is not accepted'),
        ({"rayserve": {"salt": "x" * 257}}, "rayserve.salt", "expected at most 256 characters"),
        ({"rayserve": {"deadline_s": 0}}, "rayserve.deadline_s", "rayserve.deadline_s=0.0 is"),
        ({"rayserve": {"priority": 10**30}}, "rayserve.priority", "rayserve.priority=1000000"),
        ({"rayserve": {"window": 0}}, "rayserve.window", "rayserve.window=0 is not accepted"),
        (
            {"rayserve": {"num_sink_tokens": 2}},
            "rayserve.num_sink_tokens",
            "rayserve.num_sink_tokens=2 is not accepted: expected 0 where there is no window",
        ),
        (
            {"rayserve": {"retention": [{"start": 0, "end": 2}, {"start": 1}]}},
            "rayserve.retention[1].start",
            "rayserve.retention[1].start=1 is not accepted: expected an integer from 2",
        ),
        (
            {"rayserve": {"retention": [{"start": "0"}]}},
            "rayserve.retention[0].start",
            'rayserve.retention[0].start="0" is not accepted: expected an integer',
        ),
        (
            {"rayserve": {"retention": [{}] * 65}},
            "rayserve.retention",
            'rayserve.retention="65 ranges" is not accepted: expected at most 64',
        ),
        (
            {"rayserve": {"request_id": "a b"}},
            "rayserve.request_id",
            'rayserve.request_id="a b" is not accepted',
        ),
        ({"rayserve": {"tenant": "x"}}, "rayserve.tenant", "rayserve.tenant is not a field"),
        ({"rayserve": 5}, "rayserve", "rayserve=5 is not accepted: expected an object"),
    ],
)
def test_a_refusal_names_the_field_its_value_and_what_is_accepted(
    endpoint: Endpoint, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(endpoint, prompt="long enough", extra_body=fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    body = refused.value.body
    assert isinstance(body, dict)
    assert message in body["message"]
    assert body["message"].startswith(param)
    assert "None" not in body["message"]


def test_a_missing_field_is_named(endpoint: Endpoint) -> None:
    response = endpoint.http.post("/v1/completions", json={"model": MODEL})
    assert endpoint.error_of(response)["message"] == "prompt is missing"


def test_a_prompt_over_the_limit_has_openais_code() -> None:
    with endpoint_of({"model.max_model_len": 32}) as endpoint:
        with pytest.raises(openai.BadRequestError) as refused:
            create(endpoint, prompt="x" * 32)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
        assert "32 tokens" in str(refused.value)


def test_a_request_over_the_pool_has_openais_code() -> None:
    with endpoint_of({"cache.num_blocks": 8}) as endpoint:
        with pytest.raises(openai.BadRequestError) as refused:
            create(endpoint, prompt="x" * 20, max_tokens=20)
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == "max_tokens"


def test_an_overload_is_a_503_after_which_the_client_tries_again(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"batch.max_num_seqs": 1, "batch.max_num_waiting": 0}
    with endpoint_of(settings) as endpoint:
        gate.close()
        first = Stream(endpoint, prompt="x", max_tokens=3)
        endpoint.step(gate)
        assert first.response.status == 200
        with pytest.raises(openai.InternalServerError) as refused:
            create(endpoint, prompt="y")
        assert (refused.value.status_code, refused.value.code) == (503, "overloaded")
        after_s = int(refused.value.response.headers["retry-after"])
        assert after_s >= 1
        with pytest.raises(openai.InternalServerError):
            create(endpoint, prompt="y", stream=True)
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            gate.open()
            first.rest()
            endpoint.wait_for_blocks()

        monkeypatch.setattr("openai._base_client.time.sleep", sleep)
        patient = endpoint.client.with_options(max_retries=1)
        answer = patient.completions.create(model=MODEL, prompt="y", max_tokens=3, temperature=0)
        assert answer.choices[0].text == greedy("y", 3)
        assert slept == [after_s]


def test_an_ingress_has_so_many_requests_open_and_no_more(gate: Gate) -> None:
    with endpoint_of({"serve.max_live_requests": 2}) as endpoint:
        gate.close()
        first = Stream(endpoint, prompt=["x", "y"], max_tokens=3)
        endpoint.step(gate)
        assert first.response.status == 200
        with pytest.raises(openai.InternalServerError, match="2 requests are open here"):
            create(endpoint, prompt="z")
        gate.open()
        first.rest()
        # The third of three does not fit either, and then none is submitted.
        with pytest.raises(openai.InternalServerError, match="0 requests are open here"):
            create(endpoint, prompt=["x", "y", "z"])
        assert create(endpoint, prompt="z").choices[0].text == greedy("z", 6)


def test_without_a_replica_a_request_is_a_503() -> None:
    settings = {"recovery.restart": False, "recovery.patience_s": 0.05}
    with endpoint_of(settings) as endpoint:
        assert endpoint.http.get("/health").json() == {"status": "ok"}
        endpoint.shell.kill_replica(next(iter(endpoint.shell._gangs)), "a trial")
        response = endpoint.http.get("/health")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as refused:
                create(endpoint, prompt="x", stream=stream)
            assert (refused.value.status_code, refused.value.code) == (503, "no_replica")
            assert refused.value.response.headers["retry-after"] == "1"


# --- request ids, tokens --------------------------------------------------------------------


def test_every_answer_has_the_id_of_its_request(endpoint: Endpoint) -> None:
    mine = {"X-Request-Id": "mine ~ 1"}
    response = endpoint.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1}, headers=mine
    )
    assert response.headers.get_list("x-request-id") == ["mine ~ 1"]
    for path in ("/health", "/nowhere", "/v1/completions", "/v1/models/x"):
        drawn = [endpoint.http.get(path).headers["x-request-id"] for _ in range(2)]
        assert len(drawn[0]) == 32
        assert drawn[0] != drawn[1]
        assert endpoint.http.get(path, headers=mine).headers["x-request-id"] == "mine ~ 1"
    assert create(endpoint, prompt="x")._request_id is not None


@pytest.mark.parametrize("bad", [b"", b"x" * 257, b"tab\there", "\N{SNOWMAN}".encode(), b"\xff"])
def test_an_id_that_cannot_be_echoed_is_refused(endpoint: Endpoint, bad: bytes) -> None:
    response = endpoint.http.get("/v1/models", headers={b"X-Request-Id": bad})
    error = endpoint.error_of(response)
    assert error["param"] == "X-Request-Id"
    assert "expected 1 to 256 printable ASCII characters" in error["message"]
    assert len(response.headers["x-request-id"]) == 32


def test_text_and_tokens_are_turned_into_each_other(endpoint: Endpoint) -> None:
    def answer(path: str, **fields: object) -> Any:  # noqa: ANN401
        return endpoint.http.post(path, json=fields).json()

    found = answer("/tokenize", prompt="h\N{EURO SIGN}", model=MODEL)
    assert found == {"tokens": [104, 226, 130, 172], "count": 4, "max_model_len": 1024}
    assert answer("/detokenize", tokens=found["tokens"]) == {"prompt": "h\N{EURO SIGN}"}
    chat = [{"role": "user", "content": "hi"}]
    assert bytes(answer("/tokenize", messages=chat)["tokens"]) == b"user: hi\nassistant: "
    assert answer("/tokenize", prompt="")["tokens"] == []
    assert answer("/detokenize", tokens=[]) == {"prompt": ""}
    assert answer("/tokenize", prompt="x", model="y")["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {}, "prompt=null is not accepted: expected either prompt or messages"),
        ("/tokenize", {"prompt": 5}, "prompt=5 is not accepted: expected a text"),
        ("/tokenize", {"prompt": "x", "messages": []}, "expected either prompt or messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "\ud800"}, "expected a text without lone surrogates"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens=-1 is not accepted: expected token ids from"),
        ("/detokenize", {"tokens": [1000]}, "tokens=1000 is not accepted"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]=true is not accepted: expected an integer"),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_what_is_no_text_and_no_tokens_is_refused(
    endpoint: Endpoint, path: str, fields: dict[str, Any], message: str
) -> None:
    response = endpoint.http.post(
        path, content=json.dumps(fields), headers={"content-type": "application/json"}
    )
    assert message in endpoint.error_of(response)["message"]


# --- the asynchronous client ----------------------------------------------------------------


def test_many_requests_side_by_side_are_the_oracles(endpoint: Endpoint) -> None:
    prompts = [f"client {number}" for number in range(24)]

    async def one(client: openai.AsyncOpenAI, prompt: str, number: int) -> str:
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        if number % 2:
            return (await client.completions.create(model=MODEL, **fields)).choices[0].text
        stream = await client.completions.create(model=MODEL, stream=True, **fields)
        return "".join([part.choices[0].text async for part in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0
        ) as client:
            jobs = (one(client, prompt, number) for number, prompt in enumerate(prompts))
            return await asyncio.gather(*jobs)

    assert asyncio.run(run()) == [greedy(prompt, 12) for prompt in prompts]


def test_the_client_raises_for_what_it_cannot_reach(endpoint: Endpoint) -> None:
    response = endpoint.http.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["message"]) == (
        404,
        'there is no route "/v1/nothing"',
    )
    assert isinstance(response, httpx.Response)
