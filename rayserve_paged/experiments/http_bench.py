"""What HTTP costs a token: streams through an endpoint on Ray beside `LLM.stream`, in turns.

Both read the same deployment, at the same concurrency, with the same prompts; clients have a
process of their own. Two things are measured, since one machine may have cores to spare or not:

    overhead    wall time of a round over HTTP less that of the direct round beside it, over its
                tokens: with one stream what is added to each token's step, with many what HTTP
                takes from the throughput where clients, proxy and ingress share cores with ranks
    delay       of one stream alone: from the end of a token's step at the replica until the token
                is read, over HTTP and directly
"""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

from rayserve_paged.core.event_log import LoggedEvent
from rayserve_paged.core.replica_messages import StepFinished
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.event_files import read_log
from rayserve_paged.experiments.http_client import Answer, complete
from rayserve_paged.llm import LLM
from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.endpoint import ray_endpoint
from rayserve_paged.serve.serve_config import EndpointConfig

_MODEL: Final = "fingerprint"
_PROMPT_LEN: Final = 16
_LETTERS: Final = tuple(range(ord("a"), ord("z") + 1))
"""Tokens of one character each, by which a client can count them."""

_PARTS: Final = {"proxy": "ProxyActor", "ingress": "ServeReplica", "ranks": "ray::Worker"}


@dataclasses.dataclass(frozen=True, slots=True)
class HttpOverhead:
    """Figures at one concurrency, in microseconds per token.

    Args:
        num_streams: Streams at once.
        direct_us: Wall time of each direct round over its tokens.
        http_us: The same over HTTP, each round beside the direct one of the same place.
        cpu_us: Processor time of each part over all rounds over HTTP: "client", "proxy", "ingress"
            and "ranks"; and of direct rounds: "direct reader", "direct ranks".
    """

    num_streams: int
    direct_us: tuple[float, ...]
    http_us: tuple[float, ...]
    cpu_us: Mapping[str, float]

    @property
    def overheads_us(self) -> list[float]:
        """Of each pair of rounds."""
        return [http - direct for direct, http in zip(self.direct_us, self.http_us, strict=True)]

    @property
    def median_us(self) -> float:
        """Of the overheads."""
        return statistics.median(self.overheads_us)

    @property
    def p99_us(self) -> float:
        """Of the overheads."""
        return percentile(self.overheads_us, 0.99)


@dataclasses.dataclass(frozen=True, slots=True)
class HttpDelay:
    """From the end of its step until a token of one stream alone is read, in microseconds.

    Args:
        direct_us: Of each token by `LLM.stream`, in order of size.
        http_us: Of each over HTTP, likewise.
    """

    direct_us: tuple[float, ...]
    http_us: tuple[float, ...]

    @property
    def added_median_us(self) -> float:
        """What HTTP adds to the median."""
        return percentile(self.http_us, 0.5) - percentile(self.direct_us, 0.5)

    @property
    def added_p99_us(self) -> float:
        """What HTTP adds to the 99th percentile."""
        return percentile(self.http_us, 0.99) - percentile(self.direct_us, 0.99)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that so much of the others are not above."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def http_overheads(
    concurrencies: Sequence[int], num_tokens: int, num_rounds: int
) -> Iterator[HttpOverhead]:
    """Measure on a local Ray cluster; yields the figures of one concurrency after the other.

    Args:
        concurrencies: Streams at once.
        num_tokens: Output tokens of each stream.
        num_rounds: Pairs of rounds at each concurrency, after one that is not counted.

    Raises:
        DeploymentError: The endpoint cannot be started.
    """
    with _served(max(concurrencies), {}) as (llm, client):
        for num_streams in concurrencies:
            direct, http = [], []
            cpu: dict[str, float] = {}
            # No prompt is met again, so that no round finds more cached than the other.
            prompts = iter(_prompts(2 * num_streams * (num_rounds + 1)))
            for number in range(num_rounds + 1):
                batch = [next(prompts) for _ in range(num_streams)]
                marks = [_cpu_s(client.pid)]
                direct_s = asyncio.run(_read(llm, batch, num_tokens))
                marks.append(_cpu_s(client.pid))
                bodies = [_body(next(prompts), num_tokens) for _ in range(num_streams)]
                http_s = client.round_s(bodies)
                marks.append(_cpu_s(client.pid))
                if number:
                    per_token = 1e6 / (num_streams * num_tokens)
                    direct.append(direct_s * per_token)
                    http.append(http_s * per_token)
                    for name, seconds in _spent(*marks).items():
                        cpu[name] = cpu.get(name, 0.0) + seconds * per_token / num_rounds
            yield HttpOverhead(num_streams, tuple(direct), tuple(http), cpu)


