"""Runs the cells of an experiment: in processes, each once, however often it is interrupted.

A finished cell is a folder named by its digest, written at once. What has a folder is not run
again, so that a run which was killed goes on where it was, and changed settings run anew.
"""

import concurrent.futures
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rayserve_paged.core.errors import InvalidInputError, PagedError
from rayserve_paged.experiments.cell_result import save
from rayserve_paged.experiments.matrix import Cell
from rayserve_paged.experiments.simulated_cell import run_simulated

Progress = Callable[[Cell], None]


def cell_folder(out: Path, cell: Cell) -> Path:
    """Return where a cell's result is kept."""
    return out / "cells" / cell.digest


def unfinished(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """Return the cells that have no result yet, each digest once."""
    by_digest = {cell.digest: cell for cell in cells}
    return [cell for cell in by_digest.values() if not cell_folder(out, cell).exists()]


def run_cells(cells: Sequence[Cell], out: Path, jobs: int, on_finished: Progress) -> None:
    """Run cells and keep their results.

    Simulated ones run first, in processes of their own; live ones after them, one at a time, since
    they share this machine's clock.

    Args:
        cells: Without a result, as `unfinished` returns them.
        out: The experiment's folder.
        jobs: Processes, at least 1.
        on_finished: Called with each cell once its result is safe.

    Raises:
        PagedError: A cell cannot be run; a note names it. Those that ended before have results.
    """
    simulated = [cell for cell in cells if cell.config.mode == "simulate"]
    live = [cell for cell in cells if cell.config.mode == "live"]
    _run_in_processes(simulated, out, jobs, on_finished)
    for cell in live:
        _run_cell(cell, out)
        on_finished(cell)


def make_folder(out: Path) -> None:
    """Make an experiment's folder, and clear away what runs that were killed left half written.

    Raises:
        InvalidInputError: It cannot be made.
    """
    folder = out / "cells"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        accepted = f"a folder that can be made ({error.strerror})"
        raise InvalidInputError("--out", str(out), accepted) from error
    for draft in folder.glob(".draft-*"):
        shutil.rmtree(draft, ignore_errors=True)


def _run_in_processes(cells: Sequence[Cell], out: Path, jobs: int, on_finished: Progress) -> None:
    if not cells:
        return
    # Not forked: this process has threads.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        min(jobs, len(cells)), context, initializer=_end_with_parent
    )
    try:
        running = {pool.submit(_run_cell, cell, out): cell for cell in cells}
        for future in concurrent.futures.as_completed(running):
            future.result()
            on_finished(running[future])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_cell(cell: Cell, out: Path) -> None:
    try:
        if cell.config.mode == "live":
            # Loads torch, which no simulation needs.
            from rayserve_paged.experiments.live_cell import run_live

            result = run_live(cell.config, cell.seed)
        else:
            result = run_simulated(cell.config, cell.seed)
    except PagedError as error:
        error.add_note(f"in {cell.name}")
        raise
    save(result, cell_folder(out, cell))
