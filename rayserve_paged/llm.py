"""LLM, the offline API: prompts in, outputs or streams out, for scripts and notebooks."""

import atexit
import concurrent.futures
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, Unpack

from rayserve_paged.core.config import (
    DeploymentConfig,
    Dtype,
    KvDtype,
    PlacementPolicy,
    QueuePolicy,
)
from rayserve_paged.core.errors import DeploymentError, InvalidInputError, RequestFailedError
from rayserve_paged.core.request import ModelLimits
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.front_end import FrontEnd
from rayserve_paged.generation import Job
from rayserve_paged.load_config import load_config, user_cache_dir
from rayserve_paged.loop_thread import LoopThread
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import deal_heads
from rayserve_paged.model.spec import check_kv_dtype
from rayserve_paged.model.tokenizer import load_tokenizer
from rayserve_paged.outputs import DeploymentAccounting, Pin, RequestOutput, StreamChunk
from rayserve_paged.prompts import Prompt, as_batch
from rayserve_paged.request_options import (
    OptionFields,
    OptionLists,
    RequestOptions,
    for_each,
    of_prompt,
    options_for_each,
    with_fields,
)
from rayserve_paged.shells import start_deployment, with_absolute_paths

if TYPE_CHECKING:
    from rayserve_cluster.ray_shell import RayShell, ShellStats
    from rayserve_paged.inprocess import InProcessShell

_ONE_TOKEN: Final = SamplingParams(max_tokens=1)


