"""One request as its reader sees it: tokens become text, stop strings end it, time is taken."""

import dataclasses
import math

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.ids import Attempt, Incarnation, ReplicaId
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.core.running_request import RequestStage, RunningRequest
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.core.stream_update import StreamUpdate
from rayserve_paged.model.detokenizer import Detokenizer
from rayserve_paged.model.tokenizer import Tokenizer
from rayserve_paged.outputs import RequestOutput, SampleOutput, StreamChunk


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to be submitted.

    Args:
        name: Id of the request towards the user.
        prompt: Its text, None where ids were given.
        request: Towards the deployment, under an id that no one else uses.
        shows_logprobs: Whether the user asked for the log-probabilities, or ranking alone did.
    """

    name: str
    prompt: str | None
    request: Request
    shows_logprobs: bool


class _Sample:
    """Gathers one of the parallel samples of a request."""

    def __init__(self, sibling: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.first_token_s: float | None = None
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self._sibling = sibling
        # The tokens of a beam come all at once, and always with their log-probabilities.
        self._is_beam = params.beam_width is not None
        self._has_logprobs = params.logprobs is not None or self._is_beam
        is_free = params.grammar is None
        self._detokenizer = Detokenizer(
            tokenizer.token_bytes if is_free else tokenizer.grammar_bytes,
            params.stop,
            params.min_tokens,
            includes_stop=params.include_stop_str_in_output,
        )
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last_token_s = 0.0

    def push(
        self, update: StreamUpdate, now: float, finish: FinishReason | None, error: str | None
    ) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Take in what is new and how it ended; return the text, tokens and logprobs to show."""
        delta = self._detokenizer.push(update.token_ids)
        token_ids = update.token_ids[: delta.num_tokens]
        logprobs = update.logprobs[: delta.num_tokens]
        if token_ids:
            self._last_token_s = now
            if self.first_token_s is None:
                self.first_token_s = now
        self._token_ids += token_ids
        self._logprobs += logprobs
        text = delta.text
        if delta.stop is not None:
            # A stop string wins over whatever ended the tokens behind it.
            self.end(FinishReason.STOP, None)
        elif finish is not None:
            text += self._detokenizer.finish()
            self.end(finish, error)
        self._texts.append(text)
        return text, token_ids, logprobs

    def end(self, finish: FinishReason, error: str | None) -> None:
        self.finish, self.error = finish, error

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def rank(self) -> tuple[bool, float]:
        """What the best samples have least of."""
        whole = self.finish in (FinishReason.STOP, FinishReason.LENGTH)
        return not whole, -self._cumulative_logprob

    @property
    def _cumulative_logprob(self) -> float:
        return math.fsum(position.logprob for position in self._logprobs)

    def output(self, *, shows_logprobs: bool) -> SampleOutput:
        assert self.finish is not None, "it has not ended"
        num_tokens = len(self._token_ids)
        tpot_s = None
        if self.first_token_s is not None and num_tokens > 1 and not self._is_beam:
            tpot_s = (self._last_token_s - self.first_token_s) / (num_tokens - 1)
        return SampleOutput(
            sibling=self._sibling,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            finish_reason=self.finish,
            tpot_s=tpot_s,
            logprobs=tuple(self._logprobs) if shows_logprobs else None,
            cumulative_logprob=self._cumulative_logprob if self._has_logprobs else None,
            error=self.error,
        )


