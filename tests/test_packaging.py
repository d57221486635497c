"""The distribution: what a wheel holds, what an import loads, what the constraints pin."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"rayserve_paged", "rayserve_kernels", "rayserve_cluster"}

COME_WITH = {"huggingface_hub": "transformers", "markupsafe": "jinja2", "pydantic_core": "pydantic"}
"""Packages that are part of what another one offers."""

LOADED_BY_IMPORT = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + "."):
    importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    _run(sys.executable, *build)
    (path,) = folder.iterdir()
    return path


def _run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    metadata = {top for top in tops if top.endswith(".dist-info")}
    assert tops - metadata == PACKAGES
    assert len(metadata) == 1
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    sources = (ROOT / "kernels" / "rayserve_kernels" / "native").iterdir()
    assert {f"rayserve_kernels/native/{source.name}" for source in sources} <= set(names)


def test_the_wheel_names_its_license_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert "rayserve-paged = rayserve_paged.cli:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Apache License" in texts["licenses/LICENSE"]


def test_every_package_that_is_imported_is_a_dependency() -> None:
    imported = set()
    for package in ("rayserve_paged", "kernels/rayserve_kernels", "cluster/rayserve_cluster"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    imported.add(node.module.partition(".")[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"]]
    for extra in extras.keys() - {"dev"}:
        named += extras[extra]
    declared = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in named}
    providers = importlib.metadata.packages_distributions()
    foreign = imported - set(sys.stdlib_module_names) - PACKAGES
    undeclared = set()
    for name in foreign:
        distributions = providers.get(name, [name])
        offered = {one.lower().replace("_", "-") for one in distributions} | {COME_WITH.get(name)}
        if declared.isdisjoint(offered):
            undeclared.add(name)
    assert undeclared == set()
    assert {"numpy", "torch", "ray", "psutil"} <= foreign


@pytest.mark.slow
def test_an_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = str(home / "bin" / "python")
    install = ["install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    _run(sys.executable, "-m", "pip", "--python", python, *install)
    # The dependencies come from this environment. A path in a .pth file is taken as it is: the
    # .pth file there that leads to the checkout is not followed.
    (site_packages,) = (home / "lib").glob("python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(elsewhere)}
    usage = _run(str(home / "bin" / "rayserve-paged"), "--help", cwd=elsewhere, env=clean)
    assert "generate" in usage
    code = "import {0}; print({0}.__file__)"
    for package in sorted(PACKAGES):
        origin = _run(python, "-c", code.format(package), cwd=elsewhere, env=clean)
        assert Path(origin.strip()).is_relative_to(site_packages)
    code = "from rayserve_paged import LLM, SamplingParams; print(SamplingParams().max_tokens)"
    assert _run(python, "-c", code, cwd=elsewhere, env=clean) == "16\n"


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("rayserve_paged.core", {"ray", "torch", "transformers", "triton", *PACKAGES}),
        ("rayserve_kernels", {"pydantic", "ray", "transformers", *PACKAGES}),
        ("rayserve_paged.model", {"ray", "rayserve_cluster"}),
        ("rayserve_paged.inprocess", {"ray"}),
    ],
)
def test_a_package_loads_nothing_from_above_it(package: str, unwanted: set[str]) -> None:
    loaded = set(_run(sys.executable, "-c", LOADED_BY_IMPORT, package).split())
    own = package.partition(".")[0]
    assert own in loaded
    assert loaded & (unwanted - {own}) == set()


def test_the_top_level_import_is_light_and_its_names_are_lazy() -> None:
    code = (
        "import sys, rayserve_paged\n"
        "assert not {'numpy', 'pydantic', 'ray', 'torch'} & sys.modules.keys()\n"
        "from rayserve_paged import SamplingParams\n"
        "assert SamplingParams.__module__ == 'rayserve_paged.core.sampling_params'\n"
        "assert not {'ray', 'torch'} & sys.modules.keys()\n"
    )
    _run(sys.executable, "-c", code)


def test_an_unknown_name_of_the_top_level_is_an_attribute_error() -> None:
    package = importlib.import_module("rayserve_paged")
    for name in ("Engine", "__path_to_nowhere__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(package, name)


def test_the_constraints_pin_exact_public_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    # No extras, which pip refuses in constraints, and no "+cpu", which only some builds satisfy.
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    names = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))
    assert {"numpy", "pydantic", "ray", "torch", "transformers", "triton"} <= set(names)
