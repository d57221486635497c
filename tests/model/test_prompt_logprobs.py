"""Log-probabilities of prompts on a random Llama, beside those of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.model import step_batch

PROMPT = [(37 * place + 11) % 101 for place in range(33)]
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=5)


def log_softmax(directory: Path, prompt: Sequence[int]) -> torch.Tensor:
    """float64 [num_tokens, vocab_size], of the token after each one."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([list(prompt)])).logits[0]
    return torch.log_softmax(logits.double(), -1)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_b59_scores_of_a_cached_prompt_equal_those_of_transformers(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    directory = make_llama()
    # So that a chunk of 10 tokens is scored in slices of 4.
    monkeypatch.setattr(step_batch, "_SLICE_ELEMENTS", 4 * 101)
    with LLM(
        str(directory),
        shell="inprocess",
        tensor_parallel_size=width,
        block_size=16,
        num_blocks=32,
        max_num_batched_tokens=10,
    ) as llm:
        for prompt in (PROMPT, PROMPT, [*PROMPT[:32], 100]):
            (output,) = llm.generate(prompt, PARAMS)
            scores = output.prompt_logprobs
            assert scores is not None
            assert (len(scores), scores[0], output.num_cached_tokens) == (33, None, 0)
            expected = log_softmax(directory, prompt)
            for place, score in enumerate(scores[1:], 1):
                assert score is not None
                row = expected[place - 1]
                assert score.logprob == pytest.approx(float(row[prompt[place]]), abs=1e-5)
                top = torch.topk(row, 5)
                assert [token_id for token_id, _ in score.top] == top.indices.tolist()
                found = [value for _, value in score.top]
                assert found == pytest.approx(top.values.tolist(), abs=1e-5)
