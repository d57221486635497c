"""What a simulation was like: each request's times, each replica's load, throughput."""

import dataclasses
from array import array
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from rayserve_paged.core.batcher import Batcher
from rayserve_paged.core.request import FinishReason
from rayserve_paged.sim.histogram import LogHistogram

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FINISHES: Final = tuple(FinishReason)
"""What the numbers in `RequestColumns.finish` stand for."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """The requests that ended, one row each, in order of their ends.

    All times are in seconds of the simulation, as the consumer sees them.

    Args:
        number: int64, of arrival, from 0.
        arrival_s: float64, when the consumer submitted it.
        first_token_s: float64, when its first token came; NaN where none did.
        end_s: float64, when its last token or its refusal came.
        num_prompt_tokens: int64.
        num_output_tokens: int64, received.
        num_cached_tokens: int64, prompt tokens taken from the prefix cache, before its first token.
        is_placed: bool, whether some replica took it.
        replica: int64, index of that replica; 0 where none did.
        finish: int64, index into `FINISHES`.
        num_attempts: int64, replicas that took it, one after the other as each was lost.
    """

    number: LongArray
    arrival_s: FloatArray
    first_token_s: FloatArray
    end_s: FloatArray
    num_prompt_tokens: LongArray
    num_output_tokens: LongArray
    num_cached_tokens: LongArray
    is_placed: BoolArray
    replica: LongArray
    finish: LongArray
    num_attempts: LongArray

    @property
    def ttft_s(self) -> FloatArray:
        """Time to the first token; NaN where none came."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> FloatArray:
        """Time from arrival to end."""
        return self.end_s - self.arrival_s

    @property
    def itl_s(self) -> FloatArray:
        """Mean time from a token to the next; NaN where there are not two."""
        num_gaps = self.num_output_tokens - 1
        mean = (self.end_s - self.first_token_s) / np.maximum(num_gaps, 1)
        return np.where(num_gaps > 0, mean, np.nan)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoadColumns:
    """The state of replicas at the ticks of a clock: a row at each tick before which something
    happened to its replica, and which holds until the next one. Counts of what has happened are
    since the replica's start.

    Args:
        time_s: float64, ascending.
        replica: int64, index of the replica.
        num_running: int64, sequences with a row.
        num_waiting: int64, sequences without one.
        num_free_blocks: int64, FREE blocks.
        num_cached_blocks: int64, CACHED blocks.
        num_held_blocks: int64, the others; of a replica that is down there are none of any kind.
        num_open_slots: int64, slots that sequences hold and that no token is in.
        num_preemptions: int64, so far.
        num_queried_tokens: int64, prompt tokens looked up in the prefix cache so far.
        num_hit_tokens: int64, those that were found.
        num_steps: int64, steps so far.
    """

    time_s: FloatArray
    replica: LongArray
    num_running: LongArray
    num_waiting: LongArray
    num_free_blocks: LongArray
    num_cached_blocks: LongArray
    num_held_blocks: LongArray
    num_open_slots: LongArray
    num_preemptions: LongArray
    num_queried_tokens: LongArray
    num_hit_tokens: LongArray
    num_steps: LongArray


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """What a replica did so far, over all its lives; see `ReplicaColumns`."""

    num_plans: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReplicaColumns:
    """What each replica did over the simulation.

    Args:
        num_plans: int64, plans that ended.
        num_steps: int64, steps of these.
        busy_s: float64, time with a plan in flight.
        num_queried_tokens: int64, prompt tokens looked up in the prefix cache.
        num_hit_tokens: int64, those that were found.
        num_preemptions: int64.
        num_computed_tokens: int64, tokens whose KV was computed, in steps that ended.
    """

    num_plans: LongArray
    num_steps: LongArray
    busy_s: FloatArray
    num_queried_tokens: LongArray
    num_hit_tokens: LongArray
    num_preemptions: LongArray
    num_computed_tokens: LongArray


