"""Turns chunks and outputs into the answers of the OpenAI API, streamed and whole.

JSON has no infinity: a log-probability of minus infinity, as of a token that was filtered out, is
written as `MIN_LOGPROB`, and one that is not a number as well.
"""

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

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
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}

    def chunk(self, prompt: int, chunk: StreamChunk) -> Fields | None:
        """As `AnswerWriter.chunk`."""
        ask = self._ask
        if chunk.prompt_logprobs:
            self._scores[prompt] = chunk.prompt_logprobs
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
                listing.add_prompt(self._prompts[prompt], self._scores.get(prompt, ()))
            if not ask.hides_output:
                listing.add(chunk.token_ids, chunk.logprobs)
            logprobs = listing.take(ask.params.logprobs)
        if not text and logprobs is None and chunk.finish_reason is None:
            return None
        choice: Fields = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
        }
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
        scores = output.prompt_logprobs
        if ask.params.logprobs is not None:
            listing = _Listing(self._tokenizer)
            if ask.scores_prompt:
                known = () if scores is None else tuple(one for one in scores if one is not None)
                listing.add_prompt(output.prompt_token_ids, known)
            if not ask.hides_output:
                listing.add(sample.token_ids, sample.logprobs or ())
            logprobs = listing.take(ask.params.logprobs)
        choice: Fields = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
        }
        if scores is not None and not ask.scores_prompt:
            choice["prompt_logprobs"] = [_by_id(one, self._tokenizer) for one in scores]
        return choice


class ChatWriter:
    """Writes answers of `/v1/chat/completions`.

    Args:
        head: `id`, `created` and `model` of the answer.
        ask: What was asked for.
        tokenizer: Of the model.
    """

    def __init__(self, head: Fields, ask: Ask, tokenizer: Tokenizer) -> None:
        self._head = head
        self._ask = ask
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def chunk(self, prompt: int, chunk: StreamChunk) -> Fields | None:
        """As `AnswerWriter.chunk`."""
        index = prompt * self._ask.params.n + chunk.sibling
        delta: Fields = {"content": chunk.text} if chunk.text else {}
        if index not in self._begun:
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
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> Fields:
        """As `AnswerWriter.usage_chunk`."""
        kind = "chat.completion.chunk"
        return {**self._head, "object": kind, "choices": [], "usage": usage(outputs)}

    def whole(self, outputs: Sequence[RequestOutput]) -> Fields:
        """As `AnswerWriter.whole`."""
        choices = []
        for output in outputs:
            for place, sample in enumerate(output.samples):
                choice: Fields = {
                    "index": place,
                    "message": {"role": "assistant", "content": sample.text},
                    "logprobs": self._logprobs(sample.token_ids, sample.logprobs or ()),
                    "finish_reason": sample.finish_reason,
                }
                if output.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = [
                        _by_id(one, self._tokenizer) for one in output.prompt_logprobs
                    ]
                choices.append(choice)
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
        return {
            "token": data.decode("utf-8", errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }


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
        known = (None, *scores) if scores else (None,) * len(token_ids)
        for token_id, position in zip(token_ids, known, strict=True):
            self._add(token_id, position)

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
            top = [None if position is None else self._top(position) for _, position, _ in rows]
        return {
            "tokens": [self._text(token_id) for token_id, _, _ in rows],
            "token_logprobs": [
                None if position is None else _finite(position.logprob) for _, position, _ in rows
            ],
            "top_logprobs": top,
            "text_offset": [offset for _, _, offset in rows],
        }

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, value in position.top:
            # Of tokens that read the same, as parts of characters do, the most likely.
            top.setdefault(self._text(token_id), _finite(value))
        return top

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _by_id(position: TokenLogprobs | None, tokenizer: Tokenizer) -> Fields | None:
    """Return the log-probabilities of a prompt token by token id."""
    if position is None:
        return None
    return {
        "logprob": _finite(position.logprob),
        "top_logprobs": [
            {
                "token_id": token_id,
                "token": tokenizer.token_bytes(token_id).decode("utf-8", errors="replace"),
                "logprob": _finite(value),
            }
            for token_id, value in position.top
        ],
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > MIN_LOGPROB else MIN_LOGPROB
