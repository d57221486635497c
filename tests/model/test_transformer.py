import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.config import Dtype
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.build import TORCH_DTYPES, build_model
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import SoloCollectives

MakeLlama = Callable[..., Path]
MakeGang = Callable[..., Any]

PROMPT = [(7 * place + place * place) % 97 for place in range(100)]


def gang_of(make_gang: MakeGang, directory: Path, world_size: int, block_size: int = 16) -> Any:  # noqa: ANN401
    source = resolve_model(str(directory), directory)
    return make_gang(
        lambda collectives: build_model(source, "fp32", collectives, TorchBackend()),
        world_size,
        block_size=block_size,
    )


def reference_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """fp32 [num_tokens, vocab_size] by transformers, whole model, eager, no cache."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def plain(make_llama: MakeLlama) -> Path:
    return make_llama()


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_logits_equal_those_of_transformers_at_every_width(
    make_llama: MakeLlama, make_gang: MakeGang, world_size: int
) -> None:
    directory = make_llama(attention_bias=True, mlp_bias=True)
    gang = gang_of(make_gang, directory, world_size, block_size=8)
    logits = gang.logits(PROMPT[:50], chunks=(20, 1))
    torch.testing.assert_close(
        logits, reference_logits(directory, PROMPT[:50])[-1], rtol=1e-5, atol=1e-5
    )


def test_several_sequences_in_one_batch_have_the_logits_of_each_alone(
    plain: Path, make_gang: MakeGang
) -> None:
    gang = gang_of(make_gang, plain, 1, block_size=8)
    prompts = [PROMPT[:33], PROMPT[5:6], PROMPT[10:26]]
    decoding = gang.start(PROMPT[:41])
    gang.step([(decoding, 40)])
    work = [(gang.start(prompt), len(prompt)) for prompt in prompts]
    logits = gang.step([*work[:2], (decoding, 1), *work[2:]])
    for row, token_ids in zip(
        logits, [prompts[0], prompts[1], PROMPT[:41], prompts[2]], strict=True
    ):
        torch.testing.assert_close(
            row, reference_logits(plain, token_ids)[-1], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("num_cached", [0, 16, 48, 96])
@pytest.mark.parametrize("chunk", [1, 16, 17, 52])
def test_b58_a_prompt_resumed_in_chunks_has_the_logits_of_one_shot(
    plain: Path, make_gang: MakeGang, num_cached: int, chunk: int
) -> None:
    gang = gang_of(make_gang, plain, 1, block_size=16)
    one_shot = gang.logits(PROMPT)
    sequence = gang.start(PROMPT)
    if num_cached:
        gang.step([(sequence, num_cached)])
    logits = one_shot
    while sequence.num_computed < 100:
        logits = gang.step([(sequence, min(chunk, 100 - sequence.num_computed))])[0]
    torch.testing.assert_close(logits, one_shot, rtol=0, atol=1e-5)
    assert logits.argmax() == one_shot.argmax()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "heads_held"),
    [(8, 2, [[2], [1, 1], [1] * 4, [1] * 8]), (12, 6, [[2, 2, 1, 1]])],
)
def test_b68_outputs_equal_those_of_one_rank_and_bytes_follow_the_heads(
    make_llama: MakeLlama,
    make_gang: MakeGang,
    num_heads: int,
    num_kv_heads: int,
    heads_held: list[list[int]],
) -> None:
    directory = make_llama(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    prompts = [PROMPT[:9], PROMPT[30:50]]
    expected = gang_of(make_gang, directory, 1).greedy(prompts, 6)
    head_bytes = 2 * 2 * 16 * 8 * 4
    for held in heads_held:
        gang = gang_of(make_gang, directory, len(held))
        assert gang.greedy(prompts, 6) == expected
        for model, num_held in zip(gang.models, held, strict=True):
            assert model.kv_layout(16).block_bytes == num_held * head_bytes


def test_b68_a_width_that_the_heads_do_not_allow_is_refused_before_weights_are_read(
    plain: Path,
) -> None:
    class FourRanks(SoloCollectives):
        world_size = 4

    source = resolve_model(str(plain), plain)
    with pytest.raises(InvalidInputError, match=r"tensor_parallel_size=4 .* 1, 2, 3, 6 for"):
        build_model(source, "fp32", FourRanks(), TorchBackend())


def test_tied_embeddings_serve_as_the_head(make_llama: MakeLlama, make_gang: MakeGang) -> None:
    directory = make_llama(tie_word_embeddings=True)
    expected = reference_logits(directory, PROMPT[:20])[-1]
    for width in (1, 2):
        logits = gang_of(make_gang, directory, width).logits(PROMPT[:20])
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_pad_the_vocabulary_never_appear(
    make_llama: MakeLlama, make_gang: MakeGang
) -> None:
    directory = make_llama(vocab_tokens=97)
    expected = reference_logits(directory, PROMPT[:20])[-1]
    for width in (1, 2):
        gang = gang_of(make_gang, directory, width)
        assert gang.models[0].spec.vocab_size == 97
        logits = gang.logits(PROMPT[:20])
        torch.testing.assert_close(logits, expected[:97], rtol=1e-5, atol=1e-5)


def test_scaled_rotary_embeddings_are_those_of_transformers(
    make_llama: MakeLlama, make_gang: MakeGang
) -> None:
    directory = make_llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    )
    logits = gang_of(make_gang, directory, 1).logits(PROMPT)
    torch.testing.assert_close(
        logits, reference_logits(directory, PROMPT)[-1], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.3), ("fp16", 0.04)])
def test_half_precision_stays_near_fp32(
    plain: Path, make_gang: MakeGang, dtype: Dtype, tolerance: float
) -> None:
    source = resolve_model(str(plain), plain)
    gang = make_gang(lambda c: build_model(source, dtype, c, TorchBackend()), 2)
    logits = gang.logits(PROMPT[:40])
    assert logits.dtype == torch.float32
    assert gang.pools[0].keys.dtype == TORCH_DTYPES[dtype]
    expected = reference_logits(plain, PROMPT[:40])[-1]
    assert float((logits - expected).abs().max()) < tolerance


def test_a_rank_may_hold_no_columns_and_no_vocabulary_rows(
    make_llama: MakeLlama, make_gang: MakeGang
) -> None:
    directory = make_llama(intermediate_size=2, vocab_size=2, eos_token_id=1)
    prompt = [0, 1, 1, 0, 1]
    logits = gang_of(make_gang, directory, 3).logits(prompt)
    expected = reference_logits(directory, prompt)[-1]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_step_without_logits_returns_no_rows(plain: Path, make_gang: MakeGang) -> None:
    gang = gang_of(make_gang, plain, 1)
    sequence = gang.start(PROMPT[:8])
    sequence.block_ids.append(3)
    batch = gang.batch([(sequence, 8)])
    object.__setattr__(batch, "logits_rows", torch.tensor([], dtype=torch.int64))
    logits = gang.models[0].forward(batch, gang.pools[0])
    assert logits.shape == (0, 101)


def test_a_missing_weight_is_named(make_llama: MakeLlama, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_llama()
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    source = resolve_model(str(directory), tmp_path)
    with pytest.raises(InvalidInputError, match=r"include model\.layers\.1\.mlp\.up_proj\.weight"):
        build_model(source, "fp32", SoloCollectives(), TorchBackend())


@pytest.mark.parametrize(
    ("setting", "value", "accepted"),
    [
        # With these a part of each weight would be read, and a part of the model would answer.
        ("intermediate_size", 40, r"gate_proj.weight of shape \(40, 48\), not \(50, 48\)"),
        ("vocab_size", 90, r"embed_tokens.weight of shape \(90, 48\), not \(101, 48\)"),
        ("num_attention_heads", 3, r"q_proj.weight of shape \(24, 48\), not \(48, 48\)"),
        ("hidden_size", 60, r"embed_tokens.weight of shape \(101, 60\), not \(101, 48\)"),
        ("num_hidden_layers", 3, r"weights include model\.layers\.2\."),
        ("mlp_bias", True, r"weights include model\.layers\.0\.mlp\.gate_proj\.bias"),
        ("hidden_act", "nonsense", r"that transformers takes \('nonsense'\)"),
        ("hidden_size", 64, "that transformers takes .* not a multiple"),
    ],
)
def test_weights_that_the_configuration_does_not_describe_are_refused(
    make_llama: MakeLlama,
    make_gang: MakeGang,
    setting: str,
    value: object,
    accepted: str,
) -> None:
    directory = make_llama()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    with pytest.raises(InvalidInputError, match=accepted):
        gang_of(make_gang, directory, 1)


def test_weights_split_over_files_are_found_through_the_index(
    make_llama: MakeLlama, make_gang: MakeGang
) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    directory = make_llama()
    expected = reference_logits(directory, PROMPT[:10])[-1]
    model = LlamaForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="40KB")
    assert (directory / "model.safetensors.index.json").is_file()
    logits = gang_of(make_gang, directory, 2).logits(PROMPT[:10])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
