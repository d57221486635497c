"""Builds the native kernels with the system's compiler, once per machine and compiler."""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import torch

logger = logging.getLogger(__name__)

Width = Literal["avx512_bf16", "avx512", "avx2", "portable"]

COMPILERS: Final = ("c++", "g++", "clang++")
_SOURCES: Final = Path(__file__).with_name("native")
_MAIN: Final = _SOURCES / "paged_attention.cpp"
# Contraction off: what is fused is written down in the source.
_FLAGS: Final = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
WIDTH_FLAGS: Final[dict[Width, tuple[str, ...]]] = {
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
# The threads are OpenMP's, since torch has its pool from there: another pool beside it would
# compete for the cores. Without it the kernel runs on the calling thread.
_THREADS: Final = "-fopenmp"
_BUILD_TIMEOUT_S: Final = 300


class BuildError(Exception):
    """The kernels could not be built; the message is one line."""


def widest() -> Width:
    """Widest instruction set of this processor that the kernels are built for."""
    known: dict[str, Width] = {"AVX512": "avx512", "AVX2": "avx2"}
    width = known.get(torch.backends.cpu.get_cpu_capability(), "portable")
    # torch 2.11 cannot tell.
    capabilities: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    if width == "avx512" and capabilities().get("avx512_bf16"):
        return "avx512_bf16"
    return width


def available_widths() -> tuple[Width, ...]:
    """Instruction sets that this processor has, the widest first."""
    widths: tuple[Width, ...] = typing.get_args(Width)
    return widths[widths.index(widest()) :]


def buildable_widths() -> tuple[Width, ...]:
    """Instruction sets that a compiler for processors of this kind knows, whether this one has them
    or not.
    """
    widths: tuple[Width, ...] = typing.get_args(Width)
    return widths if platform.machine() in ("x86_64", "AMD64") else ("portable",)


def build_library(cache_dir: Path, width: Width, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """Build the shared library unless the cache holds it, and return where it lies.

    Its name tells the sources, the compiler and the flags, so that a file that is there is right.
    Processes that want it at the same time wait for the first of them.

    Args:
        cache_dir: Created if need be; the library goes to `native` in it.
        width: Instruction set.
        compilers: Names or paths; the first that exists is taken.

    Raises:
        BuildError: No compiler, it fails, or the cache cannot be written.
    """
    compiler = _find(compilers)
    flags = (*_FLAGS, *WIDTH_FLAGS[width])
    name = f"paged_attention-{width}-{_digest(compiler, flags)}.so"
    folder = cache_dir / "native"
    library = folder / name
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(compiler, flags, library)
    except OSError as error:
        raise BuildError(f"{folder}: {error}") from error
    return library


def compiler_version(compilers: tuple[str, ...] = COMPILERS) -> str:
    """First line of what the compiler says of itself.

    Raises:
        BuildError: No compiler, or it fails.
    """
    return _run(_find(compilers), "--version").partition("\n")[0]


def _find(compilers: tuple[str, ...]) -> str:
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(compilers)})")
    return compiler


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    digest.update("\n".join((compiler, _run(compiler, "--version"), *flags)).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = str(Path(folder) / library.name)
        try:
            _run(compiler, *flags, _THREADS, str(_MAIN), "-o", made)
        except BuildError as error:
            _run(compiler, *flags, str(_MAIN), "-o", made)
            logger.warning("no OpenMP, native attention runs on one thread: %s", error)
        # Others see the whole file or none.
        os.replace(made, library)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_BUILD_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines() or [f"exit status {error.returncode}"]
        raise BuildError(f"{command[0]}: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    return done.stdout
