"""A runner driven plan by plan, whose sequences own blocks of their own."""

from collections.abc import Sequence

import numpy as np
import torch

from rayserve_cluster.model_runner import FindSharedPrefixes, ModelRunner
from rayserve_paged.core.ids import Row, StepId
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.core.step_messages import RowStart, StepPlan
from rayserve_paged.model.build import StepModel

BLOCK_SIZE = 4
NUM_ROWS = 6


class Driven:
    """A runner whose sequences own blocks of their own, dealt once for all.

    Args:
        model: A whole model.
        num_places: Blocks of each sequence in each layer group.
        find_shared_prefixes: As `ModelRunner`.
        with_graphs: As `ModelRunner`.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        num_places: int = 12,
        find_shared_prefixes: FindSharedPrefixes | None = None,
        with_graphs: bool = False,
    ) -> None:
        num_groups = len(model.spec.layer_groups)
        self.num_blocks = NUM_ROWS * num_places * num_groups
        self.pool = model.kv_layout(BLOCK_SIZE).allocate(self.num_blocks + with_graphs)
        self.pool.keys.fill_(99)
        self.pool.values.fill_(-99)
        max_model_len = num_places * BLOCK_SIZE
        self.runner = ModelRunner(
            model,
            self.pool,
            max_num_seqs=NUM_ROWS,
            max_model_len=max_model_len,
            find_shared_prefixes=find_shared_prefixes,
            with_graphs=with_graphs,
        )
        self.blocks = np.random.default_rng(3).permutation(self.num_blocks).reshape(NUM_ROWS, -1)
        self._lengths = [0] * NUM_ROWS
        self._waiting: list[RowStart] = []

    def start(self, row: int, prompt: Sequence[int]) -> torch.Tensor:
        """Compute a prompt in one step."""
        self._waiting = [self._row_start(row, len(prompt))]
        self._lengths[row] = 0
        return self._run([row], [prompt])

    def begin(self, row: int, num_tokens: int) -> None:
        """Let a row hold tokens that somebody else has computed."""
        self._waiting.append(self._row_start(row, num_tokens))
        self._lengths[row] = num_tokens

    def decode(self, rows: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Compute a token of each row."""
        return self._run(rows, [[token_id] for token_id in token_ids])

    def _row_start(self, row: int, num_tokens: int) -> RowStart:
        blocks = self.blocks[row].astype(np.int32)
        params = SamplingParams(temperature=0.0)
        return RowStart(Row(row), 0, blocks, params, num_prompt_tokens=num_tokens)

    def _run(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        plan = StepPlan(
            step_id=StepId(0),
            starts=tuple(self._waiting),
            append_rows=np.zeros(0, np.int32),
            append_blocks=np.zeros(0, np.int32),
            rows=np.array(rows, np.int32),
            num_computed=np.array([self._lengths[row] for row in rows], np.int32),
            num_tokens=np.array([len(new) for new in tokens], np.int32),
            token_ids=np.array([t for new in tokens for t in new], np.int32),
            copies=np.zeros((0, 3), np.int32),
            late=np.zeros(0, np.int32),
            sample_indices=np.arange(len(rows), dtype=np.int32),
            sample_siblings=np.zeros(len(rows), np.int32),
            num_steps=1,
        )
        self._waiting = []
        for row, new in zip(rows, tokens, strict=True):
            self._lengths[row] += len(new)
        logits = self.runner.run(plan)
        assert logits is not None
        return logits