class LLM:
    """A deployment of one model, and a reader of it.

    Starts replicas in the constructor and ends them in `close`, at the latest when the interpreter
    exits; best used as a context manager.
    All methods may be called from any thread, also where an asyncio loop runs (a notebook): the
    reader has a thread of its own.

    What is not given is taken from the RAYSERVE_* environment, else from the defaults of
    `DeploymentConfig`.

    Args:
        model: A Hugging Face directory, a GGUF file, `smollm2` or `fingerprint`.
        tensor_parallel_size: Ranks of each replica; 1 by default.
        num_replicas: Replicas; 1 by default.
        block_size: Slots per block; 16 by default.
        num_blocks: Blocks of each rank's pool, or
        cache_memory: bytes of it, as a number or as text such as "512MiB".
        partial_reuse: Copy the common slots of a cached block where a prompt diverges inside it,
            and keep the last, partly filled blocks of finished requests for that.
        max_pinned_share: Share of each pool that pinned prefixes may hold, up to 0.9; 0 by
            default. Requests must fit into the rest.
        dtype: Of weights and activations: "fp32" (the default), "bf16" or "fp16".
        kv_dtype: Of the KV cache: "fp32", "bf16", "fp16", "int8" or "fp8", the last two with a
            scale for each slot and KV head; `dtype` by default.
        max_model_len: Most prompt and output tokens; the model's own limit by default.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens of one step; longer prompts are computed in chunks.
        pipeline_depth: Steps in flight: at 2 the next is planned while one runs.
        max_decode_steps: Steps that one plan may run where nothing can come in between.
        max_prefix_wait_steps: Steps that a request waits at most while a running one computes
            its next prompt block; 0 to compute it twice instead.
        policy: Which waiting request starts first: "priority" (the default), "fcfs",
            "weighted-fair", "shortest-remaining" or "longest-prefix-first".
        oldest_every: One in so many starts is that of the request which has waited longest.
        tenant_weights: Shares of tenants under "weighted-fair"; 1 for those that are not named.
        max_num_waiting: Sequences that may wait on a replica.
        max_pending_tokens: Tokens that a replica's unfinished requests may come to.
        placement: Which replica takes a request: "prefix-aware" (the default), "least-loaded" or
            "round-robin".
        name: Of the deployment, unique on its cluster.
        shell: "ray" for actors on a Ray cluster, "inprocess" for threads of this process.
        address: Ray cluster to join, "auto" for this machine's; None to start one.
        event_log_dir: Folder for the event logs of the controller and the replicas; None for none.
        config: All of the above that belongs to the deployment, instead of them.

    Raises:
        InvalidInputError: A value is not accepted, or there is no such model.
        DeploymentError: The deployment cannot be started.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tensor_parallel_size: int | None = None,
        num_replicas: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        cache_memory: int | str | None = None,
        partial_reuse: bool | None = None,
        max_pinned_share: float | None = None,
        dtype: Dtype | None = None,
        kv_dtype: KvDtype | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        pipeline_depth: int | None = None,
        max_decode_steps: int | None = None,
        max_prefix_wait_steps: int | None = None,
        policy: QueuePolicy | None = None,
        oldest_every: int | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        max_num_waiting: int | None = None,
        max_pending_tokens: int | None = None,
        placement: PlacementPolicy | None = None,
        name: str | None = None,
        shell: str = "ray",
        address: str | None = None,
        event_log_dir: str | Path | None = None,
        config: DeploymentConfig | None = None,
    ) -> None:
        flags = {
            "name": name,
            "event_log_dir": None if event_log_dir is None else str(event_log_dir),
            "model.model": model,
            "model.dtype": dtype,
            "model.kv_dtype": kv_dtype,
            "model.max_model_len": max_model_len,
            "cache.block_size": block_size,
            "cache.num_blocks": num_blocks,
            "cache.memory": cache_memory,
            "cache.partial_reuse": partial_reuse,
            "cache.max_pinned_share": max_pinned_share,
            "batch.max_num_seqs": max_num_seqs,
            "batch.max_num_batched_tokens": max_num_batched_tokens,
            "batch.pipeline_depth": pipeline_depth,
            "batch.max_decode_steps": max_decode_steps,
            "batch.max_prefix_wait_steps": max_prefix_wait_steps,
            "batch.policy": policy,
            "batch.oldest_every": oldest_every,
            "batch.tenant_weights": tenant_weights,
            "batch.max_num_waiting": max_num_waiting,
            "batch.max_pending_tokens": max_pending_tokens,
            "placement": placement,
            "parallel.tensor_parallel_size": tensor_parallel_size,
            "parallel.num_replicas": num_replicas,
        }
        given = [field for field, value in flags.items() if value is not None]
        if config is None:
            config = load_config(flags=flags)
        elif given:
            raise InvalidInputError(given[0], flags[given[0]], "nothing where `config` is given")
        self.config = config = with_absolute_paths(config)
        source = resolve_model(config.model.model, user_cache_dir())
        # Refused here, they cost no start of a cluster.
        width = config.parallel.tensor_parallel_size
        check_kv_dtype(source, config.model.kv_dtype)
        deal_heads(source.spec.num_heads, source.spec.num_kv_heads, width)
        # The tokenizer is read while the ranks start.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load_tokenizer, source)
            self._deployment: InProcessShell | RayShell = start_deployment(config, shell, address)
        try:
            self._front_end = FrontEnd(self._deployment, loading.result(), config.recovery)
        except BaseException:
            self._deployment.shutdown()
            raise
        self._thread = LoopThread(f"rayserve-paged {config.name}", self._closed_error)
        self._closed = False
        # Ranks that still compute when the interpreter ends would abort it.
        atexit.register(self.close)

    @property
    def limits(self) -> ModelLimits:
        """What a request is checked against."""
        return self._deployment.limits

    def validate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> None:
        """Raise what `generate` would raise for this prompt before it submits anything.

        Args:
            prompt: As in `generate`.
            params: As in `generate`.
            options: As in `generate`.
            fields: As in `stream`.
        """
        self._front_end.prepare(prompt, params, with_fields(options, fields))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        raise_on_error: bool = True,
        on_output: Callable[[RequestOutput], None] | None = None,
        **lists: Unpack[OptionLists],
    ) -> list[RequestOutput]:
        """Answer prompts; returns when every request has ended.

        Everything is checked before anything is submitted: a refused prompt disturbs no other.
        Where the deployment is overloaded they wait their turn here.

        Args:
            prompts: One prompt or several. A prompt is a text, a list of token ids, a chat as
                {"messages": [{"role": TEXT, "content": TEXT}, ...]}, or, for a model that takes
                them, {"prompt_token_ids": [...], "attachments": [Attachment, ...]}.
            params: How tokens are chosen: for all, or one for each; `SamplingParams()` by default.
            options: How requests are served: for all, or one for each; `RequestOptions()` by
                default.
            raise_on_error: Raise when a request failed. Where False, its output has `error` set.
            on_output: Called in the caller's thread with each output as soon as it is there; what
                it raises ends the call, and the other requests.
            lists: Single fields of the options, each one value for all prompts or a list with one
                for each: `request_ids`, `priorities`, `tenants`, `scopes` (a `RequestScope` for
                salt and adapter), `windows`, `num_sink_tokens`, `retention` (a tuple for all, a
                list of tuples for each) and `deadline_s`.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidInputError: A prompt or a parameter is not accepted; a note names the prompt.
            DuplicateRequestError: A live request has one of the ids.
            RequestFailedError: A request failed (the first one, after all have ended).
        """
        self._check_open()
        jobs = self._jobs(prompts, params, options, lists)
        if on_output is None:
            outputs = self._thread.call(self._front_end.complete(jobs))
        else:
            outputs = self._thread.call_reporting(
                functools.partial(self._front_end.complete, jobs), on_output
            )
        failed = [output for output in outputs if output.error is not None]
        if failed and raise_on_error:
            reason = failed[0].error or ""
            if len(outputs) > 1:
                reason += f" ({len(failed)} of {len(outputs)} requests failed)"
            raise RequestFailedError(failed[0].request_id, reason)
        return outputs

    def _jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions | Sequence[RequestOptions] | None,
        lists: OptionLists,
    ) -> list[Job]:
        batch = as_batch(prompts)
        params = SamplingParams() if params is None else params
        all_params = for_each("params", params, SamplingParams, len(batch))
        all_options = options_for_each(len(batch), options, lists)
        jobs = []
        for index, each in enumerate(zip(batch, all_params, all_options, strict=True)):
            with of_prompt(index, len(batch)):
                jobs.append(self._front_end.prepare(*each))
        return jobs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> AsyncGenerator[StreamChunk, None]:
        """Answer one prompt as it goes, on whatever asyncio loop runs the iteration.

        Closing the iterator early (`contextlib.aclosing`) cancels the request and frees its
        blocks. The last chunk has the whole output. The chunks of parallel samples come in whatever
        order they arise.

        Args:
            prompt: As in `generate`.
            params: As in `generate`; `best_of` may not be more than `n`.
            options: As in `generate`; a deadline counts from the first iteration.
            fields: Single fields of the options by their names, or `scope` (a `RequestScope`) for
                salt and adapter.

        Raises:
            InvalidInputError: At once.
            OverloadedError: On iteration: as much waits in the deployment as may wait.
            QuotaExceededError: On iteration: the tenant uses as much as its quota allows.
            DuplicateRequestError: On iteration: a live request has this id.
            RequestFailedError: On iteration: it failed; a stream that just ends is whole.
        """
        self._check_open()
        job = self._front_end.prepare(prompt, params, with_fields(options, fields), streaming=True)
        return self._thread.iterate(self._front_end.stream(job))

    def cancel(self, request_id: str, sibling: int | None = None) -> bool:
        """End a live request, or one of its parallel samples: the output says CANCELLED, and has
        the tokens until then.

        Args:
            request_id: The request.
            sibling: Which of the samples drawn, from 0; None for all.

        Returns:
            Whether a request of this id was live.

        Raises:
            InvalidInputError: It has no such sample.
        """
        self._check_open()
        return self._thread.call(self._front_end.cancel(request_id, sibling))

    def accounting(self) -> DeploymentAccounting:
        """Return the ledgers of all replicas in figures, each at the end of a step."""
        self._check_open()
        return self._thread.call(self._front_end.accounting())

    def reset_prefix_cache(self) -> None:
        """Forget the prefix caches of all replicas; returns when each has done it.

        No later request finds what was computed before. Requests that run meanwhile go on
        unharmed, and what they compute on the blocks that they have is not cached.
        """
        self._check_open()
        self._thread.call(self._front_end.reset_cache())

    def pin_prefix(
        self,
        prompt: Prompt,
        pin_id: str | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Pin:
        """Keep the blocks of a prompt that are cached now until they are unpinned.

        Each replica keeps the full blocks that it has; generate with the prompt first. Needs a
        `max_pinned_share` above 0. A reset of the cache ends all pins.

        Args:
            prompt: As in `generate`.
            pin_id: Names the pin; one that is held already stays as it is. None to draw a name.
            options: As in `generate`: salt, adapter and window of the prompts that begin with it.
            fields: As in `stream`.

        Returns:
            The tokens kept on each replica: whole blocks, so that they are 0 where the prompt is
            shorter than a block or none of it is cached, and then there is no pin to let go of.

        Raises:
            InvalidInputError: At the prompt, the options or the name.
            PinLimitError: On some replica pins would hold more than they may; it is pinned on none.
        """
        self._check_open()
        job = self._front_end.prepare(prompt, _ONE_TOKEN, with_fields(options, fields))
        return self._thread.call(self._front_end.pin_prefix(job, pin_id))

    def unpin(self, pin_id: str) -> None:
        """Let go of a pin; an unknown name is ignored."""
        self._check_open()
        self._thread.call(self._front_end.unpin(pin_id))

    def stats(self) -> "ShellStats | None":
        """Return where the time of starting went and what each rank's process takes; None where
        the ranks are in this process.
        """
        self._check_open()
        stats = getattr(self._deployment, "stats", None)
        return None if stats is None else self._thread.call(stats())

    def close(self) -> None:
        """Cancel what runs and end the deployment. Idempotent; blocks."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._thread.call(self._front_end.close())
        finally:
            try:
                self._thread.stop()
            finally:
                self._deployment.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> DeploymentError:
        return DeploymentError(self.config.name, "this LLM is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
