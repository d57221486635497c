"""Models of several layer groups, and of experts, through LLM: the tokens of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fingerprint_llm import num_unused_blocks
from random_model import model_class

from rayserve_paged import LLM, SamplingParams
from rayserve_paged.core.event_log import LoggedEvent, LoggedStart, ReplicaStart
from rayserve_paged.core.replay import new_replica
from rayserve_paged.event_files import log_files, read_log
from rayserve_paged.outputs import RequestOutput

NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# The first 17 tokens are those of all; the longest sequence has 54.
SHARED = [(5 * k * k + 3 * k) % 97 for k in range(17)]
PROMPTS = [SHARED + [(7 * i + 3 * k * k + k) % 97 for k in range(7 * i)] for i in range(4)]

# Five windowed layers for each full one: six layer groups.
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": 10,
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True,
}
MIXTRAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
}


def check(model_type: str, directory: Path, outputs: Sequence[RequestOutput]) -> None:
    """See to it that transformers would choose each token after those before it."""
    model = model_class(model_type).from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager"
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        token_ids = [*prompt, *output.token_ids[:-1]]
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, -NUM_TOKENS:]
        assert tuple(logits.argmax(dim=1).tolist()) == output.token_ids


def num_preemptions(folder: Path) -> int:
    """Preemptions of the one replica whose log is in a folder."""
    total = 0
    for path in log_files(folder):
        replica = None
        for entry in read_log(path):
            if isinstance(entry, LoggedStart) and isinstance(entry.start, ReplicaStart):
                replica = new_replica(entry.start)
            elif isinstance(entry, LoggedEvent) and replica is not None:
                replica.handle(entry.event, entry.now)  # type: ignore[arg-type]
        total += 0 if replica is None else replica.batcher.num_preemptions
    return total


@pytest.mark.parametrize(
    ("model_type", "settings", "width", "num_blocks"),
    [
        pytest.param("gemma3_text", GEMMA3, 2, 64),
        pytest.param("mixtral", MIXTRAL, 1, 20),
        pytest.param("gemma3_text", GEMMA3, 1, 64, marks=pytest.mark.slow),
        pytest.param("gemma3_text", GEMMA3, 3, 64, marks=pytest.mark.slow),
        pytest.param("mixtral", MIXTRAL, 3, 20, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", QWEN3_MOE, 2, 20, marks=pytest.mark.slow),
    ],
)
def test_hits_chunks_and_preemption_change_no_token(
    make_model: Callable[..., Path],
    tmp_path: Path,
    model_type: str,
    settings: dict[str, Any],
    width: int,
    num_blocks: int,
) -> None:
    directory = make_model(model_type, **settings)
    with LLM(
        str(directory),
        shell="inprocess",
        tensor_parallel_size=width,
        block_size=4,
        num_blocks=num_blocks,
        max_num_batched_tokens=19,
        partial_reuse=True,
        event_log_dir=tmp_path,
    ) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        check(model_type, directory, together)
        # The shortest two, so that the pool holds all of the first when the second comes.
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS[:2]]
        assert [o.token_ids for o in alone] == [o.token_ids for o in together[:2]]
        assert alone[1].num_cached_tokens >= 16
        assert num_unused_blocks(llm) == num_blocks
    assert num_preemptions(tmp_path) > 0