class Generation:
    """Gathers the stream of one request.

    Args:
        job: The request.
        tokenizer: Of the model.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        # Siblings that the user has cancelled.
        self._cancelled: set[int] = set()
        params = job.request.params
        self._samples = [_Sample(i, params, tokenizer) for i in range(params.num_siblings)]
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._replica: str | None = None
        self._submitted_s: float | None = None

    def cancel(self, sibling: int | None) -> None:
        """Note that the user cancels a sample; None for all.

        Raises:
            InvalidInputError: There is no such sample.
        """
        every = range(len(self._samples))
        if sibling is not None and sibling not in every:
            accepted = f"an integer from 0 to {len(every) - 1}, or None for all samples"
            raise InvalidInputError("sibling", sibling, accepted)
        self._cancelled |= set(every) if sibling is None else {sibling}

    def begin(self, now: float) -> None:
        """Note the time of submission, in seconds of a clock that never goes back."""
        self._submitted_s = now

    def push(self, update: StreamUpdate, now: float) -> StreamChunk | None:
        """Take in what is new; the chunk with an `output` is the last one.

        Args:
            update: Of this request.
            now: Seconds, on the clock of `begin`.

        Returns:
            What there is to read; None where a stop string has ended the sample before.
        """
        sample = self._samples[update.sibling]
        if sample.finish is not None:
            return None
        self._replica = update.replica_id
        self._num_cached_tokens = update.num_cached_tokens
        self._prompt_logprobs += update.prompt_logprobs
        text, token_ids, logprobs = sample.push(update, now, *self._ending(update))
        ended = all(sample.finish is not None for sample in self._samples)
        return StreamChunk(
            request_id=self.job.name,
            sibling=update.sibling,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self.job.shows_logprobs else (),
            finish_reason=sample.finish,
            output=self._output() if ended else None,
            prompt_logprobs=update.prompt_logprobs,
        )

    def _ending(self, update: StreamUpdate) -> tuple[FinishReason | None, str | None]:
        if update.finish is FinishReason.ERROR:
            return FinishReason.ERROR, update.error or "no reason was given"
        if update.finish is FinishReason.CANCELLED and update.sibling not in self._cancelled:
            return FinishReason.ERROR, update.error or "cancelled, though nobody asked"
        return update.finish, None

    def running(
        self, source: tuple[ReplicaId, Incarnation] | None, attempt: Attempt, now: float
    ) -> RunningRequest:
        """Return how far it has come.

        Args:
            source: Where it is served; None where it is not.
            attempt: As which attempt.
            now: Seconds, on the clock of `begin`.
        """
        request = self.job.request
        num_output_tokens = sum(sample.num_tokens for sample in self._samples)
        stage = RequestStage.DECODE if num_output_tokens else RequestStage.PREFILL
        most = request.params.max_tokens
        return RunningRequest(
            request_id=request.request_id,
            name=self.job.name,
            tenant=request.tenant or "",
            replica=None if source is None else source[0],
            stage=RequestStage.QUEUED if source is None else stage,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=num_output_tokens,
            max_output_tokens=None if most is None else most * len(self._samples),
            age_s=0.0 if self._submitted_s is None else now - self._submitted_s,
            num_recoveries=attempt,
        )

    def failed(self, reason: str) -> RequestOutput:
        """Return the output of a request that this reason put an end to."""
        for sample in self._samples:
            if sample.finish is None:
                sample.end(FinishReason.ERROR, reason)
        return dataclasses.replace(self._output(), error=reason)

    def _all_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        request, scores = self.job.request, self._prompt_logprobs
        if request.params.prompt_logprobs is None:
            return None
        # Absent where the request ended before its first token.
        return (None, *scores) if len(scores) == len(request.prompt_token_ids) - 1 else None

    def _output(self) -> RequestOutput:
        request, samples = self.job.request, self._samples
        errors = [sample.error for sample in samples if sample.error is not None]
        began = self._submitted_s
        starts = [s.first_token_s for s in samples if s.first_token_s is not None]
        num_shown = request.params.n
        if num_shown < len(samples):
            # Stable: of equally good ones, the one drawn first.
            samples = sorted(samples, key=lambda sample: sample.rank)[:num_shown]
        return RequestOutput(
            request_id=self.job.name,
            prompt=self.job.prompt,
            prompt_token_ids=tuple(request.prompt_token_ids),
            samples=tuple(s.output(shows_logprobs=self.job.shows_logprobs) for s in samples),
            prompt_logprobs=self._all_prompt_logprobs(),
            num_cached_tokens=self._num_cached_tokens,
            replica=self._replica,
            ttft_s=min(starts) - began if starts and began is not None else None,
            error=errors[0] if errors else None,
        )
