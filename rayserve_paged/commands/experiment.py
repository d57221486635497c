"""`rayserve-paged experiment`: a matrix of runs, their tables, and a report with pictures."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.experiments.matrix import Cell, Experiment

_Config = Annotated[Path, typer.Argument(help="The experiment's YAML.", metavar="CONFIG")]
_Out = Annotated[
    Path | None,
    typer.Option(help="Folder for results and report; runs that ended there are not run again."),
]
_Trace = Annotated[
    Path | None, typer.Option(help="Serve this trace instead of the file's workload.")
]
_Mode = Annotated[str | None, typer.Option(help="simulate or live, whatever the file says.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="FIELD=VALUE, whatever the file says; several times for several."),
]
_Jobs = Annotated[
    int | None, typer.Option(help="Simulations at once; absent: as many as there are cores.")
]
_Check = Annotated[bool, typer.Option("--check", help="Check the file, and run nothing.")]


def experiment(
    config: _Config,
    out: _Out = None,
    trace: _Trace = None,
    mode: _Mode = None,
    settings: _Set = None,
    jobs: _Jobs = None,
    check: _Check = False,
) -> None:
    """Run every cell of an experiment's matrix, and draw what came of it."""
    _need("polars", "matplotlib", "jinja2", "yaml", "rich")
    from rayserve_paged.experiments.check import check_cells
    from rayserve_paged.experiments.matrix import read_experiment

    if jobs is not None and jobs < 1:
        raise InvalidInputError("--jobs", jobs, "at least 1")
    laid_out = read_experiment(config, _given(trace, mode, settings or []))
    check_cells(laid_out.cells)
    if check:
        print(f"{config}: {len(laid_out.cells)} runs, and each can be run")
        return
    if out is None:
        raise InvalidInputError("--out", None, "a folder for the results, or --check")
    _run(laid_out, out, jobs or len(os.sched_getaffinity(0)))


def _need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            accepted = "an installation of the extras `cli` and `experiments`"
            raise InvalidInputError(module, "not installed", accepted)


def _given(trace: Path | None, mode: str | None, settings: list[str]) -> Mapping[str, object]:
    import yaml

    given: dict[str, object] = {}
    for setting in settings:
        field, equals, text = setting.partition("=")
        if not equals:
            raise InvalidInputError("--set", setting, "FIELD=VALUE, such as batch.max_num_seqs=8")
        try:
            given[field] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InvalidInputError(f"--set {field}", text, "a value in YAML") from error
    if trace is not None:
        given |= {"workload.synthetic": None, "workload.trace": str(trace.absolute())}
    if mode is not None:
        given["mode"] = mode
    return given


def _run(laid_out: "Experiment", out: Path, jobs: int) -> None:
    from rayserve_paged.experiments.outcome import gather, write_outcome
    from rayserve_paged.experiments.runner import make_folder, run_cells, unfinished

    make_folder(out)
    todo = unfinished(laid_out.cells, out)
    num_kept = len({cell.digest for cell in laid_out.cells}) - len(todo)
    if num_kept:
        print(f"{num_kept} runs have results in {out}", file=sys.stderr)
    with _Bar(len(todo)) as bar:
        run_cells(todo, out, jobs, bar.advance)
    outcome = gather(laid_out, out)
    for path in write_outcome(outcome, out):
        print(path)


class _Bar:
    """Shows on stderr how many runs have ended."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (
            TextColumn("runs"),
            BarColumn(),
            MofNCompleteColumn(),
            Remaining(),
            "{task.fields[cell]}",
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not total)
        self._task = self._progress.add_task("runs", total=total, cell="")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, cell: "Cell") -> None:
        """Count a run that has ended."""
        self._progress.update(self._task, advance=1, cell=cell.name)
