"""The command that compiles the native kernel ahead of the first rank."""

import shutil
from pathlib import Path

import pytest
from command_run import Run, refusal, run

from rayserve_kernels.native_build import COMPILERS, buildable_widths

__all__ = ["run"]


def test_the_kernel_is_compiled_once_and_its_path_printed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path))
    first = run("build-kernels")
    assert first.status == 0
    library = Path(first.out.strip())
    assert library.is_relative_to(tmp_path)
    made = library.stat().st_mtime_ns
    assert run("build-kernels").out == first.out
    assert library.stat().st_mtime_ns == made


@pytest.mark.slow
def test_it_is_compiled_for_every_instruction_set_of_the_processors_kind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path))
    made = run("build-kernels", "--every")
    assert made.status == 0
    names = [Path(line).name for line in made.out.split()]
    assert len(names) == len(buildable_widths())
    for width, name in zip(buildable_widths(), names, strict=True):
        assert name.startswith(f"paged_attention-{width}-")
    assert run("build-kernels").out.strip() in made.out.split()


def test_without_a_compiler_one_line_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    line = refusal(run("build-kernels"))
    assert line.startswith("no native attention, torch computes it instead: no C++ compiler")
