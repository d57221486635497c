"""One request as its reader sees it: tokens become text, stop strings end it, time is taken."""

import dataclasses

from rayserve_paged.core.consumer import StreamUpdate
from rayserve_paged.core.messages import TokenLogprobs
from rayserve_paged.core.request import FinishReason, Request
from rayserve_paged.model.detokenizer import Detokenizer
from rayserve_paged.model.tokenizer import Tokenizer
from rayserve_paged.outputs import RequestOutput, StreamChunk


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to be submitted.

    Args:
        name: Id of the request towards the user.
        prompt: Its text, None where ids were given.
        request: Towards the deployment, under an id that no one else uses.
    """

    name: str
    prompt: str | None
    request: Request


class Generation:
    """Gathers the stream of one request.

    Args:
        job: The request.
        tokenizer: Of the model.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self.cancel_asked = False
        params = job.request.params
        self._detokenizer = Detokenizer(tokenizer.token_bytes, params.stop, params.min_tokens)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_cached_tokens = 0
        self._replica: str | None = None
        self._submitted_s = 0.0
        self._first_token_s: float | None = None
        self._last_token_s = 0.0

    def begin(self, now: float) -> None:
        """Note the time of submission, in seconds of a clock that never goes back."""
        self._submitted_s = now

    def push(self, update: StreamUpdate, now: float) -> StreamChunk:
        """Take in what is new; the chunk with an `output` is the last one.

        Args:
            update: Of this request.
            now: Seconds, on the clock of `begin`.
        """
        self._replica = update.replica_id
        self._num_cached_tokens = update.num_cached_tokens
        delta = self._detokenizer.push(update.token_ids)
        token_ids = update.token_ids[: delta.num_tokens]
        logprobs = update.logprobs[: delta.num_tokens]
        if token_ids:
            self._last_token_s = now
            if self._first_token_s is None:
                self._first_token_s = now
        self._token_ids += token_ids
        self._logprobs += logprobs
        # A stop string wins over whatever ended the tokens behind it.
        finish = update.finish if delta.stop is None else FinishReason.STOP
        text = delta.text
        if finish is not None and delta.stop is None:
            text += self._detokenizer.finish()
        self._texts.append(text)
        output = None if finish is None else self._finished(finish, update.error)
        return StreamChunk(
            request_id=self.job.name,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            output=output,
        )

    def _finished(self, finish: FinishReason, error: str | None) -> RequestOutput:
        if finish is FinishReason.ERROR:
            return self._output(finish, error or "no reason was given")
        if finish is FinishReason.CANCELLED and not self.cancel_asked:
            return self._output(FinishReason.ERROR, error or "cancelled, though nobody asked")
        return self._output(finish, None)

    def failed(self, reason: str) -> RequestOutput:
        """Return the output of a request that this reason put an end to."""
        return self._output(FinishReason.ERROR, reason)

    def _output(self, finish: FinishReason, error: str | None) -> RequestOutput:
        request, first = self.job.request, self._first_token_s
        num_tokens = len(self._token_ids)
        tpot_s = None
        if first is not None and num_tokens > 1:
            tpot_s = (self._last_token_s - first) / (num_tokens - 1)
        return RequestOutput(
            request_id=self.job.name,
            prompt=self.job.prompt,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            finish_reason=finish,
            num_cached_tokens=self._num_cached_tokens,
            replica=self._replica,
            ttft_s=None if first is None else first - self._submitted_s,
            tpot_s=tpot_s,
            logprobs=None if request.params.logprobs is None else tuple(self._logprobs),
            error=error,
        )
