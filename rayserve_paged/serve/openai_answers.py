"""Turns chunks and outputs into the answers of the OpenAI API, streamed and whole.

JSON has no infinity: a log-probability of minus infinity, as of a token that was filtered out, is
written as `MIN_LOGPROB`, and one that is not a number as well.
"""

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.model.tokenizer import Tokenizer
from rayserve_paged.outputs import RequestOutput, SampleOutput, StreamChunk
from rayserve_paged.serve.openai_requests import Ask

MIN_LOGPROB: Final = -9999.0
"""What stands for minus infinity, as in OpenAI's own answers."""

Fields = dict[str, Any]


class AnswerWriter(Protocol):
    """Writes the answer to one body; the choices of prompt p are p * n to p * n + n - 1."""

    def chunk(self, prompt: int, chunk: StreamChunk) -> Fields | None:
        """Return what to send of a chunk; None where there is nothing to show yet."""
        ...

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> Fields:
        """Return the last chunk of a stream that includes the usage."""
        ...

    def whole(self, outputs: Sequence[RequestOutput]) -> Fields:
        """Return the whole answer, of one output for each prompt."""
        ...


def usage(outputs: Iterable[RequestOutput], *, hides_output: bool = False) -> Fields:
    """Count the tokens of a body's requests; of samples, those that are returned."""
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(sample.token_ids) for output in outputs for sample in output.samples)
    if hides_output:
        num_output = 0
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
    }


class CompletionWriter:
    """Writes answers of `/v1/completions`.

    Args:
        head: `id`, `created` and `model` of the answer.
        ask: What was asked for.
        prompts: Token ids of each prompt.
        tokenizer: Of the model.
    """

    def __init__(
        self, head: Fields, ask: Ask, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        self._head = {**head, "object": "text_completion"}
        self._ask = ask
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._listings: dict[int, _Listing] = {}
        self._scores = _PromptScores(ask, tokenizer)

    def chunk(self, prompt: int, chunk: StreamChunk) -> Fields | None:
        """As `AnswerWriter.chunk`."""
        ask = self._ask
        self._scores.add(prompt, chunk)
        index = prompt * ask.params.n + chunk.sibling
        text, listing = chunk.text, self._listings.get(index)
        is_first = listing is None
        if listing is None:
            listing = self._listings[index] = _Listing(self._tokenizer)
        if ask.hides_output:
            text = ""
        if is_first and ask.echoes:
            text = self._tokenizer.decode(self._prompts[prompt]) + text
        logprobs = None
        if ask.params.logprobs is not None:
            if is_first and ask.scores_prompt:
                listing.add_prompt(self._prompts[prompt], self._scores.of(prompt))
            if not ask.hides_output:
                listing.add(chunk.token_ids, chunk.logprobs)
            logprobs = listing.take(ask.params.logprobs)
        if not text and logprobs is None and chunk.finish_reason is None:
            return None
        choice: Fields = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._reason(chunk.finish_reason),
        }
        if is_first:
            choice |= self._scores.fields(self._prompts[prompt], self._scores.of(prompt))
        return {**self._head, "choices": [choice]}

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> Fields:
        """As `AnswerWriter.usage_chunk`."""
        counted = usage(outputs, hides_output=self._ask.hides_output)
        return {**self._head, "choices": [], "usage": counted}

    def whole(self, outputs: Sequence[RequestOutput]) -> Fields:
        """As `AnswerWriter.whole`."""
        choices = [
            self._choice(prompt * self._ask.params.n + place, output, sample)
            for prompt, output in enumerate(outputs)
            for place, sample in enumerate(output.samples)
        ]
        counted = usage(outputs, hides_output=self._ask.hides_output)
        return {**self._head, "choices": choices, "usage": counted}

    def _choice(self, index: int, output: RequestOutput, sample: SampleOutput) -> Fields:
        ask, logprobs = self._ask, None
        text = "" if ask.hides_output else sample.text
        if ask.echoes:
            text = self._tokenizer.decode(output.prompt_token_ids) + text
        scores = _known(output)
        if ask.params.logprobs is not None:
            listing = _Listing(self._tokenizer)
            if ask.scores_prompt:
                listing.add_prompt(output.prompt_token_ids, scores)
            if not ask.hides_output:
                listing.add(sample.token_ids, sample.logprobs or ())
            logprobs = listing.take(ask.params.logprobs)
        choice: Fields = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._reason(sample.finish_reason),
        }
        return choice | self._scores.fields(output.prompt_token_ids, scores)

    def _reason(self, reason: FinishReason | None) -> FinishReason | None:
        # Whatever ended the one token that is computed and not shown: no more were wanted.
        hides = self._ask.hides_output and reason is FinishReason.STOP
        return FinishReason.LENGTH if hides else reason


