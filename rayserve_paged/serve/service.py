"""What one ingress does for its requests: checks, submits and follows them."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rayserve_paged.core.errors import (
    ControllerAwayError,
    DeploymentError,
    InvalidInputError,
    PagedError,
)
from rayserve_paged.deployment import Deployment
from rayserve_paged.front_end import FrontEnd
from rayserve_paged.generation import Job
from rayserve_paged.model.tokenizer import Tokenizer
from rayserve_paged.outputs import RequestOutput, StreamChunk
from rayserve_paged.prompts import Prompt
from rayserve_paged.request_options import RequestOptions
from rayserve_paged.serve.dashboard_feed import DashboardFeed
from rayserve_paged.serve.http_errors import HttpError, shown_value
from rayserve_paged.serve.keys_file import WatchedKeys
from rayserve_paged.serve.openai_requests import Ask
from rayserve_paged.serve.request_figures import RequestFigures
from rayserve_paged.serve.serve_config import EndpointConfig
from rayserve_paged.serve.tenants import Tenant

_LONG_TEXT: Final = 4096
"""Characters from which on a prompt is tokenized in a thread, so that streams go on meanwhile."""

_HEALTH_TIMEOUT_S: Final = 1.0
_HEALTH_KEPT_S: Final = 3.0
_REPORT_S: Final = 1.0

Chunks = list[tuple[int, StreamChunk]]
"""New chunks, each with the number of its prompt in the body."""


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """A body whose prompts are ready to be submitted.

    Args:
        request_id: Of the body, towards its client.
        created: Unix seconds.
        jobs: One for each prompt.
    """

    request_id: str
    created: int
    jobs: tuple[Job, ...]


class Service:
    """Serves the requests of one ingress; belongs to one asyncio loop.

    Args:
        deployment: Behind the endpoint.
        tokenizer: Of its model.
        config: Of the endpoint.

    Raises:
        InvalidInputError: Its keys cannot be read.
    """

    def __init__(
        self, deployment: Deployment, tokenizer: Tokenizer, config: EndpointConfig
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.started = int(time.time())
        self.dashboard = DashboardFeed(deployment, config.model_name)
        self._deployment = deployment
        self._front_end = FrontEnd(deployment, tokenizer, config.recovery)
        path = config.serve.keys_file
        self.keys = WatchedKeys(None if path is None else Path(path).expanduser())
        self._num_live = 0
        self._figures = RequestFigures()
        # When a replica was last known to serve, on the clock of time.monotonic.
        self._healthy_at = float("-inf")

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that a request may have."""
        return self._deployment.limits.served_len

    def write_gap_s(self) -> float:
        """Return how long a stream waits between two writes: the longer, the more are open."""
        serve = self.config.serve
        return max(serve.min_write_gap_s, self._num_live / serve.max_writes_per_s)

    def check_model(self, name: str | None) -> None:
        """Check the model that a body names.

        Raises:
            HttpError: There is no such model.
        """
        if name is not None and name != self.config.model_name:
            served = shown_value(self.config.model_name)
            message = f"model={shown_value(name)} does not exist: expected {served}"
            raise HttpError(404, message, param="model", code="model_not_found")

    async def prepare(self, ask: Ask, tenant: Tenant, *, streaming: bool) -> Submission:
        """Check all prompts of a body; nothing is submitted yet.

        Args:
            ask: What the body asks for.
            tenant: Who asks.
            streaming: Whether it is to be read as it comes.

        Raises:
            InvalidInputError: A prompt or a parameter is not accepted.
        """
        request_id = ask.options.request_id or secrets.token_hex(12)
        options = self._options(ask.options, tenant, request_id)
        num_chars = sum(_num_chars(prompt) for prompt in ask.prompts)
        # A grammar is tried in another process, which may take seconds to start.
        if num_chars > _LONG_TEXT or ask.params.grammar is not None:
            jobs = await asyncio.to_thread(self._jobs, ask, options, streaming)
        else:
            jobs = self._jobs(ask, options, streaming)
        return Submission(request_id, int(time.time()), jobs)

    def _jobs(self, ask: Ask, options: RequestOptions, streaming: bool) -> tuple[Job, ...]:
        jobs = []
        for place, prompt in enumerate(ask.prompts):
            name = options.request_id
            if len(ask.prompts) > 1:
                name = f"{name}/{place}"
            named = dataclasses.replace(options, request_id=name)
            try:
                job = self._front_end.prepare(prompt, ask.params, named, streaming=streaming)
            except InvalidInputError as error:
                if len(ask.prompts) > 1:
                    error.add_note(f"in prompt[{place}]")
                raise
            jobs.append(job)
        return tuple(jobs)

    def _options(self, options: RequestOptions, tenant: Tenant, request_id: str) -> RequestOptions:
        longest, deadline_s = self.config.serve.max_deadline_s, options.deadline_s
        if longest is not None:
            deadline_s = longest if deadline_s is None else min(deadline_s, longest)
        # Tenants' names are apart, so that none learns of another's requests by a name in use.
        name = f"{tenant.name}/{request_id}" if tenant.name else request_id
        return dataclasses.replace(
            options,
            request_id=name,
            deadline_s=deadline_s,
            tenant=tenant.charged,
            quota=tenant.quota,
            tenant_salt=tenant.scope_salt(options.tenant_salt),
            priority=tenant.request_priority(options.priority),
        )

    async def chunks(self, submission: Submission) -> AsyncGenerator[Chunks, None]:
        """Submit the prompts of a body and yield what is new, all that is there at once.

        Closing the generator early cancels what has not ended, and frees its blocks.

        Raises:
            HttpError: This ingress has as many requests open as it may.
            PagedError: As `FrontEnd.stream`; the other prompts are cancelled then.
        """
        jobs = submission.jobs
        if self._num_live + len(jobs) > self.config.serve.max_live_requests:
            raise HttpError(
                503,
                f"overloaded: {self._num_live} requests are open here and "
                f"{self.config.serve.max_live_requests} may be",
                "overloaded_error",
                code="overloaded",
                retry_after_s=1.0,
            )
        self._num_live += len(jobs)
        streams = [self._figures.begin() for _ in jobs]
        try:
            source = self._single(*jobs) if len(jobs) == 1 else self._several(jobs)
            async with contextlib.aclosing(source) as batches:
                async for batch in batches:
                    for place, chunk in batch:
                        streams[place].take(chunk)
                    yield batch
        except Exception:  # A client that has left is no failure, and none of these.
            self._figures.end(is_whole=False)
            raise
        finally:
            self._num_live -= len(jobs)

    async def _single(self, job: Job) -> AsyncGenerator[Chunks, None]:
        # What a poll has brought for one stream is one chunk already.
        async with contextlib.aclosing(self._front_end.stream(job)) as chunks:
            async for chunk in chunks:
                yield [(0, chunk)]

    async def _several(self, jobs: Sequence[Job]) -> AsyncGenerator[Chunks, None]:
        news: asyncio.Queue[tuple[int, StreamChunk] | BaseException | None] = asyncio.Queue()

        async def read(place: int, job: Job) -> None:
            try:
                async with contextlib.aclosing(self._front_end.stream(job)) as chunks:
                    async for chunk in chunks:
                        news.put_nowait((place, chunk))
            except Exception as error:  # Raised to whoever reads the body's stream.
                news.put_nowait(error)
            else:
                news.put_nowait(None)

        tasks = [asyncio.create_task(read(place, job)) for place, job in enumerate(jobs)]
        num_open = len(jobs)
        try:
            while num_open:
                batch: Chunks = []
                items = [await news.get()]
                while not news.empty():
                    items.append(news.get_nowait())
                for item in items:
                    if item is None:
                        num_open -= 1
                    elif isinstance(item, BaseException):
                        raise item
                    else:
                        batch.append(item)
                if batch:
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def outputs(self, submission: Submission) -> list[RequestOutput]:
        """Submit the prompts of a body and wait for their outputs, one for each.

        Raises:
            HttpError: As `chunks`.
            PagedError: As `chunks`.
        """
        found: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self.chunks(submission)) as batches:
            async for batch in batches:
                found |= {place: chunk.output for place, chunk in batch if chunk.output is not None}
        return [found[place] for place in range(len(submission.jobs))]

    async def report(self) -> None:
        """Tell the deployment about once a second what the requests here are at; until cancelled.

        Where its controller is away it hears of them when it is back.
        """
        owner = secrets.token_hex(8)
        while True:
            report = self._figures.report(owner, self._front_end.running())
            with contextlib.suppress(PagedError):
                await self._deployment.report_owner(report)
            await asyncio.sleep(_REPORT_S)

    async def is_healthy(self) -> bool:
        """Whether some replica can serve.

        A controller that is being started anew cannot say, while streams and replicas go on: what
        was known a moment ago holds until it is back.
        """
        now = time.monotonic()
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                replicas = await self._deployment.replicas()
        except (TimeoutError, ControllerAwayError):
            return now - self._healthy_at < _HEALTH_KEPT_S
        except DeploymentError:
            return False
        if replicas:
            self._healthy_at = now
        return bool(replicas)

    async def close(self) -> None:
        """Cancel what is open; its streams end with an error."""
        await self._front_end.close()


def _num_chars(prompt: Prompt) -> int:
    """Return about how much there is to tokenize or to check."""
    if isinstance(prompt, Mapping):
        return sum(len(message["content"]) for message in prompt["messages"])
    return len(prompt)
