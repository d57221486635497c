"""The beams of one request: live sequences, what was proposed for each, hypotheses found.

    waiting      no beam has a row; the first stands for all in the queue
    entering     the first has a row and computes its tokens; the others wait, each for the one
                 with which it has the most in common of those that are better than it
    running      all have rows; the rows that the search may yet need are reserved
    ended        `finish` is set; the outputs are `hypotheses`, or why there are none is `error`

A beam that samples is held back until all beams have their candidates, for equally many tokens.
Then the next beams are chosen at once (`beam_commit`).
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rayserve_paged.core.beam_search import (
    BeamRules,
    Candidates,
    Child,
    Hypothesis,
    Selection,
    insert,
    is_over,
    select,
)
from rayserve_paged.core.block_table import BlockTable
from rayserve_paged.core.request import FinishReason
from rayserve_paged.core.step_messages import IntArray

if TYPE_CHECKING:
    from rayserve_paged.core.sequence import SequenceState


@dataclasses.dataclass(slots=True, eq=False)
class Beam:
    """One live beam.

    Args:
        sequence: Its tokens and blocks.
        cumulative: Sum of the log-probabilities of its output tokens.
        logprobs: Of each of them.
        candidates: What may follow it, once a step has told; None until then.
    """

    sequence: SequenceState
    cumulative: float
    logprobs: array[float]
    candidates: Candidates | None = None


class Entry(NamedTuple):
    """A beam that has no row yet, and with whom it shares the most.

    Args:
        beam: It waits.
        source: A better one, which enters before it.
        num_common: Leading tokens that they have in common.
    """

    beam: Beam
    source: Beam
    num_common: int


class BeamGroup:
    """The search of one request.

    Args:
        first: Its only beam to begin with, which knows the prompt.
    """

    __slots__ = (
        "_found",
        "beams",
        "entries",
        "error",
        "finish",
        "num_reserved_rows",
        "prompt_scores",
        "rules",
        "withdrawn",
    )

    def __init__(self, first: SequenceState) -> None:
        params = first.request.params
        assert params.beam_width is not None
        assert params.max_tokens is not None, "requests are clamped at the door"
        self.rules = BeamRules(
            width=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            end_ids=first.stop_ids,
            min_tokens=params.min_tokens,
            max_tokens=params.max_tokens,
        )
        # Best first.
        self.beams = [Beam(first, 0.0, array("d"))]
        # Beams that wait for others to enter, best first.
        self.entries: list[Entry] = []
        # Rows kept free for beams: of the width, those that no beam has.
        self.num_reserved_rows = 0
        # Of the prompt, which the first beam of all computes.
        self.prompt_scores = first.scores
        # Outputs that are not to be told of: their streams have been cancelled.
        self.withdrawn: set[int] = set()
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self._found: list[Hypothesis] = []

    @property
    def first(self) -> SequenceState:
        """The best beam, which stands for all in the queue."""
        return self.beams[0].sequence

    @property
    def sequences(self) -> tuple[SequenceState, ...]:
        """The live beams, best first."""
        return tuple(beam.sequence for beam in self.beams)

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What the search has found, best first."""
        return tuple(self._found)

    @property
    def is_entering(self) -> bool:
        """Whether beams wait for others to be computed."""
        return self.first.row is not None and bool(self.entries)

    @property
    def num_blocks_to_enter(self) -> int:
        """Blocks that beams without a row need beyond those that they share."""
        if not self.entries:
            return 0
        first = self.first
        block_size, num_known = first.table.block_size, first.num_known
        if first.table.has_window:
            # What the others have of the common part when one enters is their window alone.
            empty = BlockTable(block_size, (), first.windows)
            return empty.num_growing(num_known) * len(self.entries)
        num_shared = sum(self.num_blocks_shared(entry) for entry in self.entries)
        num_blocks = -(-num_known // block_size) * len(self.entries)
        return (num_blocks - num_shared) * len(first.windows)

    def num_blocks_shared(self, entry: Entry) -> int:
        """Return how many leading blocks, in each layer group, a beam shares when it enters."""
        # Its last token is computed anew, to have candidates, so the block of that is its own.
        most = min(entry.num_common, self.first.num_known - 1)
        return most // self.first.table.block_size

    @property
    def is_level(self) -> bool:
        """Whether every beam has its candidates."""
        return all(beam.candidates is not None for beam in self.beams)

    def propose(self, sequence: SequenceState, candidates: Candidates) -> None:
        """Note what may follow a beam."""
        for beam in self.beams:
            if beam.sequence is sequence:
                beam.candidates = candidates

    def select(self) -> list[Child]:
        """Choose the next beams, and note what has ended.

        Returns:
            The children that go on; none where the search is over, and `finish` is set.

        Raises:
            AssertionError: A beam has no candidates.
        """
        candidates = [beam.candidates for beam in self.beams if beam.candidates is not None]
        num_tokens = self.first.num_outputs + 1
        before = [beam.cumulative for beam in self.beams]
        selection: Selection = select(self.rules, before, candidates, num_tokens)
        for child in selection.ended:
            insert(self._found, self._hypothesis(child), self.rules.width)
        best = selection.live[0].cumulative if selection.live else None
        if is_over(self.rules, best, num_tokens, self._found):
            self.finish = FinishReason.STOP
            return []
        return selection.live

    def _hypothesis(self, child: Child) -> Hypothesis:
        beam = self.beams[child.parent]
        sequence = beam.sequence
        outputs = (*sequence.tokens[sequence.num_prompt :], child.token_id)
        return Hypothesis(
            score=self.rules.score(child.cumulative, len(outputs)),
            token_ids=outputs,
            logprobs=(*beam.logprobs, child.logprob),
            ended=len(outputs) >= self.rules.min_tokens and child.token_id in self.rules.end_ids,
        )

    def leave(self) -> None:
        """Note that no beam has a row any more: what was proposed is to be computed again."""
        for beam in self.beams:
            beam.candidates = None
        num_prompt = self.first.num_prompt
        outputs = np.array([sequence.tokens[num_prompt:] for sequence in self.sequences])
        self.entries = []
        for rank in range(1, len(self.beams)):
            num_common = _num_common(outputs[:rank], outputs[rank])
            source = int(num_common.argmax())
            entry = Entry(
                self.beams[rank], self.beams[source], num_prompt + int(num_common[source])
            )
            self.entries.append(entry)


def _num_common(rows: IntArray, row: IntArray) -> IntArray:
    """Return how many leading tokens each of some rows shares with another one.

    Args:
        rows: int32 [n, num_tokens].
        row: int32 [num_tokens].
    """
    differ = rows != row
    num_common = np.where(differ.any(axis=1), differ.argmax(axis=1), len(row))
    return num_common.astype(np.int32)
