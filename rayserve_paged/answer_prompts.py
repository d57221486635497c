"""Answers prompts for the command line: results on stdout, progress and timings on stderr."""

import asyncio
import contextlib
import dataclasses
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import (
    InvalidInputError,
    PinLimitError,
    RequestFailedError,
    in_one_line,
)
from rayserve_paged.core.ids import ReplicaId
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.llm import LLM
from rayserve_paged.ordered_printer import OrderedPrinter
from rayserve_paged.outputs import RequestOutput, SampleOutput
from rayserve_paged.process_times import resident_bytes, seconds_since_start
from rayserve_paged.prompt_file import PromptEntry, RefusedEntry, located

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """What became of an entry that was submitted.

    Args:
        entry: The entry.
        output: Its output.
        pinned: Tokens of it that each replica keeps; None where it was not to be pinned.
    """

    entry: PromptEntry
    output: RequestOutput
    pinned: Mapping[ReplicaId, int] | None = None


def answer_prompts(
    config: DeploymentConfig,
    entries: Sequence[PromptEntry | RefusedEntry],
    pins: Sequence[PromptEntry] = (),
    *,
    shell: str,
    address: str | None,
    as_json: bool,
    timings: bool,
    skip_invalid: bool,
) -> None:
    """Start a deployment, answer prompts on stdout, end the deployment.

    Args:
        config: Of the deployment.
        entries: At least one. Those that are to be pinned are answered before all others.
        pins: What is to be pinned before anything is answered, and is not answered itself.
        shell: Of `LLM`.
        address: Of `LLM`.
        as_json: One JSON line for each entry, else text; where there is one sample of one prompt,
            its text is printed as it comes.
        timings: Print on stderr, as name=value lines, where the time went.
        skip_invalid: Answer the other entries where one is refused, and say why in its place.

    Raises:
        PagedError: Something asked for is not accepted, or a request failed (after the results of
            all others were printed).
    """
    times = _Times()
    times.note("imported_s")
    _check_pins([*pins, *entries], config.cache.max_pinned_share)
    with _status(f"starting {config.model.model}"):
        llm = LLM(config=config, shell=shell, address=address)
    with llm:
        times.note("ready_s")
        for pin in pins:
            _checked(llm, pin, skip_invalid=False)
        entries = [_checked(llm, entry, skip_invalid=skip_invalid) for entry in entries]
        for pin in pins:
            llm.generate(pin.prompt, pin.params, pin.options)
            _pin(llm, pin)
        times.note("submitted_s")
        only = entries[0]
        if as_json or len(entries) > 1 or isinstance(only, RefusedEntry) or not _is_plain(only):
            outputs = _answer_all(llm, entries, as_json=as_json)
        else:
            outputs = [asyncio.run(_answer_as_it_comes(llm, only))]
        times.note_first_token(outputs)
        if timings:
            times.print(llm)
    refused = [entry for entry in entries if isinstance(entry, RefusedEntry)]
    if refused:
        number = f"{len(refused)} of {len(entries)} prompts refused, the first"
        print(f"rayserve-paged: {number}: {in_one_line(refused[0].error)}", file=sys.stderr)
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise RequestFailedError(failed[0].request_id, failed[0].error or "")


def _is_plain(entry: PromptEntry) -> bool:
    return entry.params.num_siblings == 1 and not entry.pin


def _check_pins(entries: Sequence[PromptEntry | RefusedEntry], max_pinned_share: float) -> None:
    for entry in entries:
        if isinstance(entry, PromptEntry) and entry.pin and not max_pinned_share:
            accepted = "none without a share of the cache for it, such as --max-pinned-share 0.25"
            raise InvalidInputError(f"{entry.place}: pin", True, accepted)


def _checked(
    llm: LLM, entry: PromptEntry | RefusedEntry, *, skip_invalid: bool
) -> PromptEntry | RefusedEntry:
    if isinstance(entry, RefusedEntry):
        return entry
    try:
        llm.validate(entry.prompt, entry.params, entry.options)
    except InvalidInputError as error:
        error = located(entry.place, error)
        if skip_invalid:
            return RefusedEntry(entry.place, error)
        raise error from None
    return entry


