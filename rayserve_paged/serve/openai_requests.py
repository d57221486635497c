"""Turns the body of an OpenAI request into prompts, sampling parameters and options."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.retention import DEFAULT_PRIORITY, MAX_RANGES, RetentionRange
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.prompts import Prompt
from rayserve_paged.request_options import RequestOptions
from rayserve_paged.serve.openai_types import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    RayserveFields,
)

_SAME_NAME: Final = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "prompt_logprobs",
)
"""Fields that mean here what they mean in `SamplingParams`; null is the default."""

_RAYSERVE: Final = {
    "tenant_salt": "rayserve.salt",
    "deadline_s": "rayserve.deadline_s",
    "priority": "rayserve.priority",
    "retention": "rayserve.retention",
    "window": "rayserve.window",
    "num_sink_tokens": "rayserve.num_sink_tokens",
}
_COMPLETION_NAMES: Final = {**_RAYSERVE, "prompt_token_ids": "prompt"}
_CHAT_NAMES: Final = {
    **_RAYSERVE,
    "prompt": "messages",
    "prompt_token_ids": "messages",
    "logprobs": "top_logprobs",
}
"""What fields of the Python API are called in a body."""

_COMPLETION_MAX_TOKENS: Final = 16
"""Where a completion does not say; OpenAI's own default."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for.

    Args:
        prompts: At least one.
        params: Of each of them.
        options: Of each of them; `request_id` is of the whole body.
        echoes: Whether the prompt stands before each answer.
        scores_prompt: Whether its log-probabilities stand there too.
        hides_output: Whether the prompt is all that is wanted.
        num_prompt_top: Most likely tokens to list with each prompt token, apart from an echo; None
            for no such list.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    options: RequestOptions
    echoes: bool = False
    scores_prompt: bool = False
    hides_output: bool = False
    num_prompt_top: int | None = None


@contextlib.contextmanager
def named_as_in(body: CompletionRequest | ChatCompletionRequest) -> Iterator[None]:
    """Have refusals name the fields as the body does."""
    names = dict(_COMPLETION_NAMES)
    if isinstance(body, ChatCompletionRequest):
        names = dict(_CHAT_NAMES)
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    try:
        yield
    except InvalidInputError as error:
        name, bracket, rest = error.field.partition("[")
        error.field = f"{names.get(name, name)}{bracket}{rest}"
        raise


def completion_ask(body: CompletionRequest, max_prompts: int) -> Ask:
    """Return what a completion request asks for.

    Args:
        body: The request.
        max_prompts: How many prompts it may have.

    Raises:
        InvalidInputError: At a field of the body.
    """
    prompts = _prompts(body.prompt, max_prompts)
    _check_stream(body)
    fields = _sampling(body)
    max_tokens = body.max_tokens
    if max_tokens is None and "max_tokens" not in body.model_fields_set:
        max_tokens = _COMPLETION_MAX_TOKENS
    hides_output = max_tokens == 0 and bool(body.echo)
    fields["max_tokens"] = 1 if hides_output else max_tokens
    scores_prompt = bool(body.echo) and body.logprobs is not None
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if scores_prompt:
            fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return Ask(
        prompts,
        SamplingParams(**fields),
        _options(body.rayserve),
        echoes=bool(body.echo),
        scores_prompt=scores_prompt,
        hides_output=hides_output,
        num_prompt_top=body.prompt_logprobs,
    )


def chat_ask(body: ChatCompletionRequest) -> Ask:
    """Return what a chat request asks for.

    Raises:
        InvalidInputError: At a field of the body.
    """
    _check_stream(body)
    fields = _sampling(body)
    asked = body.max_completion_tokens
    if asked is not None and body.max_tokens is not None:
        accepted = f"nothing beside max_tokens={body.max_tokens}, its older name"
        raise InvalidInputError("max_completion_tokens", asked, accepted)
    fields["max_tokens"] = body.max_tokens if asked is None else asked
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise InvalidInputError("top_logprobs", body.top_logprobs, "nothing without logprobs: true")
    prompt: Prompt = {"messages": chat_messages(body.messages)}
    params, options = SamplingParams(**fields), _options(body.rayserve)
    return Ask((prompt,), params, options, num_prompt_top=body.prompt_logprobs)


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Return messages as chat templates take them: each with one text.

    A `developer` is what newer models call the `system`.
    """
    plain = []
    for message in messages:
        content = message.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        named = {} if message.name is None else {"name": message.name}
        plain.append({"role": role, "content": content, **named})
    return plain


def _prompts(
    prompt: str | list[str] | list[int] | list[list[int]], max_prompts: int
) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise InvalidInputError("prompt", prompt, "a text, token ids, or at least one of either")
    several = cast("Sequence[Prompt]", [prompt] if isinstance(prompt[0], int) else prompt)
    prompts = tuple(several)
    if len(prompts) > max_prompts:
        raise InvalidInputError("prompt", f"{len(prompts)} prompts", f"at most {max_prompts}")
    return prompts


def _check_stream(body: CompletionRequest | ChatCompletionRequest) -> None:
    if body.stream_options is not None and not body.stream:
        accepted = "nothing without stream: true"
        raise InvalidInputError("stream_options", body.stream_options.model_dump(), accepted)


def _sampling(body: CompletionRequest | ChatCompletionRequest) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in _SAME_NAME}
    fields = {name: value for name, value in given.items() if value is not None}
    if body.logit_bias is not None:
        fields["logit_bias"] = _biases(body.logit_bias)
    if body.response_format is not None:
        asked = body.response_format.model_dump(by_alias=True)
        fields["grammar"] = Grammar.of_response_format(asked)
    return fields


def _biases(bias: dict[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, value in bias.items():
        digits = key.removeprefix("-")
        # Not by int(), which takes "1_0" and the digits of every script.
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
            raise InvalidInputError("logit_bias", key, "token ids as keys, written as text")
        if int(key) in biases:
            raise InvalidInputError("logit_bias", key, "each token id once")
        biases[int(key)] = value
    return biases


def _options(fields: RayserveFields) -> RequestOptions:
    if len(fields.retention) > MAX_RANGES:
        accepted = f"at most {MAX_RANGES}"
        raise InvalidInputError("retention", f"{len(fields.retention)} ranges", accepted)
    retention = tuple(
        RetentionRange(
            one.start,
            one.end,
            DEFAULT_PRIORITY if one.priority is None else one.priority,
            one.duration_s,
        )
        for one in fields.retention
    )
    return RequestOptions(
        request_id=fields.request_id,
        priority=0 if fields.priority is None else fields.priority,
        tenant_salt=fields.salt,
        window=fields.window,
        num_sink_tokens=fields.num_sink_tokens,
        retention=retention,
        deadline_s=fields.deadline_s,
    )
