"""What HTTP costs a token: streams through an endpoint on Ray beside `LLM.stream`, in turns.

Both read the same deployment, at the same concurrency, with the same prompts. The overhead is the
wall time of a round over HTTP less that of the direct round beside it, over its tokens: with one
stream what is added to the way of a token, with many what HTTP takes from the throughput.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Final

from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.experiments.http_client import complete
from rayserve_paged.llm import LLM
from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.endpoint import ray_endpoint
from rayserve_paged.serve.serve_config import EndpointConfig

_MODEL: Final = "fingerprint"
_PROMPT_LEN: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class HttpOverhead:
    """Figures at one concurrency, in microseconds per token.

    Args:
        num_streams: Streams at once.
        direct_us: Wall time of each direct round over its tokens.
        http_us: The same over HTTP, each round beside the direct one of the same place.
    """

    num_streams: int
    direct_us: tuple[float, ...]
    http_us: tuple[float, ...]

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
        ordered = sorted(self.overheads_us)
        return ordered[round(0.99 * (len(ordered) - 1))]


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
    flags = {
        "name": f"bench-{secrets.token_hex(3)}",
        "model.model": _MODEL,
        "cache.num_blocks": 8192,
        "batch.max_num_seqs": max(concurrencies),
    }
    config = load_config_as(EndpointConfig, flags=flags, environ={})
    with ray_endpoint(config, "127.0.0.1", 0, None) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        with LLM(config=config.deployment(), address="auto") as llm:
            for num_streams in concurrencies:
                direct, http = [], []
                for number in range(num_rounds + 1):
                    # No prompt is met again, so that no round finds more cached than the other.
                    first = 2 * number * num_streams
                    prompts = _prompts(first, 2 * num_streams)
                    direct_s = asyncio.run(_direct(llm, prompts[:num_streams], num_tokens))
                    http_s = asyncio.run(
                        _http((host, int(port)), prompts[num_streams:], num_tokens)
                    )
                    if number:
                        per_token = 1e6 / (num_streams * num_tokens)
                        direct.append(direct_s * per_token)
                        http.append(http_s * per_token)
                yield HttpOverhead(num_streams, tuple(direct), tuple(http))


def _prompts(first: int, number: int) -> list[list[int]]:
    return [
        [(place * 31 + index * 7 + index // 100) % 1000 for place in range(_PROMPT_LEN)]
        for index in range(first, first + number)
    ]


async def _direct(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)

    async def read(prompt: list[int]) -> None:
        async with contextlib.aclosing(llm.stream(prompt, params)) as chunks:
            async for _chunk in chunks:
                pass

    begin = time.monotonic()
    await asyncio.gather(*map(read, prompts))
    return time.monotonic() - begin


async def _http(address: tuple[str, int], prompts: Sequence[list[int]], num_tokens: int) -> float:
    bodies = [
        {
            "model": _MODEL,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
        }
        for prompt in prompts
    ]
    begin = time.monotonic()
    answers = await asyncio.gather(*(complete(*address, body) for body in bodies))
    seconds = time.monotonic() - begin
    broken = [answer.error for answer in answers if not answer.is_whole]
    assert not broken, f"{len(broken)} streams broke: {broken[0]}"
    return seconds