def _answer_all(
    llm: LLM, entries: Sequence[PromptEntry | RefusedEntry], *, as_json: bool
) -> list[RequestOutput]:
    """Answer and pin those that are to be pinned, then answer the others; print all in order."""
    pinned: dict[int, PromptEntry] = {}
    others: dict[int, PromptEntry] = {}
    show = _show_json if as_json else _Text(entries).show
    with (
        OrderedPrinter[_Answer | RefusedEntry](show) as printer,
        _progress(len(entries)) as advance,
    ):

        def print_at(number: int, result: _Answer | RefusedEntry) -> None:
            printer.put(number, result)
            advance()

        for number, entry in enumerate(entries):
            if isinstance(entry, RefusedEntry):
                print_at(number, entry)
            else:
                (pinned if entry.pin else others)[number] = entry
        outputs = _answer_wave(llm, pinned, lambda _number, _output: None)
        for (number, entry), output in zip(pinned.items(), outputs, strict=True):
            print_at(number, _Answer(entry, output, _pin(llm, entry)))
        return outputs + _answer_wave(
            llm,
            others,
            lambda number, output: print_at(number, _Answer(others[number], output)),
        )


def _answer_wave(
    llm: LLM, entries: Mapping[int, PromptEntry], take: Callable[[int, RequestOutput], None]
) -> list[RequestOutput]:
    """Answer numbered entries together, and hand over each output as soon as it is there."""
    if not entries:
        return []
    run = secrets.token_hex(4)
    # An id for each, by which its output is known.
    names = {entry.options.request_id or f"{run}-{n}": n for n, entry in entries.items()}
    options = [
        dataclasses.replace(entry.options, request_id=name)
        for name, entry in zip(names, entries.values(), strict=True)
    ]
    return llm.generate(
        [entry.prompt for entry in entries.values()],
        [entry.params for entry in entries.values()],
        options,
        raise_on_error=False,
        on_output=lambda output: take(names[output.request_id], output),
    )


def _pin(llm: LLM, entry: PromptEntry) -> Mapping[ReplicaId, int]:
    try:
        return llm.pin_prefix(entry.prompt, options=entry.options).num_tokens
    except PinLimitError as error:
        error.add_note(f"at {entry.place}")
        raise


def _show_json(result: _Answer | RefusedEntry) -> None:
    if isinstance(result, RefusedEntry):
        fields: dict[str, Any] = {"error": in_one_line(result.error)}
    else:
        fields = json_fields(result.output)
        if result.pinned is not None:
            fields["num_pinned_tokens"] = dict(result.pinned)
    print(json.dumps(fields, allow_nan=False), flush=True)


class _Text:
    """Prints texts, under the place of their prompt where there are several."""

    def __init__(self, entries: Sequence[object]) -> None:
        self._is_one_of_several = len(entries) > 1

    def show(self, result: _Answer | RefusedEntry) -> None:
        if isinstance(result, RefusedEntry):
            print(f"--- {result.place} (refused)\n{in_one_line(result.error)}", flush=True)
            return
        n = result.entry.params.n
        for number, sample in enumerate(result.output.samples, 1):
            which = f", sample {number} of {n}" if n > 1 else ""
            if which or self._is_one_of_several:
                print(f"--- {result.entry.place}{which} ({sample.finish_reason})")
            print(sample.text)
        sys.stdout.flush()


async def _answer_as_it_comes(llm: LLM, entry: PromptEntry) -> RequestOutput:
    output = None
    stream = llm.stream(entry.prompt, entry.params, entry.options)
    async with contextlib.aclosing(stream) as chunks:
        async for chunk in chunks:
            print(chunk.text, end="", flush=True)
            output = chunk.output
    print(flush=True)
    assert output is not None, "the last chunk carries the output"
    if output.finish_reason is FinishReason.DEADLINE:
        print(f"rayserve-paged: ended by its deadline ({entry.place})", file=sys.stderr)
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
    # Results that come to the same screen meanwhile are progress enough.
    if not console.is_terminal or sys.stdout.isatty():
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
