"""Made-up workloads: sessions of one or several turns, by distributions of times and lengths.

Each turn's prompt is the session's history so far and what the user adds:

    system prompt | user | answer | user | answer | user
    shared          `---------- earlier turns -----'   new

Arrivals, lengths and sessions are drawn from generators of their own, so that another distribution
of one leaves the others as they are.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayserve_paged.core.sampling_params import MAX_SEED
from rayserve_paged.sim.requests import SimRequest
from rayserve_paged.sim.token_streams import Segment, answer_stream, stream_number

_SYSTEM = 0x73797374656D  # Keep the streams of system prompts, users and seeds apart.
_USER = 0x75736572
_SEED = 0x74757273

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Lengths(_Section):
    """Token counts: log-normal, rounded, within bounds."""

    median: _Positive
    sigma: _NotNegative = 0.0
    """Standard deviation of the logarithm; 0 for always the median."""
    low: int = Field(default=1, ge=1)
    high: int = Field(default=2**20, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"low={self.low} <= median={self.median:g} <= high={self.high} fails")
        return self


class PoissonArrivals(_Section):
    """Sessions that start independently of each other."""

    kind: Literal["poisson"] = "poisson"
    rate_per_s: _Positive


class GammaArrivals(_Section):
    """Sessions whose gaps are gamma distributed: burstier than Poisson where `cv` is above 1."""

    kind: Literal["gamma"]
    rate_per_s: _Positive
    cv: _Positive
    """Standard deviation of the gaps over their mean; 1 is Poisson."""


class OnOffArrivals(_Section):
    """Sessions that start in bursts: Poisson while on, none while off, for exponential times."""

    kind: Literal["on_off"]
    rate_per_s: _Positive
    """On average over both."""
    on_s: _Positive
    """Mean time on."""
    off_s: _Positive
    """Mean time off."""


class SystemPrompts(_Section):
    """What sessions begin with and share."""

    count: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    share: float = Field(default=1.0, ge=0, le=1)
    """Of the sessions that begin with one."""
    zipf: _NotNegative = 0.0
    """The n-th is used in proportion to n to the power of minus this; 0 for all alike."""


class SyntheticWorkload(_Section):
    """A workload by its distributions."""

    num_requests: int = Field(ge=1)
    """Turns of all sessions."""
    arrivals: Annotated[
        PoissonArrivals | GammaArrivals | OnOffArrivals, Field(discriminator="kind")
    ]
    """When sessions start."""
    prompt_tokens: Lengths
    """What the user adds in each turn."""
    output_tokens: Lengths
    """Of each answer."""
    mean_turns: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Of a session: geometrically distributed."""
    think_s: _Positive = 30.0
    """Mean time from a turn's arrival to the next one's: exponential, whatever the answer took."""
    max_session_tokens: int = Field(default=32768, ge=1)
    """A session ends before the turn whose prompt and answer would be longer; its first turn is
    always had."""
    system_prompts: SystemPrompts | None = None


def generate(config: SyntheticWorkload, seed: int = 0) -> Iterator[SimRequest]:
    """Yield the requests of a made-up workload in order of arrival, one at a time."""
    sources = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)]
    starts = _starts(config.arrivals, sources[0])
    sessions = _Sessions(config, seed, sources[1], sources[2])
    # The next turn of each session that goes on, the soonest first.
    pending: list[tuple[float, int, _Session]] = []
    next_start = next(starts)
    for _ in range(config.num_requests):
        if not pending or next_start <= pending[0][0]:
            arrival_s, session = next_start, sessions.begin()
            next_start = next(starts)
        else:
            arrival_s, _number, session = heapq.heappop(pending)
        yield sessions.turn(session, arrival_s)
        pause_s = sessions.pause_s(session)
        if pause_s is not None:
            heapq.heappush(pending, (arrival_s + pause_s, session.number, session))


@dataclasses.dataclass(slots=True)
class _Session:
    """A session between two turns.

    Args:
        number: Of the session, from 0.
        history: What its next prompt begins with.
        turn: Of the next request, from 0.
        user: What the user adds next.
        num_outputs: Tokens of the next answer.
    """

    number: int
    history: tuple[Segment, ...]
    turn: int
    user: Segment
    num_outputs: int

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in (*self.history, self.user)) + self.num_outputs


