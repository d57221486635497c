"""Importing the core loads none of the heavy packages."""

import pkgutil
import subprocess
import sys

from rayserve_paged import core


def test_importing_every_module_of_the_core_loads_neither_torch_nor_ray() -> None:
    names = [f"{core.__name__}.{module.name}" for module in pkgutil.iter_modules(core.__path__)]
    assert f"{core.__name__}.batcher" in names
    program = f"import sys, {', '.join(names)}; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert not {"ray", "torch", "transformers", "triton"} & set(printed.stdout.split())
