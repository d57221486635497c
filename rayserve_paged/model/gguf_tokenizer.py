"""Builds Hugging Face tokenizer files from the vocabulary that a GGUF file carries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayserve_paged.core.errors import InvalidInputError

_CONTROL = 3
_USER_DEFINED = 4
"""Values of tokenizer.ggml.token_type; tokens of these types are matched before merging."""

_SPLITS_DIGITS = {"smollm": True, "gpt-2": False, "gpt2": False}
"""Pre-tokenizers of byte-level BPE that are known here, by tokenizer.ggml.pre."""


def write_tokenizer(setting: Callable[[str], Any], directory: Path, model_name: str) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        setting: Value of a metadata key of the GGUF file, or None.
        directory: Where to write.
        model_name: For the error.

    Raises:
        InvalidInputError: The file has a tokenizer of another kind, or none.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = setting("tokenizer.ggml.model"), setting("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _SPLITS_DIGITS:
        raise InvalidInputError(
            "model",
            model_name,
            f"a GGUF file with a byte-level BPE tokenizer ({', '.join(sorted(_SPLITS_DIGITS))}), "
            f"not {kind}/{pre}: give a Hugging Face directory instead",
        )
    tokens: list[str] = setting("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in setting("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # Without the digits' own split, "144" would be merged where the model was taught "1 4 4".
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if _SPLITS_DIGITS[pre]
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, setting("tokenizer.ggml.token_type"), strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": setting("llama.context_length"),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = setting(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if (template := setting("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
