"""Steps of decoding at padded sizes: the logits and the pool of the steps themselves."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from driven_runner import BLOCK_SIZE, NUM_ROWS, Driven
from random_model import make_model

from rayserve_cluster.decode_graphs import padded_size
from rayserve_cluster.model_runner import ModelRunner
from rayserve_kernels.attention import TorchBackend
from rayserve_paged.model.build import StepModel, build_model
from rayserve_paged.model.fingerprint import FingerprintModel
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import SoloCollectives
from rayserve_paged.model.spec import FingerprintConfig

__all__ = ["make_model"]


def fingerprint() -> FingerprintModel:
    return FingerprintModel(FingerprintConfig(vocab_size=256), SoloCollectives(), TorchBackend())


def check_alike(model: StepModel, tolerance: float) -> ModelRunner:
    """Drive two runners through the same steps, and compare logits and blocks."""
    plain, graphed = (Driven(model, with_graphs=with_graphs) for with_graphs in (False, True))
    draw = np.random.default_rng(5)
    for row in range(NUM_ROWS):
        prompt = draw.integers(90, size=5 + 2 * row).tolist()
        for logits in zip(plain.start(row, prompt), graphed.start(row, prompt), strict=True):
            torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=tolerance)
    for num_rows in (1, 2, 6, 3, 5, 4, 6, 1, 2, 5):
        rows = draw.permutation(NUM_ROWS)[:num_rows].tolist()
        token_ids = draw.integers(90, size=num_rows).tolist()
        want, got = plain.decode(rows, token_ids), graphed.decode(rows, token_ids)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    held = graphed.pool.blocks[: plain.num_blocks]
    layout = plain.pool.layout
    torch.testing.assert_close(
        held.view(layout.dtype), plain.pool.blocks.view(layout.dtype), rtol=0, atol=tolerance
    )
    # What padding wrote lies in the last block.
    assert not (graphed.pool.blocks[-1].view(layout.dtype) == plain.pool.blocks[0, 0]).all()
    return graphed.runner


def test_padded_steps_of_the_fingerprint_model_are_exact() -> None:
    check_alike(fingerprint(), 0.0)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_padded_steps_of_a_transformer_give_its_logits(
    make_model: Callable[..., Path], tmp_path: Path, model_type: str
) -> None:
    settings = (
        {}
        if model_type == "llama"
        else {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    )
    source = resolve_model(str(make_model(model_type, **settings)), tmp_path)
    check_alike(build_model(source, "fp32", SoloCollectives(), TorchBackend()), 1e-5)


def test_there_is_one_graph_for_each_size_width_and_kind_of_masks() -> None:
    driven = Driven(fingerprint(), with_graphs=True)
    graphs = driven.runner._graphs
    assert graphs is not None
    for row in range(NUM_ROWS):
        driven.start(row, [1, 2, 3])
    # A prompt of several tokens is no step of decoding.
    assert graphs.num_graphs == 0
    driven.decode([0, 3], [5, 6])
    driven.decode([4, 1], [5, 6])
    assert graphs.num_graphs == 1
    driven.decode([2], [5])
    driven.decode([0, 1, 2], [5, 6, 7])
    assert graphs.num_graphs == 3
    # Its table is wider.
    for _ in range(2 * BLOCK_SIZE):
        driven.decode([2], [5])
    assert graphs.num_graphs == 5


def test_a_step_whose_logits_are_not_all_wanted_is_computed_as_it_is() -> None:
    driven = Driven(fingerprint(), with_graphs=True)
    graphs = driven.runner._graphs
    assert graphs is not None
    # A prompt of one token is a step of decoding in all but name.
    driven.start(0, [7])
    assert graphs.num_graphs == 1
    driven.start(1, [7, 8])
    assert graphs.num_graphs == 1


@pytest.mark.parametrize("most", [1, 6, 64, 1000])
def test_padding_is_less_than_a_fifth_and_sizes_are_few(most: int) -> None:
    sizes = [padded_size(num_seqs, most) for num_seqs in range(1, most + 1)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == most
    for num_seqs, size in enumerate(sizes, 1):
        assert num_seqs <= size <= most
        assert (size - num_seqs) / size < 1 / 5
    assert len(set(sizes)) <= 8 + 4 * max(0, most.bit_length() - 3)
