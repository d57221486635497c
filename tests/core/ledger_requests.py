"""Requests of the ledger machine: what they are drawn from, and what is told of them."""

import dataclasses
from collections import Counter
from collections.abc import Callable

from ledger_oracle import Sample

from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.block_identity import Adapter, RequestScope
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.core.step_commit import Committed, Progress
from rayserve_paged.core.stream_messages import TokenRun

END_ID = 0
# Prompts are cut from these, so that they share prefixes of every length.
STORIES = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3),
    (3, 1, 4, 1, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7),
    (3, 1, 4, 1, 5, 9, 2, 6, 2, 7, 1, 8, 2, 8, 1, 8),
)
# What tells equal tokens apart.
SCOPES = (
    RequestScope(),
    RequestScope(""),
    RequestScope("other"),
    RequestScope(None, Adapter("a", "1")),
    RequestScope(None, Adapter("a", "2")),
    RequestScope(None, None, AttentionWindow(3, 1)),
    RequestScope("other", None, AttentionWindow(5)),
)
ENDINGS: tuple[tuple[float, bool | str], ...] = (
    (1.0, False),
    (0.0, True),
    (2.0, "never"),
    (-1.0, False),
)


@dataclasses.dataclass(eq=False)
class Tracked:
    """A request: its samples, and those of its sequences that live.

    Args:
        samples: What each sample must be; of a search none.
        outputs: Of a search what it must find, best first.
    """

    samples: list[Sample]
    sequences: dict[int, SequenceState]
    num_prompt: int
    scope: RequestScope
    outputs: list[tuple[int, ...]] | None = None


class TrackedRequests:
    """The requests that have not ended, each compared with what it must be as it is told of.

    Args:
        events: Counts what came about.
    """

    def __init__(self, events: Counter[str]) -> None:
        self.by_id: dict[RequestId, Tracked] = {}
        self._events = events

    def live(self) -> tuple[SequenceState, ...]:
        """Return the sequences that have not ended."""
        return tuple(s for tracked in self.by_id.values() for s in tracked.sequences.values())

    def hear(self, committed: Committed) -> None:
        """Take in what a finished step tells."""
        for child in committed.born:
            self.by_id[child.request.request_id].sequences[child.sibling] = child
        for news in committed.news:
            if isinstance(news, Progress):
                sequence, output_index, token_id, _logprobs, finish, _error = news
                request_id, sibling = sequence.request.request_id, sequence.sibling
                self._hear_one(request_id, sibling, output_index, token_id)
                if finish is not None:
                    self._hear_the_end(request_id, sequence, finish)
            else:
                self._hear_run(news[1])
        for search in committed.beams:
            self._hear_of_a_search(search)

    def forget(self, request_id: RequestId, sequence: SequenceState) -> None:
        """Note that a sequence has ended, and what was to be forked from it."""
        tracked = self.by_id[request_id]
        unborn = range(1, sequence.num_unborn + 1)
        for sibling in (sequence.sibling, *unborn):
            tracked.samples[sibling].ended = True
        del tracked.sequences[sequence.sibling]
        if not tracked.sequences:
            assert all(sample.ended for sample in tracked.samples)
            del self.by_id[request_id]

    def _hear_run(self, run: TokenRun) -> None:
        told = zip(run.names, run.indices.tolist(), run.token_ids.T.tolist(), strict=True)
        for name, first, token_ids in told:
            for output_index, token_id in enumerate(token_ids, first):
                self._hear_one(name.request_id, name.sibling, output_index, token_id)

    def _hear_one(
        self, request_id: RequestId, sibling: int, output_index: int, token_id: int | None
    ) -> None:
        sample = self.by_id[request_id].samples[sibling]
        assert output_index == sample.num_told, "a token is told twice or left out"
        assert not sample.ended, "a token is told after the end"
        if token_id is not None:
            assert token_id == sample.tokens[sample.num_prompt + output_index]
            sample.num_told += 1

    def _hear_the_end(
        self, request_id: RequestId, sequence: SequenceState, finish: FinishReason
    ) -> None:
        tracked = self.by_id[request_id]
        sample = tracked.samples[sequence.sibling]
        if finish is FinishReason.ERROR:
            assert sample.num_told == sample.failing_draw
            self._events["failed"] += 1
        else:
            assert sample.num_told == len(sample.tokens) - sample.num_prompt
            stopped = sample.tokens[-1] == END_ID
            assert finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            self._events["finished"] += 1
        self.forget(request_id, sequence)

    def _hear_of_a_search(self, search: BeamGroup) -> None:
        request_id = search.first.request.request_id
        tracked = self.by_id[request_id]
        if search.finish is None:
            tracked.sequences = {sequence.sibling: sequence for sequence in search.sequences}
            return
        assert search.finish is FinishReason.STOP
        assert [one.token_ids for one in search.hypotheses] == tracked.outputs
        del self.by_id[request_id]
        self._events["searched"] += 1


class LedgerReplica(Replica):
    """A replica that only holds a batcher, whose requests a machine keeps.

    Its own events are another machine's.
    """

    live: Callable[[], tuple[SequenceState, ...]]

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        return self.live()
