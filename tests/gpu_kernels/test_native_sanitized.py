"""The native kernel under the address and undefined-behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rayserve_kernels import native_build
from rayserve_kernels.native_build import COMPILERS, WIDTH_FLAGS, Width

DRIVER = Path(__file__).with_name("native") / "driver.cpp"
SOURCES = Path(native_build.__file__).with_name("native")


def build(compiler: str, folder: Path, source: Path, *flags: str) -> subprocess.CompletedProcess:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *sanitizers]
    command += [*flags, f"-I{SOURCES}", str(source), "-o", str(folder / "driver")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_native_kernel_touches_no_memory_but_its_own(tmp_path: Path, width: Width) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    trial = tmp_path / "trial.cpp"
    trial.write_text("int main() {}\n")
    if build(compiler, tmp_path, trial, "-fopenmp").returncode:
        pytest.skip("no OpenMP, or no sanitizers")
    built = build(compiler, tmp_path, DRIVER, "-fopenmp", *WIDTH_FLAGS[width])
    assert (built.returncode, built.stderr) == (0, "")
    done = subprocess.run([tmp_path / "driver"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all right\n", "")