class ChatWriter:
    """Writes answers of `/v1/chat/completions`.

    Args:
        head: `id`, `created` and `model` of the answer.
        ask: What was asked for.
        prompt: Its token ids.
        tokenizer: Of the model.
    """

    def __init__(self, head: Fields, ask: Ask, prompt: Sequence[int], tokenizer: Tokenizer) -> None:
        self._head = head
        self._ask = ask
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._scores = _PromptScores(ask, tokenizer)

    def chunk(self, prompt: int, chunk: StreamChunk) -> Fields | None:
        """As `AnswerWriter.chunk`."""
        self._scores.add(prompt, chunk)
        index = prompt * self._ask.params.n + chunk.sibling
        delta: Fields = {"content": chunk.text} if chunk.text else {}
        is_first = index not in self._begun
        if is_first:
            self._begun.add(index)
            delta = {"role": "assistant", "content": chunk.text}
        logprobs = self._logprobs(chunk.token_ids, chunk.logprobs)
        if not delta and logprobs is None and chunk.finish_reason is None:
            return None
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
        }
        if is_first:
            choice |= self._scores.fields(self._prompt, self._scores.of(prompt))
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> Fields:
        """As `AnswerWriter.usage_chunk`."""
        kind = "chat.completion.chunk"
        return {**self._head, "object": kind, "choices": [], "usage": usage(outputs)}

    def whole(self, outputs: Sequence[RequestOutput]) -> Fields:
        """As `AnswerWriter.whole`."""
        (output,) = outputs
        scores = self._scores.fields(output.prompt_token_ids, _known(output))
        choices = [
            {
                "index": place,
                "message": {"role": "assistant", "content": sample.text},
                "logprobs": self._logprobs(sample.token_ids, sample.logprobs or ()),
                "finish_reason": sample.finish_reason,
                **scores,
            }
            for place, sample in enumerate(output.samples)
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(outputs),
        }

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Fields | None:
        if self._ask.params.logprobs is None or not token_ids:
            return None
        content = []
        for token_id, position in zip(token_ids, logprobs, strict=True):
            top = [self._token(other, value) for other, value in position.top]
            content.append({**self._token(token_id, position.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> Fields:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


class _PromptScores:
    """The log-probabilities of prompts, as they come on one chunk of each prompt's stream."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer) -> None:
        self._num_top = ask.num_prompt_top
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[TokenLogprobs, ...]] = {}

    def add(self, prompt: int, chunk: StreamChunk) -> None:
        if chunk.prompt_logprobs:
            self._known[prompt] = chunk.prompt_logprobs

    def of(self, prompt: int) -> tuple[TokenLogprobs, ...]:
        return self._known.get(prompt, ())

    def fields(self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs]) -> Fields:
        """Return the field `prompt_logprobs` of a choice, where it has one."""
        num_top = self._num_top
        if num_top is None:
            return {}
        if len(scores) != len(token_ids) - 1:
            return {"prompt_logprobs": None}
        return {"prompt_logprobs": [None, *(self._by_id(one, num_top) for one in scores)]}

    def _by_id(self, position: TokenLogprobs, num_top: int) -> Fields:
        top = [
            {
                "token_id": token_id,
                "token": _text(self._tokenizer.token_bytes(token_id)),
                "logprob": _finite(value),
            }
            for token_id, value in position.top[:num_top]
        ]
        return {"logprob": _finite(position.logprob), "top_logprobs": top}


class _Listing:
    """The log-probabilities of one completion choice, token by token, as they come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0
        self._rows: list[tuple[int, TokenLogprobs | None, int]] = []

    def add_prompt(self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs]) -> None:
        """Add the prompt, of whose first token there is no score."""
        # Where the request ended before its first output there are none at all.
        known = (None, *scores) if len(scores) == len(token_ids) - 1 else (None,) * len(token_ids)
        for token_id, position in zip(token_ids, known, strict=True):
            self._add(token_id, position)
        # A character does not go on from the prompt into the output.
        self._num_chars += len(self._decoder.decode(b"", final=True))

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add output tokens."""
        for token_id, position in zip(token_ids, logprobs, strict=True):
            self._add(token_id, position)

    def _add(self, token_id: int, position: TokenLogprobs | None) -> None:
        self._rows.append((token_id, position, self._num_chars))
        self._num_chars += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def take(self, num_top: int) -> Fields | None:
        """Return what was added since the last time; None where nothing was."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        top = None
        if num_top:
            top = [None if one is None else self._top(one.top[:num_top]) for _, one, _ in rows]
        return {
            "tokens": [_text(self._tokenizer.token_bytes(token_id)) for token_id, _, _ in rows],
            "token_logprobs": [
                None if position is None else _finite(position.logprob) for _, position, _ in rows
            ],
            "top_logprobs": top,
            "text_offset": [offset for _, _, offset in rows],
        }

    def _top(self, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, value in likely:
            # Of tokens that read the same, as special ones do, the most likely.
            top.setdefault(_text(self._tokenizer.token_bytes(token_id)), _finite(value))
        return top


def _known(output: RequestOutput) -> tuple[TokenLogprobs, ...]:
    return tuple(one for one in output.prompt_logprobs or () if one is not None)


def _text(data: bytes) -> str:
    """Return a token as text; as OpenAI's API does, its bytes where it is no text by itself."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > MIN_LOGPROB else MIN_LOGPROB
