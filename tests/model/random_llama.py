"""A directory with a random Llama of any shape, for tests of the model and of all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with a random Llama; keyword arguments go into its configuration."""

    def make(vocab_tokens: int | None = None, **settings: object) -> Path:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaForCausalLM

        values: dict[str, Any] = {
            "hidden_size": 48,
            "intermediate_size": 50,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "vocab_size": 101,
            "max_position_embeddings": 256,
            "eos_token_id": 5,
            "tie_word_embeddings": False,
            **settings,
        }
        config = LlamaConfig(**values)
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
        directory = tmp_path_factory.mktemp("llama")
        model.save_pretrained(directory)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[
            : vocab_tokens or values["vocab_size"]
        ]
        tokenizer = Tokenizer(
            models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    return make
