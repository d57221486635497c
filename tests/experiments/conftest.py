import subprocess
import sys
from pathlib import Path

import pytest
from small_experiment import write


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small experiment, which has been run."""
    folder = tmp_path_factory.mktemp("experiment")
    command = [sys.executable, "-m", "rayserve_paged.cli", "experiment", str(write(folder))]
    subprocess.run([*command, "--out", str(folder / "out")], check=True, capture_output=True)
    return folder / "out"
