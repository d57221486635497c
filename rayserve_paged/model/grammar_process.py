"""The process in which grammars are tried before anyone else compiles them.

It reads a vocabulary and then grammars, pickled, from its parent, and writes for each what is
wrong with it. One that takes too long ends this process.
"""

import os
import pickle
import resource
import signal
import sys
import tempfile
from typing import BinaryIO, Final

from rayserve_paged.core.output_grammar import Grammar
from rayserve_paged.model.grammar_compiler import GrammarCompiler

MAX_COMPILE_S: Final = 1.0
"""CPU time that a grammar may take to compile, all states of it."""

_MAX_MEMORY: Final = 1 << 30
"""Bytes that may be taken beyond those after the start."""

_PAGE_BYTES: Final = resource.getpagesize()


def main() -> None:
    """Answer until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nothing that a library prints may get among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    compiler = GrammarCompiler(pickle.load(requests), is_lazy=False)
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * _PAGE_BYTES + _MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryFile() as notes:
        os.dup2(notes.fileno(), 2)
        _answer(compiler, requests, answers, notes)


def _answer(
    compiler: GrammarCompiler, requests: BinaryIO, answers: BinaryIO, notes: BinaryIO
) -> None:
    while True:
        try:
            grammar: Grammar = pickle.load(requests)
        except EOFError:
            return
        notes.seek(0)
        notes.truncate()
        # The signal ends the process; it counts the time of the process, not that on the wall.
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
        fault = None
        try:
            compiler.compile(grammar)
        except (ValueError, MemoryError) as error:
            fault = str(error) or "it takes too much memory"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if fault is None and grammar.strict:
            notes.seek(0)
            fault = _warning(notes.read().decode(errors="replace"))
        pickle.dump(fault, answers)
        answers.flush()


def _warning(text: str) -> str | None:
    """Return what the compiler says that it passes over; None where it enforces all."""
    _, found, rest = text.partition("Warning: ")
    return f"with strict, {rest.splitlines()[0]}" if found and rest else None
