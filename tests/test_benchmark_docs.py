"""The figures in the document on benchmarks are those that the command prints."""

import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def test_the_roofline_in_the_document_is_what_the_command_prints() -> None:
    command = [sys.executable, "-m", "rayserve_kernels.bench", "--roofline"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("| batch, context"))
    rest = lines[first:]
    assert "\n".join(rest[: rest.index("")]) + "\n" == printed