def http_delay(num_tokens: int, num_rounds: int) -> HttpDelay:
    """Measure on a local Ray cluster, with each token written as soon as it is there.

    Args:
        num_tokens: Output tokens of a stream.
        num_rounds: Streams over HTTP, and as many direct ones, in turns.

    Raises:
        DeploymentError: The endpoint cannot be started.
    """
    reads: list[list[tuple[float, int]]] = []
    with tempfile.TemporaryDirectory(prefix="rayserve-paged-") as folder:
        settings = {"event_log_dir": folder, "serve.min_write_gap_s": 0.0}
        with _served(1, settings) as (llm, client):
            for number, prompt in enumerate(_prompts(2 * num_rounds)):
                if number % 2:
                    reads.append(client.reads(_body(prompt, num_tokens)))
                else:
                    reads.append(asyncio.run(_direct_reads(llm, prompt, num_tokens)))
        steps = [
            entry.now
            for entry in read_log(Path(folder) / "r0.0.jsonl")
            if isinstance(entry, LoggedEvent) and isinstance(entry.event, StepFinished)
        ]
    delays = [_delays_us(read, steps, num_tokens) for read in reads]
    direct, http = ([us for each in delays[first::2] for us in each] for first in (0, 1))
    return HttpDelay(tuple(sorted(direct)), tuple(sorted(http)))


def _delays_us(
    reads: Sequence[tuple[float, int]], steps: Sequence[float], num_tokens: int
) -> list[float]:
    """Return how long after its step each token of a stream that was alone was read.

    Args:
        reads: When, and how many tokens at once.
        steps: When each step of the replica ended.
        num_tokens: Of the stream; the steps up to the last read have one each, and a step more
            may have run that nobody wanted.
    """
    before = [at for at in steps if at <= reads[-1][0]]
    own = iter(before[-num_tokens:])
    return [1e6 * (at - next(own)) for at, number in reads for _ in range(number)]


@contextlib.contextmanager
def _served(num_streams: int, settings: Mapping[str, object]) -> Iterator[tuple[LLM, "_Client"]]:
    flags = {
        "name": f"bench-{secrets.token_hex(3)}",
        "model.model": _MODEL,
        "cache.num_blocks": 8192,
        "batch.max_num_seqs": num_streams,
        **settings,
    }
    config = load_config_as(EndpointConfig, flags=flags, environ={})
    with ray_endpoint(config, "127.0.0.1", 0, None) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        with (
            LLM(config=config.deployment(), address="auto") as llm,
            contextlib.closing(_Client(host, int(port))) as client,
        ):
            yield llm, client


def _prompts(number: int) -> Iterator[list[int]]:
    for index in range(number):
        yield [(place * 31 + index * 7 + index // 100) % 1000 for place in range(_PROMPT_LEN)]


def _body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {
        "model": _MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "allowed_token_ids": list(_LETTERS),
        "stream": True,
    }


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, allowed_token_ids=_LETTERS)


async def _read(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    async def read(prompt: list[int]) -> None:
        async with contextlib.aclosing(llm.stream(prompt, _params(num_tokens))) as chunks:
            async for _chunk in chunks:
                pass

    begin = time.monotonic()
    await asyncio.gather(*map(read, prompts))
    return time.monotonic() - begin


async def _direct_reads(llm: LLM, prompt: list[int], num_tokens: int) -> list[tuple[float, int]]:
    async with contextlib.aclosing(llm.stream(prompt, _params(num_tokens))) as chunks:
        return [(time.monotonic(), len(chunk.token_ids)) async for chunk in chunks]


class _Client:
    """A process that reads streams over HTTP, so that it shares no interpreter with the others.

    Args:
        host: Of the endpoint.
        port: Of the endpoint.
    """

    def __init__(self, host: str, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_client, args=(theirs, host, port))
        self._process.daemon = True
        self._process.start()
        theirs.close()
        assert self._process.pid is not None, "it was started"
        self.pid: int = self._process.pid

    def _answers(self, bodies: Sequence[Mapping[str, Any]]) -> tuple[float, list[Answer]]:
        self._pipe.send(bodies)
        seconds, answers = self._pipe.recv()
        broken = [answer.error for answer in answers if not answer.is_whole]
        assert not broken, f"{len(broken)} streams broke: {broken[0]}"
        return seconds, answers

    def round_s(self, bodies: Sequence[Mapping[str, Any]]) -> float:
        """Read streams at once; return the seconds that it took."""
        return self._answers(bodies)[0]

    def reads(self, body: Mapping[str, Any]) -> list[tuple[float, int]]:
        """Read one stream; return when how many characters came."""
        (answer,) = self._answers([body])[1]
        return list(zip(answer.times_s, answer.num_chars, strict=True))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve_client(pipe: Connection, host: str, port: int) -> None:
    async def read(bodies: Sequence[Mapping[str, Any]]) -> tuple[float, list[Answer]]:
        begin = time.monotonic()
        answers = await asyncio.gather(*(complete(host, port, body) for body in bodies))
        return time.monotonic() - begin, answers

    with contextlib.suppress(EOFError):
        while True:
            pipe.send(asyncio.run(read(pipe.recv())))


def _cpu_s(client: int) -> dict[str, float]:
    """Return the processor time of each part so far, in seconds."""
    found = {"reader": time.process_time(), "client": _spent_s(psutil.Process(client))}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline()) or process.name()
            for part, name in _PARTS.items():
                if name in title:
                    found[part] = found.get(part, 0.0) + _spent_s(process)
    return found


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _spent(
    before: Mapping[str, float], between: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of a direct round and of one over HTTP, by part."""
    spent = {f"direct {part}": between[part] - before[part] for part in ("reader", "ranks")}
    return spent | {part: after[part] - between[part] for part in ("client", *_PARTS)}
