"""All results of an experiment, and the files that are made of them."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from polars.exceptions import PolarsError

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.experiments.cell_result import CellResult, load
from rayserve_paged.experiments.matrix import Experiment
from rayserve_paged.experiments.runner import cell_folder
from rayserve_paged.experiments.summary import Figures, Point, figures_of, points_of, summary_text
from rayserve_paged.experiments.tables import CELLS, FILES, write_tables


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """An experiment whose cells have all ended.

    Args:
        experiment: The experiment.
        results: Of each cell.
        figures: Of each cell.
    """

    experiment: Experiment
    results: Sequence[CellResult]
    figures: Sequence[Figures]

    @cached_property
    def points(self) -> list[Point]:
        """The combinations of the axes, over their seeds."""
        return points_of(self.experiment, self.figures)


def gather(experiment: Experiment, out: Path) -> Outcome:
    """Read the results of all cells.

    Raises:
        InvalidInputError: One cannot be read.
    """
    results = []
    for cell in experiment.cells:
        folder = cell_folder(out, cell)
        try:
            results.append(load(folder))
        except (OSError, ValueError, KeyError, PolarsError) as error:
            accepted = f"a result as it was written ({error}); remove the folder to run it again"
            raise InvalidInputError("--out", str(folder), accepted) from error
    figures = [figures_of(result, experiment.slo) for result in results]
    return Outcome(experiment, results, figures)


def write_outcome(outcome: Outcome, out: Path) -> list[Path]:
    """Write the tables, the summary and the report.

    Returns:
        The files, the report last.

    Raises:
        InvalidInputError: One cannot be written.
    """
    from rayserve_paged.experiments.report.page import report_page

    write_tables(out, outcome.experiment, outcome.results, outcome.figures)
    texts = {
        "summary.json": summary_text(outcome.experiment, outcome.figures),
        "report.html": report_page(outcome),
    }
    for name, text in texts.items():
        _write(out / name, text)
    return [out / name for name in (*FILES.values(), CELLS, *texts)]


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        accepted = f"a file that can be written ({error.strerror})"
        raise InvalidInputError("--out", str(path), accepted) from error