@dataclasses.dataclass(slots=True)
class Death:
    """Processes that were killed, or hung.

    Args:
        time_s: When.
        name: Of the replica, or "controller".
        hangs: Whether they hung.
        back_s: When others had taken their place; None where they had not by the end.
    """

    time_s: float
    name: str
    hangs: bool
    back_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SimReport:
    """A simulation that has ended.

    Args:
        requests: One row for each request.
        errors: Why a request failed or was refused, by its number.
        loads: Of the replicas over time.
        replicas: One row for each replica.
        token_gaps_s: Time from each token to the next of its stream, as the replicas sample them;
            where a stream went on at another one, the pause is one of them.
        deaths: In their order.
        end_s: When the last request ended.
        num_events: Events of the engine.
        num_network_bytes: Carried between nodes or within one.
    """

    requests: RequestColumns
    errors: Mapping[int, str]
    loads: LoadColumns
    replicas: ReplicaColumns
    token_gaps_s: LogHistogram
    deaths: tuple[Death, ...]
    end_s: float
    num_events: int
    num_network_bytes: int

    @property
    def num_output_tokens(self) -> int:
        """Tokens that consumers received."""
        return int(self.requests.num_output_tokens.sum())

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix caches held."""
        queried = int(self.replicas.num_queried_tokens.sum())
        return int(self.replicas.num_hit_tokens.sum()) / queried if queried else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the time from the first arrival to the last end."""
        if not len(self.requests.arrival_s):
            return 0.0
        span_s = self.end_s - float(self.requests.arrival_s.min())
        return self.num_output_tokens / span_s if span_s else 0.0


class LoadLog:
    """Takes the state of replicas down."""

    def __init__(self) -> None:
        self._times = array("d")
        self._rows = array("q")

    def add(self, now: float, replica: int, batcher: Batcher | None, totals: Totals) -> None:
        """Add a row.

        Args:
            now: The time, in seconds.
            replica: Index of the replica.
            batcher: Its batcher; None while it is down.
            totals: What its lives did so far.
        """
        state = (0, 0, 0, 0, 0, 0)
        if batcher is not None:
            pool = batcher.kv.pool
            state = (
                batcher.num_running,
                batcher.num_waiting,
                pool.num_free,
                pool.num_cached,
                pool.num_held,
                batcher.num_open_slots,
            )
        self._times.append(now)
        self._rows.extend(
            (
                replica,
                *state,
                totals.num_preemptions,
                totals.num_queried_tokens,
                totals.num_hit_tokens,
                totals.num_steps,
            )
        )

    def columns(self) -> LoadColumns:
        """Return all rows."""
        rows = np.array(self._rows, np.int64).reshape(-1, len(dataclasses.fields(LoadColumns)) - 1)
        return LoadColumns(np.array(self._times), *rows.T)


class RequestLog:
    """Takes down each request once, when it ends."""

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}
        self.num_ended = 0
        self.last_end_s = 0.0
        self._times = array("d")
        self._counts = array("q")

    def add(self, request: "OpenRequest", end_s: float, finish: FinishReason) -> None:
        """Add a request that has ended."""
        first = request.first_token_s
        self._times.extend((request.arrival_s, np.nan if first is None else first, end_s))
        self._counts.extend(
            (
                request.number,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.num_cached_tokens,
                request.replica is not None,
                request.replica or 0,
                FINISHES.index(finish),
                request.num_attempts,
            )
        )
        self.num_ended += 1
        self.last_end_s = end_s

    def columns(self) -> RequestColumns:
        """Return all rows."""
        arrival, first, end = np.array(self._times).reshape(-1, 3).T
        counts = np.array(self._counts, np.int64).reshape(-1, 8)
        number, prompt, output, cached, is_placed, replica, finish, attempts = counts.T
        lengths = prompt, output, cached
        return RequestColumns(
            number, arrival, first, end, *lengths, is_placed > 0, replica, finish, attempts
        )


@dataclasses.dataclass(slots=True)
class OpenRequest:
    """What is known of a request that has not ended.

    Args:
        number: Of arrival, from 0.
        arrival_s: When it was submitted.
        num_prompt_tokens: Of its prompt.
        first_token_s: When its first token came; None as long as none has.
        num_output_tokens: Received so far.
        num_cached_tokens: Prompt tokens from the prefix cache.
        replica: Index of the replica that serves it; None where none does.
        num_samples: Streams that have not ended.
        num_attempts: Replicas that took it so far.
    """

    number: int
    arrival_s: float
    num_prompt_tokens: int
    first_token_s: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    replica: int | None = None
    num_samples: int = 1
    num_attempts: int = 0
