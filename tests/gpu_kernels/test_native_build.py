"""The native kernel is built once, by whoever needs it first, and never missed."""

import concurrent.futures
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rayserve_kernels.attention import TorchBackend
from rayserve_kernels.native_build import COMPILERS, BuildError, build_library
from rayserve_kernels.native_cpu import NativeBackend, native_or_torch

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def make_compiler(tmp_path: Path) -> Callable[[str], str]:
    """Write a compiler that is a shell script; `"$REAL"` in it is the real one."""

    def make(body: str) -> str:
        path = tmp_path / "compiler"
        real = next(filter(None, map(shutil.which, COMPILERS)), "")
        path.write_text(f"#!/bin/sh\nREAL={real}\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


@needs_compiler
def test_many_who_want_the_library_at_once_compile_it_once(
    tmp_path: Path, make_compiler: Callable[[str], str]
) -> None:
    calls = tmp_path / "calls"
    compiler = make_compiler(f'[ "$1" = --version ] || echo >> {calls}\nexec "$REAL" "$@"')
    # Each opens the lock file anew, so that threads exclude each other as processes do.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build_library(tmp_path, "portable", (compiler,)), range(4)))
    assert len(set(built)) == 1
    assert calls.read_text() == "\n"
    assert [path.suffix for path in sorted(built[0].parent.iterdir())] == [".so", ".lock"]
    assert isinstance(NativeBackend(built[0], "portable"), NativeBackend)


@needs_compiler
def test_another_width_or_another_compiler_has_a_library_of_its_own(
    tmp_path: Path, make_compiler: Callable[[str], str]
) -> None:
    body = '[ "$1" = --version ] && echo {} && exit\nexec "$REAL" "$@"'
    paths = {build_library(tmp_path, "portable", (make_compiler(body.format(7)),))}
    paths.add(build_library(tmp_path, "portable", (make_compiler(body.format(8)),)))
    # The compiler is asked for AVX2; nothing of it runs.
    paths.add(build_library(tmp_path, "avx2", (make_compiler(body.format(8)),)))
    assert len(paths) == 3


@needs_compiler
def test_without_openmp_the_library_is_built_without_threads(
    tmp_path: Path, make_compiler: Callable[[str], str]
) -> None:
    compiler = make_compiler(
        'for flag; do [ "$flag" = -fopenmp ] && exit 1; done\nexec "$REAL" "$@"'
    )
    backend = native_or_torch(tmp_path, "portable", (compiler,))
    assert isinstance(backend, NativeBackend)


@pytest.mark.parametrize("body", ["echo 'no such option' >&2; exit 1", ": > /dev/full; exit 2"])
def test_a_compiler_that_fails_leaves_torch_and_one_line_in_the_log(
    tmp_path: Path,
    make_compiler: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    body: str,
) -> None:
    compiler = make_compiler(f'[ "$1" = --version ] && exit\n{body}')
    with caplog.at_level(logging.INFO):
        backends = [native_or_torch(tmp_path, "portable", (compiler,)) for _ in range(3)]
    assert {type(backend) for backend in backends} == {TorchBackend}
    (line,) = caplog.messages
    assert line.startswith(f"no native attention, torch computes it instead: {compiler}: ")
    assert "\n" not in line


def test_without_a_compiler_torch_attends_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = native_or_torch(tmp_path, None, ("no-such-compiler",))
    assert isinstance(backend, TorchBackend)
    assert caplog.messages == [
        "no native attention, torch computes it instead: no C++ compiler (no-such-compiler)"
    ]


@needs_compiler
def test_a_library_that_does_not_load_leaves_torch(
    tmp_path: Path, make_compiler: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    compiler = make_compiler('[ "$1" = --version ] && exit\nfor last; do :; done; echo > "$last"')
    assert isinstance(native_or_torch(tmp_path, "portable", (compiler,)), TorchBackend)
    assert len(caplog.messages) == 1


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "native").write_text("a file where the folder should be")
    with pytest.raises(BuildError, match="native"):
        build_library(tmp_path, "portable")


def test_an_import_runs_no_compiler() -> None:
    code = (
        "import sys\n"
        "sys.addaudithook(lambda event, args: event == 'subprocess.Popen' and sys.exit(args))\n"
        "import rayserve_kernels.native_cpu"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
