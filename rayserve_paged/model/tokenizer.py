"""Text to token ids and back, and the chat template, without transformers."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, assert_never

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.model.json_files import read_json_object
from rayserve_paged.model.spec import DirectorySource, FingerprintSource, ModelSource


class Tokenizer(Protocol):
    """What a shell needs of a tokenizer."""

    vocab_size: int
    """Ids run from 0 to vocab_size - 1."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; special tokens are recognised where written out.

        Args:
            text: Any text.
            add_special_tokens: Put those around it that the model was taught to expect, such as a
                beginning-of-sequence token. A chat template writes them out itself.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in an output: none for a special token."""
        ...

    def grammar_bytes(self, token_id: int) -> bytes:
        """The same in an output that follows a grammar: none for what is no text either."""
        ...

    @property
    def spare_end_id(self) -> int | None:
        """An id that ends such an output where the model has none of its own."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an output: the tokens' bytes, where invalid ones become U+FFFD."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Prompt for the assistant's next message.

        Args:
            messages: With `role` and `content`.

        Raises:
            InvalidInputError: The model has no template, or it refuses the messages.
        """
        ...


class FileTokenizer:
    """The tokenizer of a Hugging Face directory.

    Args:
        directory: Holds tokenizer.json, and a chat template in tokenizer_config.json or in
            chat_template.jinja.

    Raises:
        InvalidInputError: No tokenizer.json, or one that does not decode by bytes.
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidInputError("model", str(directory), "a directory with a tokenizer.json")
        # The library raises no narrower class.
        try:
            text = path.read_text(encoding="utf-8")
            self._backend = Backend.from_str(text)
        except Exception as error:
            raise InvalidInputError("model", str(path), f"a tokenizer ({error})") from error
        decoders = _decoder_types(json.loads(text).get("decoder"))
        if not decoders & {"ByteLevel", "ByteFallback"}:
            accepted = "a tokenizer that decodes by ByteLevel or ByteFallback"
            raise InvalidInputError("model", str(path), accepted)
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._byte_of_char = _byte_of_char() if "ByteLevel" in decoders else {}
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._plain_ids = added.keys() - self._special_ids
        self._bytes: dict[int, bytes] = {}
        self._template = _ChatTemplate(directory)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """As `Tokenizer.encode`."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in an output: none for a special token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def grammar_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`."""
        return self.token_bytes(token_id)

    @property
    def spare_end_id(self) -> int | None:
        """None: a model of language has an end-of-sequence id."""
        return None

    def _compute_bytes(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if token_id in self._plain_ids:
            return token.encode()
        if self._byte_of_char:
            # As the library's own decoder: a token of other characters stands for itself.
            plain = any(char not in self._byte_of_char for char in token)
            return token.encode() if plain else bytes(self._byte_of_char[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an output: the tokens' bytes, where invalid ones become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """As `Tokenizer.apply_chat_template`."""
        return self._template.render(messages)


class ByteTokenizer:
    """The tokenizer of the fingerprint model: the bytes of a text are its ids.

    Args:
        vocab_size: At least 256. An id that is no byte reads as `<id>`.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The bytes of the text; there are no special tokens."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself, or the id in angle brackets."""
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def grammar_bytes(self, token_id: int) -> bytes:
        """The byte itself; nothing for an id that is no byte."""
        return bytes([token_id]) if token_id < 256 else b""

    @property
    def spare_end_id(self) -> int | None:
        """The first id that is no byte, where there is one."""
        return 256 if self.vocab_size > 256 else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an output: the tokens' bytes, where invalid ones become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Refuse: the model knows no roles."""
        raise InvalidInputError(
            "messages", list(messages), "a prompt: the model has no chat template"
        )


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that belongs to a model.

    Raises:
        InvalidInputError: The model's tokenizer is missing or of an unknown kind.
    """
    match source:
        case FingerprintSource():
            return ByteTokenizer(source.spec.vocab_size)
        case DirectorySource():
            return FileTokenizer(source.directory)
        case _:
            assert_never(source)


class _ChatTemplate:
    """The chat template of a directory, rendered in a sandbox since it came with the weights."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer_config.json"
        self._config = read_json_object(path) if path.is_file() else {}
        file = directory / "chat_template.jinja"
        template = file.read_text() if file.is_file() else self._config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        self._template: str | None = template

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._template is None:
            accepted = "a prompt: the model has no chat template"
            raise InvalidInputError("messages", list(messages), accepted)
        _check_messages(messages)
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        try:
            return environment.from_string(self._template).render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self._token("bos_token"),
                eos_token=self._token("eos_token"),
            )
        except (TemplateError, TypeError) as error:
            accepted = f"messages that the model's chat template takes ({error})"
            raise InvalidInputError("messages", list(messages), accepted) from error

    def _token(self, role: str) -> str:
        token = self._config.get(role) or ""
        # Older files hold the token's whole description.
        return token["content"] if isinstance(token, dict) else token


def _check_messages(messages: object) -> None:
    accepted = "a list of at least one {'role': TEXT, 'content': TEXT}"
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidInputError("messages", messages, accepted)
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise InvalidInputError("messages", messages, accepted)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {part["type"] for part in decoder["decoders"]}
    return {decoder["type"]}


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The printable characters by which byte-level tokenizers write bytes (as GPT-2 does)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