class _Sessions:
    """Draws what sessions consist of."""

    def __init__(
        self,
        config: SyntheticWorkload,
        seed: int,
        lengths: np.random.Generator,
        turns: np.random.Generator,
    ) -> None:
        self._config = config
        self._seed = seed
        self._lengths = lengths
        self._turns = turns
        self._num_sessions = 0
        prompts = config.system_prompts
        self._cumulative: list[float] = []
        if prompts is not None:
            weights = np.arange(1, prompts.count + 1, dtype=np.float64) ** -prompts.zipf
            self._cumulative = np.cumsum(weights / weights.sum()).tolist()

    def begin(self) -> _Session:
        """Begin the next session."""
        number = self._num_sessions
        self._num_sessions += 1
        user, num_outputs = self._draw_turn(number, 0)
        return _Session(number, self._system_prompt(), 0, user, num_outputs)

    def turn(self, session: _Session, arrival_s: float) -> SimRequest:
        """Return the session's next request, and put it into its history."""
        seed = stream_number(_SEED, self._seed, session.number, session.turn) & MAX_SEED
        segments = (*session.history, session.user)
        answer = Segment(answer_stream(seed), session.num_outputs)
        request = SimRequest(arrival_s, segments, session.num_outputs, seed)
        session.history = (*segments, answer)
        session.turn += 1
        return request

    def pause_s(self, session: _Session) -> float | None:
        """Draw the next turn and return when it comes after this one; None where none does."""
        if self._turns.random() < 1 / self._config.mean_turns:
            return None
        session.user, session.num_outputs = self._draw_turn(session.number, session.turn)
        if session.num_tokens > self._config.max_session_tokens:
            return None
        return float(self._turns.exponential(self._config.think_s))

    def _draw_turn(self, number: int, turn: int) -> tuple[Segment, int]:
        num_prompt = self._draw_length(self._config.prompt_tokens)
        num_outputs = self._draw_length(self._config.output_tokens)
        return Segment(stream_number(_USER, self._seed, number, turn), num_prompt), num_outputs

    def _draw_length(self, lengths: Lengths) -> int:
        drawn = lengths.median * math.exp(lengths.sigma * self._lengths.standard_normal())
        return int(min(max(round(drawn), lengths.low), lengths.high))

    def _system_prompt(self) -> tuple[Segment, ...]:
        prompts = self._config.system_prompts
        if prompts is None or self._turns.random() >= prompts.share:
            return ()
        drawn = int(np.searchsorted(self._cumulative, self._turns.random(), side="right"))
        index = min(drawn, prompts.count - 1)
        return (Segment(stream_number(_SYSTEM, self._seed, index), prompts.num_tokens),)


def _starts(
    arrivals: PoissonArrivals | GammaArrivals | OnOffArrivals, draw: np.random.Generator
) -> Iterator[float]:
    """Yield the starts of sessions for ever, in seconds."""
    match arrivals:
        case PoissonArrivals(rate_per_s=rate):
            return _gamma_starts(draw, rate, 1.0)
        case GammaArrivals(rate_per_s=rate, cv=cv):
            return _gamma_starts(draw, rate, cv)
        case OnOffArrivals():
            return _on_off_starts(draw, arrivals)


def _gamma_starts(draw: np.random.Generator, rate: float, cv: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += float(draw.gamma(cv**-2, cv**2 / rate))
        yield now


def _on_off_starts(draw: np.random.Generator, arrivals: OnOffArrivals) -> Iterator[float]:
    # All the sessions of a cycle start while it is on.
    rate = arrivals.rate_per_s * (arrivals.on_s + arrivals.off_s) / arrivals.on_s
    now, on_until = 0.0, float(draw.exponential(arrivals.on_s))
    while True:
        now += float(draw.exponential(1 / rate))
        while now > on_until:
            # What is left of the gap passes once it is on again: gaps have no memory.
            off_s = float(draw.exponential(arrivals.off_s))
            now += off_s
            on_until += off_s + float(draw.exponential(arrivals.on_s))
        yield now
