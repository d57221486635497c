"""A Llama behind windows and sinks, against transformers with a dense mask in each layer."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from model_rank import drive
from replica_driver import make_request

from rayserve_kernels.attention import TorchBackend
from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.model.build import build_model
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.spec import DirectorySource

PROMPT = [(7 * place + place * place) % 97 for place in range(60)]


def dense_mask(num_tokens: int, window: AttentionWindow) -> torch.Tensor:
    """0 where a token may be seen and -inf elsewhere, [1, 1, num_tokens, num_tokens]."""
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    seen = key <= query
    if window.size is not None:
        seen = seen & ((query - key < window.size) | (key < window.num_sink_tokens))
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]


def masked_logits(
    directory: Path, token_ids: Sequence[int], windows: Sequence[AttentionWindow]
) -> torch.Tensor:
    """fp32 [num_tokens, vocab_size] by transformers, eager, no cache, a mask for each layer."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager")
    for layer, window in zip(model.model.layers, windows, strict=True):
        mask = dense_mask(len(token_ids), window)

        def use(
            _module: object,
            args: tuple[object, ...],
            kwargs: dict[str, object],
            mask: torch.Tensor = mask,
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            return args, kwargs | {"attention_mask": mask}

        layer.register_forward_pre_hook(use, with_kwargs=True)
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize(
    ("layer_windows", "window"),
    [
        (None, AttentionWindow(8)),
        (None, AttentionWindow(8, 4)),
        (None, AttentionWindow(1, 1)),
        ((AttentionWindow(6),) * 4, None),
        ((FULL_ATTENTION, AttentionWindow(6), AttentionWindow(6), FULL_ATTENTION), None),
        ((AttentionWindow(6), AttentionWindow(6), AttentionWindow(6), FULL_ATTENTION), None),
        (
            (FULL_ATTENTION, AttentionWindow(6), FULL_ATTENTION, AttentionWindow(20)),
            AttentionWindow(10, 3),
        ),
    ],
)
def test_a_llama_sees_what_its_windows_show_and_no_more(
    make_llama: Callable[..., Path],
    layer_windows: tuple[AttentionWindow, ...] | None,
    window: AttentionWindow | None,
    chunk: int,
) -> None:
    directory = make_llama(num_hidden_layers=4)
    source = resolve_model(str(directory), directory)
    assert isinstance(source, DirectorySource)
    spec = dataclasses.replace(source.spec, layer_windows=layer_windows)
    source = dataclasses.replace(source, spec=spec)
    model = build_model(source, "fp32", SoloCollectives(), TorchBackend())
    num_groups = len(spec.layer_groups)
    driver, rank = drive(model, 16 * num_groups, 8, max_num_batched_tokens=chunk)
    request = make_request(
        PROMPT,
        24,
        ignore_eos=True,
        window=None if window is None else window.size,
        num_sink_tokens=0 if window is None else window.num_sink_tokens,
    )
    (stream,) = driver.generate(request)
    windows = request.windows(layer_windows or (FULL_ATTENTION,) * 4)
    token_ids = [*PROMPT, *stream.token_ids[:-1]]
    logits = torch.cat(rank.logits)
    assert len(logits) == 24
    want = masked_logits(directory, token_ids, windows)[-24:]
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    full = masked_logits(directory, token_ids, (FULL_ATTENTION,) * 4)[-24:]
    assert (logits - full).abs().max() > 1e-2, "the windows hide nothing here"
