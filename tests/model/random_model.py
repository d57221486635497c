"""A directory with a random model of any family, for tests of the model and of all of it."""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayserve_paged.model.architectures import ARCHITECTURES

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "eos_token_id": 5,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def model_class(model_type: str) -> Any:  # noqa: ANN401
    """The class of transformers that runs a family."""
    architecture = ARCHITECTURES[model_type]
    package = f"transformers.models.{architecture.package}.modeling_{architecture.package}"
    return getattr(importlib.import_module(package), architecture.model_class)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with a random model; keyword arguments go into its configuration."""

    def make(model_type: str, vocab_tokens: int | None = None, **settings: object) -> Path:
        of_family = model_class(model_type)
        # A configuration completes the dictionaries that it is given.
        config = of_family.config_class(**copy.deepcopy(_SIZES | settings))
        torch.manual_seed(0)
        model = of_family(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
        directory = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(directory)
        _write_tokenizer(directory, vocab_tokens or config.vocab_size)
        return directory

    return make


@pytest.fixture(scope="session")
def make_llama(make_model: Callable[..., Path]) -> Callable[..., Path]:
    """A directory with a random Llama; keyword arguments go into its configuration."""

    def make(vocab_tokens: int | None = None, **settings: object) -> Path:
        return make_model("llama", vocab_tokens, **settings)

    return make


def _write_tokenizer(directory: Path, num_tokens: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:num_tokens]
    tokenizer = Tokenizer(
        models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
