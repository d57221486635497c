import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.spec import DirectorySource
from rayserve_paged.model.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2: DirectorySource) -> FileTokenizer:
    return FileTokenizer(smollm2.directory)


def test_golden_prompts_have_the_golden_ids(
    tokenizer: FileTokenizer, golden: dict[str, Any]
) -> None:
    assert len(golden["cases"]) == 4
    for case in golden["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]


def test_digits_are_split_one_by_one(tokenizer: FileTokenizer) -> None:
    assert len(tokenizer.encode("12144")) == 5


def test_the_chat_template_gives_the_golden_prompt(
    tokenizer: FileTokenizer, golden: dict[str, Any]
) -> None:
    (case,) = (case for case in golden["cases"] if case["name"] == "short_chat")
    # The template itself adds the system message.
    messages = [{"role": "user", "content": "What is gravity?"}]
    assert tokenizer.apply_chat_template(messages) == case["prompt"]


def test_special_tokens_are_recognised_in_a_prompt_and_silent_in_an_output(
    tokenizer: FileTokenizer,
) -> None:
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2]) == ""
    assert tokenizer.vocab_size == 49152


def test_special_tokens_around_a_text_are_added_where_asked_for(
    smollm2: DirectorySource, tmp_path: Path
) -> None:
    settings = json.loads((smollm2.directory / "tokenizer.json").read_text())
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = FileTokenizer(tmp_path)
    text = tokenizer.encode("The")
    assert 1 not in text
    assert tokenizer.encode("The", add_special_tokens=True) == [1, *text]


def test_outputs_decode_as_the_library_decodes_them(
    tokenizer: FileTokenizer, smollm2: DirectorySource, golden: dict[str, Any]
) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(smollm2.directory / "tokenizer.json"))
    outputs = [case["output_ids"] for case in golden["cases"]]
    rng = random.Random(0)
    outputs += [[rng.randrange(49152) for _ in range(200)] for _ in range(20)]
    outputs.append(tokenizer.encode("naïve 北京 🌶 \n\t  x"))
    for output in outputs:
        assert tokenizer.decode(output) == library.decode(output, skip_special_tokens=True)


def test_a_tokenizer_with_byte_fallback_decodes_by_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "▁euro": 3, "s": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_tokens(["<tool>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.decode([0, 1, 2, 3, 4, 5]) == "€ euros<tool>"
    assert tokenizer.token_bytes(99) == b""


def test_a_missing_foreign_or_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(InvalidInputError, match=r"tokenizer\.json"):
        FileTokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(InvalidInputError, match="expected a tokenizer"):
        FileTokenizer(tmp_path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(InvalidInputError, match="ByteLevel or ByteFallback"):
        FileTokenizer(tmp_path)


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def templated(make_llama: Callable[..., Path]) -> Callable[[str], FileTokenizer]:
    def make(template: str) -> FileTokenizer:
        directory = make_llama()
        config = {"chat_template": template, "eos_token": {"content": "</s>"}}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return FileTokenizer(directory)

    return make


def test_a_template_sees_messages_tokens_and_the_generation_flag(
    templated: Callable[[str], FileTokenizer],
) -> None:
    tokenizer = templated(
        "{% for m in messages %}{{ m.role }}:{{ m | tojson }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    assert tokenizer.apply_chat_template(MESSAGES) == (
        'user:{"role": "user", "content": "hi"}</s>>'
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[0] + 1 }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_input_error(
    templated: Callable[[str], FileTokenizer], template: str
) -> None:
    with pytest.raises(InvalidInputError, match="messages="):
        templated(template).apply_chat_template(MESSAGES)


def test_b84_a_chat_with_empty_content_is_a_prompt_all_the_same(tokenizer: FileTokenizer) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": ""}])
    assert prompt.endswith("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer.encode(prompt)) > 0


@pytest.mark.parametrize("messages", [[], "hi", [{"role": "user"}], [{"role": 1, "content": ""}]])
def test_malformed_messages_are_refused(
    tokenizer: FileTokenizer, messages: list[dict[str, str]]
) -> None:
    with pytest.raises(InvalidInputError, match="messages="):
        tokenizer.apply_chat_template(messages)


def test_the_fingerprint_model_reads_and_writes_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model("fingerprint", tmp_path))
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.encode("né") == [0x6E, 0xC3, 0xA9]
    assert tokenizer.decode([0x6E, 0xC3, 0xA9, 999, 0xC3]) == "né<999>\ufffd"
    with pytest.raises(InvalidInputError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)
