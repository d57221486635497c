"""Checks that every cell of an experiment can be run, before any is."""

from collections.abc import Sequence

from rayserve_paged.core.errors import PagedError
from rayserve_paged.experiments.matrix import Cell
from rayserve_paged.experiments.simulated_cell import cluster_of, workload_of


def check_cells(cells: Sequence[Cell]) -> None:
    """Build what each cell needs, and throw it away.

    Raises:
        InvalidInputError: What cannot be had; a note names the cell.
    """
    seen: set[str] = set()
    for cell in cells:
        workload, cache = cell.config.workload, cell.config.cache
        # Its seed changes nothing that can be wrong, and a trace takes a second to read.
        kind = repr((workload, cache.block_size, cell.files))
        try:
            if cell.config.mode == "simulate":
                cluster_of(cell.config)
            if kind not in seen:
                seen.add(kind)
                workload_of(cell.config, cell.seed)
        except PagedError as error:
            error.add_note(f"in {cell.name}")
            raise
