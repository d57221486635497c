"""Checks grammars before they are submitted, in a process that a bad one may cost."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Final

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.core.sampling_params import SamplingParams
from rayserve_paged.model.grammar_compiler import closing_ids, grammar_vocabulary
from rayserve_paged.model.tokenizer import Tokenizer

_MAX_VERDICTS: Final = 256
_COMMAND: Final = (
    "import sys; sys.path[:] = {path!r}; "
    "from rayserve_paged.model.grammar_process import main; main()"
)


class GrammarChecker:
    """Tells which grammars can be followed; its process starts with the first one, in seconds.

    All methods may be called from any thread, and block.

    Args:
        tokenizer: Of the model.
        vocab_size: Of the model.
        eos_token_ids: Of the model.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: list[bytes] = []
        self._process: subprocess.Popen[bytes] | None = None
        # What is wrong with each grammar, or None; the one asked for last at the end.
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    def checked(self, params: SamplingParams) -> SamplingParams:
        """Return parameters whose grammar can be followed to its end.

        Where neither model nor request has an id that ends an output, the tokenizer's spare one is
        added to `stop_token_ids`.

        Raises:
            InvalidInputError: Its grammar is none, takes too long to compile, or no id that adds
                nothing to the text may end the output.
        """
        grammar = params.grammar
        if grammar is None:
            return params
        with self._lock:
            fault = self._verdict(grammar)
        if fault is not None:
            raise InvalidInputError(grammar.field, grammar.text, f"one that compiles ({fault})")
        if closing_ids(params, self._eos_token_ids, self._vocabulary):
            return params
        spare = self._tokenizer.spare_end_id
        if params.allowed_token_ids is not None or params.ignore_eos or spare is None:
            field = "allowed_token_ids" if params.allowed_token_ids is not None else "ignore_eos"
            accepted = f"an id without text that ends the output, with a {grammar.field}"
            raise InvalidInputError(field, getattr(params, field), accepted)
        return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, spare))

    def close(self) -> None:
        """End the process. Idempotent; a later check starts another one."""
        with self._lock:
            self._end()

    def _verdict(self, grammar: Grammar) -> str | None:
        if grammar not in self._verdicts:
            self._verdicts[grammar] = self._try(grammar)
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(grammar)
        return self._verdicts[grammar]

    def _try(self, grammar: Grammar) -> str | None:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(grammar, process.stdin)
            process.stdin.flush()
            fault: str | None = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._end()
            return "it takes too much time or memory"
        return fault

    def _start(self) -> subprocess.Popen[bytes]:
        if not self._vocabulary:
            self._vocabulary = grammar_vocabulary(
                self._tokenizer, self._vocab_size, self._eos_token_ids
            )
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        # A process that ends at once is found by the first grammar.
        with contextlib.suppress(OSError):
            pickle.dump(self._vocabulary, process.stdin)
            process.stdin.flush()
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError):
            process.communicate()
