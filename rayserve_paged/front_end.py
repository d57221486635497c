"""Serves one reader's requests through a deployment: checks, ids, text, streams."""

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from rayserve_paged.consumer_loop import ConsumerLoop
from rayserve_paged.core.attachments import Attachment
from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.errors import (
    DuplicateRequestError,
    InvalidInputError,
    PagedError,
    RequestFailedError,
)
from rayserve_paged.core.field_checks import check_token_ids
from rayserve_paged.core.ids import Attempt, ConsumerId, PinId, RequestId
from rayserve_paged.core.replica_messages import PinPrefix, UnpinPrefix
from rayserve_paged.core.request import Request, admit
from rayserve_paged.core.retention import RetentionRange
from rayserve_paged.core.sampling_params import MAX_SEED, SamplingParams
from rayserve_paged.deployment import Deployment
from rayserve_paged.generation import Generation, Job
from rayserve_paged.model.tokenizer import Tokenizer
from rayserve_paged.outputs import DeploymentAccounting, Pin, RequestOutput, StreamChunk

Prompt = str | list[int] | tuple[int, ...] | Mapping[str, Sequence[Any]]
"""A text, token ids, {"messages": [{"role": TEXT, "content": TEXT}, ...]} for a chat, or
{"prompt_token_ids": [...], "attachments": [Attachment, ...]} for ids that content stands behind."""


