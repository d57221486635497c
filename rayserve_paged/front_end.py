"""Serves one reader's requests through a deployment: checks, ids, text, streams."""

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from rayserve_paged.consumer_loop import ConsumerLoop
from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.errors import (
    DuplicateRequestError,
    InvalidInputError,
    PagedError,
    RequestFailedError,
)
from rayserve_paged.core.ids import Attempt, ConsumerId, PinId, RequestId
from rayserve_paged.core.replica_messages import PinPrefix, UnpinPrefix
from rayserve_paged.core.request import Request, admit
from rayserve_paged.core.running_request import RunningRequest
from rayserve_paged.core.sampling_params import MAX_SEED, SamplingParams
from rayserve_paged.core.token_ids import TokenIds
from rayserve_paged.deployment import Deployment
from rayserve_paged.generation import Generation, Job
from rayserve_paged.model.grammar_checker import GrammarChecker
from rayserve_paged.model.tokenizer import Tokenizer
from rayserve_paged.outputs import DeploymentAccounting, Pin, RequestOutput, StreamChunk
from rayserve_paged.prompts import Prompt, tokenize
from rayserve_paged.request_options import NO_OPTIONS, RequestOptions

_RECOVERY = RecoveryConfig()


class FrontEnd:
    """Turns prompts into requests and their streams into text.

    `prepare` may be called from any thread; everything else belongs to one asyncio loop.

    Args:
        deployment: Where requests go.
        tokenizer: Of its model.
        recovery: How long its requests wait for a replica, and how often they are tried.
    """

    def __init__(
        self,
        deployment: Deployment,
        tokenizer: Tokenizer,
        recovery: RecoveryConfig = _RECOVERY,
    ) -> None:
        self._deployment = deployment
        self._tokenizer = tokenizer
        limits = deployment.limits
        self._grammars = GrammarChecker(tokenizer, limits.vocab_size, limits.eos_token_ids)
        self._consumer_id = ConsumerId(secrets.token_hex(4))
        self._loop = ConsumerLoop(deployment, self._consumer_id, recovery)
        self._live: dict[str, Generation] = {}
        self._numbers = itertools.count()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        streaming: bool = False,
    ) -> Job:
        """Check a request against all that is known here, and draw what it leaves open.

        Args:
            prompt: Text, token ids with or without attachments, or a chat.
            params: A seed is drawn where it has none; `max_tokens` is clamped.
            options: How it is served; an id is drawn where they have none.
            streaming: Whether its chunks are to be read as they come.

        Raises:
            InvalidInputError: Naming the field.
            CapacityError: The pool can never hold it.
        """
        text, token_ids, attachments = tokenize(prompt, self._tokenizer)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidInputError("params", params, "SamplingParams, or None")
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
            prompt_token_ids=TokenIds.of(token_ids, self._deployment.limits.vocab_size),
            params=params,
            priority=options.priority,
            scope=options.scope,
            attachments=attachments,
            tenant=options.tenant,
            quota=options.quota,
            deadline_s=options.deadline_s,
            retention=options.retention,
        )
        admitted = admit(request, self._deployment.limits)
        if admitted.params.grammar is not None:
            # It may take seconds, so that all that is cheap has been checked before.
            checked = self._grammars.checked(admitted.params)
            admitted = dataclasses.replace(admitted, params=checked)
        return Job(options.request_id or private_id, text, admitted, shows_logprobs)

    async def stream(self, job: Job) -> AsyncGenerator[StreamChunk, None]:
        """Submit a request and yield its chunks; the last one has the output.

        The chunks of parallel samples come in whatever order they arise, and one that fails does
        not end the others: it is raised after them.

        Closing the generator early cancels the request and frees its blocks.

        Raises:
            DuplicateRequestError: A live request has this id.
            RequestFailedError: It failed on the way; a stream that ends without an error is whole.
            OverloadedError: As much waits in the deployment as may wait.
            QuotaExceededError: Its tenant uses as much as it may.
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

        Where the deployment is overloaded, or a tenant at its quota, they wait here until there is
        room: those of one tenant in their order.

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

    def running(self) -> tuple[RunningRequest, ...]:
        """Return the live requests, in the order in which they came."""
        now = time.monotonic()
        return tuple(
            generation.running(*self._loop.place(generation.job.request.request_id), now)
            for generation in self._live.values()
        )

    async def accounting(self) -> DeploymentAccounting:
        """Take the ledgers of all replicas."""
        return DeploymentAccounting(dict(await self._deployment.accounting()))

    async def reset_cache(self) -> None:
        """Forget the prefix caches of all replicas."""
        await self._deployment.reset_cache()

    async def pin_prefix(self, job: Job, pin_id: str | None) -> Pin:
        """Keep the cached blocks of a prompt on every replica that has them.

        Args:
            job: Of the prompt; it is not submitted.
            pin_id: The name; None to draw one.

        Raises:
            InvalidInputError: At the name.
            PinLimitError: On some replica pins would hold too much; it is pinned on none.
        """
        if pin_id is not None and not (isinstance(pin_id, str) and pin_id):
            raise InvalidInputError("pin_id", pin_id, "a non-empty string, or None")
        name, request = PinId(pin_id or secrets.token_hex(8)), job.request
        event = PinPrefix(name, request.prompt_token_ids, request.scope, request.attachments)
        answers = await self._deployment.pin_prefix(event)
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
        self._grammars.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, RequestFailedError):
        return error.reason
    return str(error) if isinstance(error, PagedError) else f"{type(error).__name__}: {error}"
