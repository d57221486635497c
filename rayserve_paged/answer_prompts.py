"""Answers prompts for the command line: results on stdout, progress and timings on stderr."""

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import InvalidInputError, RequestFailedError
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.llm import LLM
from rayserve_paged.outputs import RequestOutput, SampleOutput
from rayserve_paged.process_times import resident_bytes, seconds_since_start
from rayserve_paged.prompt_file import PromptEntry, located

_MIB = 1 << 20


def answer_prompts(
    config: DeploymentConfig,
    entries: Sequence[PromptEntry],
    *,
    shell: str,
    address: str | None,
    as_json: bool,
    timings: bool,
) -> None:
    """Start a deployment, answer prompts on stdout, end the deployment.

    Args:
        config: Of the deployment.
        entries: At least one.
        shell: Of `LLM`.
        address: Of `LLM`.
        as_json: One JSON line for each prompt, else text; where there is one sample of one prompt,
            its text is printed as it comes.
        timings: Print on stderr, as name=value lines, where the time went.

    Raises:
        PagedError: Something asked for is not accepted, or a request failed (after the results of
            all others were printed).
    """
    times = _Times()
    times.note("imported_s")
    with _status(f"starting {config.model.model}"):
        llm = LLM(config=config, shell=shell, address=address)
    with llm:
        times.note("ready_s")
        for entry in entries:
            try:
                llm.validate(entry.prompt, entry.params)
            except InvalidInputError as error:
                raise located(entry.place, error) from error
        if as_json or len(entries) > 1 or entries[0].params.num_siblings > 1:
            outputs = _answer_all(llm, entries, as_json=as_json, times=times)
        else:
            outputs = [asyncio.run(_answer_as_it_comes(llm, entries[0], times))]
        if timings:
            times.print(llm)
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise RequestFailedError(failed[0].request_id, failed[0].error or "")


def _answer_all(
    llm: LLM, entries: Sequence[PromptEntry], *, as_json: bool, times: "_Times"
) -> list[RequestOutput]:
    with _progress(len(entries)) as advance:
        times.note("submitted_s")
        outputs = llm.generate(
            [entry.prompt for entry in entries],
            [entry.params for entry in entries],
            raise_on_error=False,
            on_output=lambda _: advance(),
        )
    times.note_first_token(outputs)
    for entry, output in zip(entries, outputs, strict=True):
        if as_json:
            print(json.dumps(json_fields(output), allow_nan=False))
            continue
        for number, sample in enumerate(output.samples, 1):
            which = f", sample {number} of {entry.params.n}" if entry.params.n > 1 else ""
            if which or len(entries) > 1:
                print(f"--- {entry.place}{which} ({sample.finish_reason})")
            print(sample.text)
    sys.stdout.flush()
    return outputs


async def _answer_as_it_comes(llm: LLM, entry: PromptEntry, times: "_Times") -> RequestOutput:
    times.note("submitted_s")
    output = None
    async with contextlib.aclosing(llm.stream(entry.prompt, entry.params)) as chunks:
        async for chunk in chunks:
            print(chunk.text, end="", flush=True)
            output = chunk.output
    print(flush=True)
    assert output is not None, "the last chunk carries the output"
    times.note_first_token([output])
    return output


def json_fields(output: RequestOutput) -> dict[str, Any]:
    """Return what the command prints of one request.

    `logprobs`, `cumulative_logprob`, `prompt_logprobs` and `error` are there where there are any.
    Where more than one sample was asked for, `samples` lists them all in their order, and what is
    outside is of the first.
    """
    fields: dict[str, Any] = {
        "request_id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "replica": output.replica,
        "ttft_s": output.ttft_s,
        "tpot_s": output.tpot_s,
        **_optional_fields(output.samples[0]),
    }
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [
            None if position is None else _logprobs_fields(position)
            for position in output.prompt_logprobs
        ]
    if output.error is not None:
        fields["error"] = output.error
    if len(output.samples) > 1:
        fields["samples"] = [_sample_fields(sample) for sample in output.samples]
    return fields


def _sample_fields(sample: SampleOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "sibling": sample.sibling,
        "token_ids": sample.token_ids,
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        "tpot_s": sample.tpot_s,
        **_optional_fields(sample),
    }
    if sample.error is not None:
        fields["error"] = sample.error
    return fields


def _optional_fields(sample: SampleOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if sample.logprobs is not None:
        fields["logprobs"] = [_logprobs_fields(position) for position in sample.logprobs]
    if sample.cumulative_logprob is not None:
        fields["cumulative_logprob"] = _finite(sample.cumulative_logprob)
    return fields


def _logprobs_fields(position: TokenLogprobs) -> dict[str, Any]:
    top = [[token_id, _finite(logprob)] for token_id, logprob in position.top]
    return {"logprob": _finite(position.logprob), "top": top}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity.


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[], None]]:
    """Show a bar where stderr is a terminal; yields what advances it, from any thread."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=num_requests)
        yield lambda: bar.advance(task)


class _Times:
    """Seconds from the start of the process to each of its stages."""

    def __init__(self) -> None:
        self._process_age_s = seconds_since_start()
        self._begin = time.monotonic()
        self._stages: dict[str, float] = {}

    def note(self, stage: str) -> None:
        self._stages[stage] = self._process_age_s + time.monotonic() - self._begin

    def note_first_token(self, outputs: Sequence[RequestOutput]) -> None:
        waits = [output.ttft_s for output in outputs if output.ttft_s is not None]
        if waits:
            self._stages["first_token_s"] = self._stages["submitted_s"] + min(waits)
        self.note("answered_s")

    def print(self, llm: LLM) -> None:
        lines = [f"{stage}={seconds:.2f}" for stage, seconds in self._stages.items()]
        lines.append(f"process_rss_mb={resident_bytes() / _MIB:.0f}")
        stats = llm.stats()
        if stats is not None:
            lines += [f"deployment.{part}={value:.2f}" for part, value in stats.timings.items()]
            for rank in stats.ranks:
                label = f"{rank.replica_id}.rank{rank.rank}"
                lines += [f"{label}.{part}={value:.2f}" for part, value in rank.timings.items()]
                lines.append(f"{label}.rss_mb={rank.rss_bytes / _MIB:.0f}")
        print("\n".join(lines), file=sys.stderr)
