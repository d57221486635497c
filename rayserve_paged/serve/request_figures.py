"""Counts what one ingress's requests come to, and takes their times."""

import time
from collections import deque
from typing import Final

from rayserve_paged.core.owner_report import OwnerReport
from rayserve_paged.core.running_request import RunningRequest
from rayserve_paged.outputs import StreamChunk

_NUM_KEPT: Final = 512
"""Latest times of each kind, of which percentiles are shown."""


class RequestFigures:
    """The figures of one ingress since it began; belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._num_output_tokens = 0
        self._num_finished = 0
        self._num_failed = 0
        self._ttft_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._itl_s: deque[float] = deque(maxlen=_NUM_KEPT)

    def begin(self) -> "StreamFigures":
        """Begin to time the stream of one prompt."""
        return StreamFigures(self)

    def add(self, num_tokens: int, waited_s: float, *, is_first: bool) -> None:
        """Count tokens that came together, after so long a wait."""
        self._num_output_tokens += num_tokens
        if is_first:
            self._ttft_s.append(waited_s)
        else:
            self._itl_s.append(waited_s / num_tokens)

    def end(self, *, is_whole: bool) -> None:
        """Count a request that has ended."""
        if is_whole:
            self._num_finished += 1
        else:
            self._num_failed += 1

    def report(self, owner: str, running: tuple[RunningRequest, ...]) -> OwnerReport:
        """Return what there is to tell now."""
        return OwnerReport(
            owner=owner,
            running=running,
            num_output_tokens=self._num_output_tokens,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            ttft_s=tuple(self._ttft_s),
            itl_s=tuple(self._itl_s),
        )


class StreamFigures:
    """Times one stream, whose samples are timed each for itself."""

    def __init__(self, figures: RequestFigures) -> None:
        self._figures = figures
        self._began_s = time.monotonic()
        self._last_s: dict[int, float] = {}

    def take(self, chunk: StreamChunk) -> None:
        """Note a chunk that has come."""
        if chunk.output is not None:
            self._figures.end(is_whole=True)
        if not chunk.token_ids:
            return
        now = time.monotonic()
        before = self._last_s.get(chunk.sibling)
        waited_s = now - (self._began_s if before is None else before)
        self._figures.add(len(chunk.token_ids), waited_s, is_first=before is None)
        self._last_s[chunk.sibling] = now
