"""Rules for a batcher and its blocks under any order of operations, beside plain lists of tokens.

The oracle knows, for each sample, the list of its tokens up to its end, and nothing of blocks. A
slot must hold the history that its token ends; a key must name a block whose slots hold the
histories that were hashed into it.
"""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from ledger_oracle import Sample
from ledger_requests import ENDINGS, SCOPES, STORIES, Tracked
from ledger_rules import RunningBatcher
from replica_driver import make_request

from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.errors import CapacityError, InvalidInputError
from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.request import FinishReason, Request, admit
from rayserve_paged.core.sequence import Phase, SequenceState


class LedgerMachine(RunningBatcher):
    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.integers(1, 16),
        max_tokens=st.integers(1, 16),
        scope=st.sampled_from(SCOPES),
        priority=st.sampled_from([0, 0, -1, 2]),
        num_samples=st.sampled_from([1, 1, 2, 3, 4]),
        greedy=st.booleans(),
        failure=st.sampled_from([None, None, None, (0, 0), (1, 0), (2, 1), (0, 2)]),
    )
    def submit(
        self,
        story: tuple[int, ...],
        num_prompt: int,
        max_tokens: int,
        scope: RequestScope,
        priority: int,
        num_samples: int,
        greedy: bool,
        failure: tuple[int, int] | None,
    ) -> None:
        limits = self.limits
        num_samples = min(num_samples, limits.max_num_seqs)
        most = limits.num_usable_blocks // len(limits.layer_groups) * limits.block_size
        num_prompt = min(num_prompt, most)
        max_tokens = min(max_tokens, most - num_prompt + 1)
        request = make_request(
            story[:num_prompt],
            max_tokens,
            request_id=f"q{self.num_submitted}",
            priority=priority,
            scope=scope,
            temperature=0.0 if greedy else 1.0,
            seed=self.num_submitted,
            n=num_samples,
        )
        seed = None if greedy else self.num_submitted
        samples = [
            self.oracle.sample(story[:num_prompt], max_tokens, scope, seed, sibling)
            for sibling in range(num_samples)
        ]
        if failure is not None and failure[1] < num_samples:
            output_index, sibling = failure
            if output_index < len(samples[sibling].tokens) - num_prompt:
                samples[sibling].failing_draw = output_index
                if output_index == 0:
                    # Samples that are not forked yet fail together.
                    for sample in samples:
                        sample.failing_draw = 0
        self.add(request, samples[0].keys, scope, samples)
        self.operations["submit"] += 1

    @rule(
        story=st.sampled_from(STORIES),
        num_prompt=st.integers(1, 10),
        max_tokens=st.integers(1, 8),
        scope=st.sampled_from(SCOPES),
        priority=st.sampled_from([0, 0, -1, 2]),
        width=st.integers(1, 4),
        ending=st.sampled_from(ENDINGS),
    )
    def submit_a_search(
        self,
        story: tuple[int, ...],
        num_prompt: int,
        max_tokens: int,
        scope: RequestScope,
        priority: int,
        width: int,
        ending: tuple[float, bool | str],
    ) -> None:
        request = make_request(
            story[:num_prompt],
            max_tokens,
            request_id=f"q{self.num_submitted}",
            priority=priority,
            scope=scope,
            beam_width=width,
            length_penalty=ending[0],
            early_stopping=ending[1],
        )
        try:
            admit(request, self.limits)
        except (CapacityError, InvalidInputError):
            return
        prompt = story[:num_prompt]
        outputs = self.oracle.search(prompt, request.params, scope)
        keys = self.oracle.beam(prompt, num_prompt, scope).keys
        self.add(request, keys, scope, [], outputs)
        self.operations["submit"] += 1

    def add(
        self,
        request: Request,
        keys: list[BlockKey],
        scope: RequestScope,
        samples: list[Sample],
        outputs: list[tuple[int, ...]] | None = None,
    ) -> None:
        """Hand a request to the batcher."""
        limits, num_prompt = self.limits, len(request.prompt_token_ids)
        sequence = SequenceState(
            request,
            tuple(keys[: num_prompt // limits.block_size]),
            self.scope.root(scope),
            self.num_submitted,
            limits.eos_token_ids,
            limits.block_size,
            request.params.num_siblings,
            limits.layer_groups,
        )
        self.num_submitted += 1
        tracked = Tracked(samples, {0: sequence}, num_prompt, scope, outputs)
        self.tracked[request.request_id] = tracked
        self.batcher.add(sequence)

    @precondition(lambda self: self.tracked)
    @rule(pick=st.integers(0, 99), one_sample=st.booleans())
    def cancel(self, pick: int, one_sample: bool) -> None:
        request_id = list(self.tracked)[pick % len(self.tracked)]
        tracked = self.tracked[request_id]
        sequences = list(tracked.sequences.values())
        if one_sample and tracked.outputs is None:
            sequences = [sequences[pick % len(sequences)]]
        for sequence in sequences:
            if sequence.phase is not Phase.ENDED:
                self.batcher.end(sequence, FinishReason.CANCELLED)
            if tracked.outputs is None:
                # Two may want it gone.
                self.batcher.end(sequence, FinishReason.CANCELLED)
                self.requests.forget(request_id, sequence)
            assert sequence.finish is FinishReason.CANCELLED
        if tracked.outputs is not None:
            del self.tracked[request_id]
        self.operations["cancel"] += 1
