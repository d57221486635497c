"""One replica over the real fingerprint model, its kernels and its sampler, step by step."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from replica_driver import ReplicaDriver

from rayserve_cluster.model_runner import ModelRunner
from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.messages import IntArray, StepResult
from rayserve_paged.core.plan_steps import SampleMemory
from rayserve_paged.core.request import ModelLimits, SamplingParams
from rayserve_paged.model.fingerprint import FingerprintModel, FingerprintOracle
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.sampler import Sampler
from rayserve_paged.model.sampling_row import SamplingRow
from rayserve_paged.model.spec import FingerprintConfig

CONFIG = FingerprintConfig(num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=256)


class ModelDriver(ReplicaDriver):
    """Runs steps on a model runner in place of the toy rank.

    Args:
        limits: Of the replica.
        max_num_seqs: Rows.
        max_num_batched_tokens: Budget of a step.
        pipeline_depth: Steps in flight.
        max_decode_steps: Steps of one plan.
    """

    def __init__(
        self,
        limits: ModelLimits,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pipeline_depth: int = 1,
        max_decode_steps: int = 1,
    ) -> None:
        super().__init__(
            limits,
            max_num_seqs,
            max_num_batched_tokens,
            pipeline_depth=pipeline_depth,
            max_decode_steps=max_decode_steps,
        )
        model = FingerprintModel(CONFIG, SoloCollectives(), TorchBackend())
        pool = model.kv_layout(limits.block_size).allocate(limits.num_blocks)
        self._runner = ModelRunner(
            model, pool, max_num_seqs=max_num_seqs, max_model_len=limits.max_model_len
        )
        self._memory = SampleMemory(max_num_seqs)

    def execute(self) -> StepResult:
        """Run the oldest step in flight on the model, and do not report it yet."""
        plan = self.plans.popleft()
        step = self._memory.first_step(plan)
        token_ids: list[IntArray] = []
        while True:
            logits = self._runner.run(step)
            assert logits is not None
            result = self._runner.sample(step, logits)
            token_ids.append(result.token_ids[0])
            self._memory.note(step, token_ids[-1])
            if result.errors or len(token_ids) == plan.num_steps:
                return dataclasses.replace(result, token_ids=np.stack(token_ids))
            step = self._memory.next_step(step, token_ids[-1])


def drawn(prompt: Sequence[int], params: SamplingParams, sibling: int = 0) -> tuple[int, ...]:
    """Draw a sample from logits that are computed from its tokens alone, without a cache."""
    sequence, sampler = FingerprintOracle(CONFIG), Sampler()
    for token_id in prompt:
        sequence.append(token_id)
    outputs: list[int] = []
    assert params.max_tokens is not None
    while len(outputs) < params.max_tokens:
        logits = sequence.logits()
        if params.temperature == 0:
            token_id = int(torch.argmax(logits))
        else:
            row = SamplingRow(params, len(outputs), sibling=sibling)
            token_ids, _logprobs, errors = sampler.sample(logits[None], [row])
            assert not errors
            token_id = int(token_ids[0])
        outputs.append(token_id)
        if token_id in params.stop_token_ids:
            break
        sequence.append(token_id)
    return tuple(outputs)