class FrontEnd:
    """Turns prompts into requests and their streams into text.

    `prepare` may be called from any thread; everything else belongs to one asyncio loop.

    Args:
        deployment: Where requests go.
        tokenizer: Of its model.
    """

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer) -> None:
        self._deployment = deployment
        self._tokenizer = tokenizer
        self._consumer_id = ConsumerId(secrets.token_hex(4))
        self._loop = ConsumerLoop(deployment, self._consumer_id)
        self._live: dict[str, Generation] = {}
        self._numbers = itertools.count()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        request_id: str | None = None,
        *,
        scope: RequestScope | None = None,
        tenant: str | None = None,
        deadline_s: float | None = None,
        window: int | None = None,
        num_sink_tokens: int = 0,
        retention: tuple[RetentionRange, ...] = (),
        streaming: bool = False,
    ) -> Job:
        """Check a request against all that is known here, and draw what it leaves open.

        Args:
            prompt: Text, token ids with or without attachments, or a chat.
            params: A seed is drawn where it has none; `max_tokens` is clamped.
            priority: Lower is served first.
            request_id: None to draw one.
            scope: What it adds to the identity of its KV; None for nothing.
            tenant: Who is charged under weighted-fair queueing.
            deadline_s: Seconds from submission after which what is not done is given up.
            window: Positions that a token attends to, its own the last; None for all.
            num_sink_tokens: First positions that every token attends to besides.
            retention: How long which of its blocks are to stay cached.
            streaming: Whether its chunks are to be read as they come.

        Raises:
            InvalidInputError: Naming the field.
            CapacityError: The pool can never hold it.
        """
        text, token_ids, attachments = self._tokenize(prompt)
        scope = RequestScope() if scope is None else scope
        _check_type("params", params, SamplingParams, "SamplingParams, or None")
        _check_type("scope", scope, RequestScope, "a RequestScope, or None")
        if scope.window is not None:
            accepted = "an AttentionWindow, or None"
            _check_type("scope.window", scope.window, AttentionWindow, accepted)
            if window is not None or num_sink_tokens:
                raise InvalidInputError("window", window, "None where the scope has a window")
            window, num_sink_tokens = scope.window.size, scope.window.num_sink_tokens
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise InvalidInputError("request_id", request_id, "a non-empty string, or None")
        shows_logprobs = params.logprobs is not None
        if params.num_siblings > params.n:
            if streaming:
                accepted = f"n={params.n} for a stream, since the best are known at the end alone"
                raise InvalidInputError("best_of", params.best_of, accepted)
            if not shows_logprobs:
                # Samples are ranked by them.
                params = dataclasses.replace(params, logprobs=0)
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        # The id towards the deployment is private, so that no user's can get in another's way.
        private_id = RequestId(f"{self._consumer_id}-{next(self._numbers)}")
        request = Request(
            request_id=private_id,
            consumer_id=self._consumer_id,
            attempt=Attempt(0),
            prompt_token_ids=token_ids,
            params=params,
            priority=priority,
            tenant_salt=scope.tenant_salt,
            adapter=scope.adapter,
            attachments=attachments,
            tenant=tenant,
            deadline_s=deadline_s,
            window=window,
            num_sink_tokens=num_sink_tokens,
            retention=retention,
        )
        admitted = admit(request, self._deployment.limits)
        return Job(request_id or private_id, text, admitted, shows_logprobs)

    def _tokenize(
        self, prompt: Prompt
    ) -> tuple[str | None, tuple[int, ...], tuple[Attachment, ...]]:
        """The prompt's text where it has one, its ids and its attachments."""
        is_chat = isinstance(prompt, Mapping)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return None, *_parts(prompt)
            if set(prompt) != {"messages"}:
                raise InvalidInputError("prompt", prompt, 'a chat as {"messages": [...]} alone')
            text = self._tokenizer.apply_chat_template(prompt["messages"])
        elif isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, list | tuple):
            return None, tuple(prompt), ()
        else:
            raise InvalidInputError("prompt", prompt, "a text, a list of token ids or a chat")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError("prompt", text, "a text without lone surrogates") from error
        # Not by the ids, among which a beginning-of-sequence token would hide that it is empty.
        token_ids = self._tokenizer.encode(text, add_special_tokens=not is_chat) if text else []
        if not token_ids:
            raise InvalidInputError("prompt", text, "a text of at least one token")
        return text, tuple(token_ids), ()

    async def stream(self, job: Job) -> AsyncGenerator[StreamChunk, None]:
        """Submit a request and yield its chunks; the last one has the output.

        The chunks of parallel samples come in whatever order they arise, and one that fails does
        not end the others: it is raised after them.

        Closing the generator early cancels the request and frees its blocks.

        Raises:
            DuplicateRequestError: A live request has this id.
            RequestFailedError: It failed on the way; a stream that ends without an error is whole.
            OverloadedError: As much waits in the deployment as may wait.
            PagedError: It was refused, or the deployment cannot be reached.
        """
        (generation,) = self._claim([job])
        async with contextlib.aclosing(self._chunks(generation, waits=False)) as chunks:
            async for chunk in chunks:
                if chunk.output is not None and chunk.output.error is not None:
                    raise RequestFailedError(job.name, chunk.output.error)
                yield chunk

    async def complete(
        self, jobs: Sequence[Job], on_output: Callable[[RequestOutput], None] | None = None
    ) -> list[RequestOutput]:
        """Submit requests and wait until every one has ended, in whatever way.

        Where the deployment is overloaded they wait here, in their order, until there is room.

        Args:
            jobs: The requests, submitted in this order.
            on_output: Called with each output as soon as it is there.

        Returns:
            One output for each, in their order; those that failed carry the error.

        Raises:
            DuplicateRequestError: Two of them, or one and a live request, have the same id.
        """

        async def settle(generation: Generation) -> RequestOutput:
            # Gathered alone: whatever one request raises is its own end and no other's.
            (result,) = await asyncio.gather(self._whole(generation), return_exceptions=True)
            if isinstance(result, BaseException):
                result = generation.failed(_reason(result))
            if on_output is not None:
                on_output(result)
            return result

        generations = self._claim(jobs)
        tasks = [asyncio.create_task(settle(generation)) for generation in generations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # Where the caller gives up, or `on_output` raised, none is left behind.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for generation in generations:
                self._release(generation)

    async def _whole(self, generation: Generation) -> RequestOutput:
        output = None
        async with contextlib.aclosing(self._chunks(generation, waits=True)) as chunks:
            async for chunk in chunks:
                output = chunk.output
        assert output is not None, "the last chunk carries the output"
        return output

    async def _chunks(
        self, generation: Generation, *, waits: bool
    ) -> AsyncGenerator[StreamChunk, None]:
        generation.begin(time.monotonic())
        request = generation.job.request
        updates = self._loop.stream(request, waits=waits)
        try:
            async with contextlib.aclosing(updates):
                async for update in updates:
                    chunk = generation.push(update, time.monotonic())
                    if chunk is None:
                        continue
                    yield chunk
                    if chunk.output is not None:
                        return  # Where a stop string ended it, closing cancels the rest.
                    if chunk.finish_reason is not None and update.finish is None:
                        # A stop string has ended one sample of several.
                        await self._loop.cancel(request.request_id, update.sibling)
        finally:
            self._release(generation)

    def _claim(self, jobs: Sequence[Job]) -> list[Generation]:
        """Take the ids of requests that begin to live: all of them or none."""
        generations: dict[str, Generation] = {}
        for job in jobs:
            if job.name in self._live or job.name in generations:
                raise DuplicateRequestError(job.name)
            generations[job.name] = Generation(job, self._tokenizer)
        self._live |= generations
        return list(generations.values())

    def _release(self, generation: Generation) -> None:
        if self._live.get(generation.job.name) is generation:
            del self._live[generation.job.name]

    async def cancel(self, request_id: str, sibling: int | None = None) -> bool:
        """Ask for the end of a live request, or of one of its samples; its output then says
        CANCELLED.

        Args:
            request_id: Towards the user.
            sibling: Which of the samples drawn; None for all.

        Returns:
            Whether such a request was live.

        Raises:
            InvalidInputError: It has no such sample.
        """
        generation = self._live.get(request_id)
        if generation is None:
            return False
        generation.cancel(sibling)
        await self._loop.cancel(generation.job.request.request_id, sibling)
        return True

    async def accounting(self) -> DeploymentAccounting:
        """Take the ledgers of all replicas."""
        return DeploymentAccounting(dict(await self._deployment.accounting()))

    async def reset_cache(self) -> None:
        """Forget the prefix caches of all replicas."""
        await self._deployment.reset_cache()

    async def pin_prefix(self, prompt: Prompt, pin_id: str | None) -> Pin:
        """Keep the cached blocks of a prompt on every replica that has them.

        Raises:
            InvalidInputError: At the prompt or the name.
            PinLimitError: On some replica pins would hold too much; it is pinned on none.
        """
        _text, token_ids, attachments = self._tokenize(prompt)
        if attachments:
            raise InvalidInputError("prompt", prompt, "a prompt without attachments")
        check_token_ids("prompt", token_ids, self._deployment.limits.vocab_size)
        if pin_id is not None and not (isinstance(pin_id, str) and pin_id):
            raise InvalidInputError("pin_id", pin_id, "a non-empty string, or None")
        name = PinId(pin_id or secrets.token_hex(8))
        answers = await self._deployment.pin_prefix(PinPrefix(name, token_ids))
        for _replica_id, answer in answers:
            if answer.refused is not None:
                await self._deployment.unpin_prefix(UnpinPrefix(name))
                raise answer.refused
        return Pin(name, {replica_id: answer.num_tokens for replica_id, answer in answers})

    async def unpin(self, pin_id: str) -> None:
        """Let go of a pin on every replica; an unknown name is ignored."""
        await self._deployment.unpin_prefix(UnpinPrefix(PinId(pin_id)))

    async def close(self) -> None:
        """Cancel what is open; streams that are read raise RequestFailedError."""
        await self._loop.close()


def _check_type(field: str, value: object, kind: type, accepted: str) -> None:
    if not isinstance(value, kind):
        raise InvalidInputError(field, value, accepted)


def _parts(prompt: Mapping[str, object]) -> tuple[tuple[int, ...], tuple[Attachment, ...]]:
    """The ids and the attachments of a prompt that names them; what they hold is checked later."""
    unknown = prompt.keys() - {"prompt_token_ids", "attachments"}
    if unknown:
        raise InvalidInputError("prompt", sorted(unknown), "prompt_token_ids and attachments alone")
    parts = []
    for field in ("prompt_token_ids", "attachments"):
        values = prompt.get(field, ())
        if not isinstance(values, list | tuple):
            raise InvalidInputError(field, values, "a list")
        parts.append(tuple(values))
    token_ids, attachments = parts
    return token_ids, attachments


def _reason(error: BaseException) -> str:
    if isinstance(error, RequestFailedError):
        return error.reason
    return str(error) if isinstance(error, PagedError) else f"{type(error).__name__}: {error}"
