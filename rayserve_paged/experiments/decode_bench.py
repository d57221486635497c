"""Output tokens per second of one replica in this process, by what computes its attention."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from rayserve_paged.core.config import CpuAttention, Dtype, KvDtype
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.llm import LLM
from rayserve_paged.load_config import load_config

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRate:
    """What one attention makes of one batch.

    Args:
        attention: As `model.cpu_attention`; None for the widest native one.
        batch_size: Sequences that decode at once.
        tokens_per_s: Median over the rounds.
    """

    attention: CpuAttention | None
    batch_size: int
    tokens_per_s: float


def decode_rates(
    model: str,
    attentions: Sequence[CpuAttention | None],
    *,
    dtype: Dtype,
    kv_dtype: KvDtype | None,
    batch_sizes: Sequence[int],
    prompt_len: int,
    output_len: int,
    num_rounds: int,
) -> Iterator[DecodeRate]:
    """Decode batches of prompts that are cached but for their last block.

    The replicas of all attentions stand side by side and take turns, so that whatever else the
    machine does strikes all alike.

    Args:
        model: As `LLM` takes it.
        attentions: Contestants.
        dtype: Of weights and activations.
        kv_dtype: Of the cache; None for `dtype`.
        batch_sizes: Sequences that decode at once.
        prompt_len: Tokens of each prompt.
        output_len: Tokens that are measured, for each prompt.
        num_rounds: Samples of each.

    Yields:
        For each batch size, one for each attention.

    Raises:
        InvalidInputError: The model, or an attention that this processor does not have.
    """
    replicas: list[LLM] = []
    try:
        for attention in attentions:
            flags = {
                "model.model": model,
                "model.dtype": dtype,
                "model.kv_dtype": kv_dtype,
                "model.cpu_attention": attention,
                "cache.block_size": BLOCK_SIZE,
                "cache.num_blocks": max(batch_sizes)
                * -(-(prompt_len + output_len) // BLOCK_SIZE + 1),
                "batch.max_num_seqs": max(batch_sizes),
            }
            replicas.append(LLM(config=load_config(flags=flags), shell="inprocess"))
        for batch_size in batch_sizes:
            prompts = _prompts(batch_size, prompt_len)
            times: list[list[float]] = [[] for _ in replicas]
            for round_index in range(num_rounds + 1):
                for replica, own in zip(replicas, times, strict=True):
                    seconds = _seconds(replica, prompts, output_len)
                    # The first round computes the prompts.
                    if round_index:
                        own.append(seconds)
            for attention, own in zip(attentions, times, strict=True):
                rate = batch_size * output_len / statistics.median(own)
                yield DecodeRate(attention, batch_size, rate)
    finally:
        for replica in replicas:
            replica.close()


def _prompts(batch_size: int, prompt_len: int) -> list[list[int]]:
    """Different ids, below those of every model's vocabulary."""
    draw = np.random.default_rng(batch_size)
    return [draw.integers(200, size=prompt_len).tolist() for _ in range(batch_size)]


def _seconds(replica: LLM, prompts: list[list[int]], output_len: int) -> float:
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    replica.generate(prompts, params)
    return time.perf_counter() - start
