"""A rank of the replica driver that runs a model on a real pool."""

from collections.abc import Sequence

import numpy as np
import torch
from replica_driver import ReplicaDriver, make_limits

from rayserve_cluster.model_runner import ModelRunner
from rayserve_paged.core.plan_steps import SampleMemory
from rayserve_paged.core.step_messages import StepPlan, StepResult
from rayserve_paged.model.build import StepModel


class ModelRank:
    """Executes step plans on a model.

    Args:
        model: A whole model.
        num_blocks: Of its pool.
        block_size: Of its pool.
        max_num_seqs: Rows.
        max_model_len: Most tokens of a sequence.
    """

    def __init__(
        self,
        model: StepModel,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        pool = model.kv_layout(block_size).allocate(num_blocks)
        # What no sequence wrote shows: as a wrong fingerprint, or as a number that is none.
        fill = float("nan") if pool.layout.dtype.is_floating_point else -99
        pool.keys.fill_(fill)
        pool.values.fill_(fill)
        self.logits: list[torch.Tensor] = []
        self._runner = ModelRunner(
            model, pool, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self._memory = SampleMemory(max_num_seqs)

    def run(self, plan: StepPlan) -> StepResult:
        step = self._memory.first_step(plan)
        tokens = []
        while True:
            logits = self._runner.run(step)
            assert logits is not None
            self.logits.append(logits)
            result = self._runner.sample(step, logits)
            tokens.append(result.token_ids[0])
            self._memory.note(step, tokens[-1])
            if len(tokens) == plan.num_steps:
                return StepResult(plan.step_id, np.stack(tokens), result.logprobs, result.errors)
            step = self._memory.next_step(step, tokens[-1])


def drive(
    model: StepModel,
    num_blocks: int,
    block_size: int,
    *,
    max_num_batched_tokens: int = 64,
    pipeline_depth: int = 1,
    max_decode_steps: int = 1,
    max_num_seqs: int = 4,
    partial_reuse: bool = False,
) -> tuple[ReplicaDriver, ModelRank]:
    """A replica driver whose rank runs a model, and that rank."""
    windows: Sequence[object] = [group.window for group in model.spec.layer_groups]
    limits = make_limits(
        num_blocks,
        block_size,
        vocab_size=model.spec.vocab_size,
        max_model_len=model.spec.max_model_len,
        layer_groups=tuple(windows),  # type: ignore[arg-type]
    )
    driver = ReplicaDriver(
        limits,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        pipeline_depth=pipeline_depth,
        max_decode_steps=max_decode_steps,
        partial_reuse=partial_reuse,
    )
    rank = ModelRank(model, num_blocks, block_size, max_num_seqs, limits.max_model_len)
    driver.rank = rank  # type: ignore[assignment]
    return driver, rank
