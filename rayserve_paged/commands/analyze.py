"""`rayserve-paged analyze`: what the requests of a trace cost and share, by block size."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.sim.analysis import BlockSizeFigures

_Trace = Annotated[
    Path, typer.Argument(help="Mooncake's JSON lines, the CSV of Azure or of BurstGPT.")
]
_BlockSize = Annotated[str, typer.Option(help="Slots per block, several with commas.")]
_CacheBlocks = Annotated[
    int | None, typer.Option(help="Blocks that the cache holds, of each size; absent: no limit.")
]
_Policy = Annotated[
    str, typer.Option(help="What leaves a full cache: lru or value (uses over age).")
]
_SkipInvalid = Annotated[
    bool, typer.Option("--skip-invalid", help="Count rows that make no sense instead of ending.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Plot = Annotated[
    Path | None, typer.Option(help="Draw the figures into this file as well, .png or .svg.")
]


def analyze(
    trace: _Trace,
    block_size: _BlockSize = "8,16,32,64",
    cache_blocks: _CacheBlocks = None,
    policy: _Policy = "lru",
    skip_invalid: _SkipInvalid = False,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Count wasted slots, table sizes and prefix hits of a trace at several block sizes."""
    from rayserve_paged.sim.analysis import POLICIES, analyze_block_size
    from rayserve_paged.sim.workload import read_workload

    block_sizes = _block_sizes(block_size)
    if policy not in POLICIES:
        raise InvalidInputError("--policy", policy, " or ".join(POLICIES))
    if cache_blocks is not None and cache_blocks < 1:
        raise InvalidInputError("--cache-blocks", cache_blocks, "at least 1 block")
    if plot is not None:
        _check_plot(plot)
    workload = read_workload(trace, skip_invalid=skip_invalid)
    figures = [analyze_block_size(workload, size, cache_blocks, policy) for size in block_sizes]
    skipped = f", {workload.num_skipped} rows left out" if workload.num_skipped else ""
    title = f"{trace.name}: {len(workload.requests):,} requests{skipped}"
    if workload.trace_block_size is not None:
        limit = "no limit" if cache_blocks is None else f"{cache_blocks:,} blocks of each size"
        title += f"; cache: {policy}, {limit}"
    if plot is not None:
        _draw(plot, title, figures)
    if as_json:
        head = {
            "trace": str(trace),
            "num_requests": len(workload.requests),
            "num_skipped": workload.num_skipped,
            "policy": policy,
            "cache_blocks": cache_blocks,
        }
        rows = [dataclasses.asdict(figure) for figure in figures]
        print(json.dumps(head | {"block_sizes": rows}))
        return
    _print_table(title, figures)


def _block_sizes(text: str) -> list[int]:
    parts = text.split(",")
    # Nine digits: more would be no block, and int() has a limit of its own.
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InvalidInputError("--block-size", text, "whole numbers with commas: 8,16,32,64")
    return [int(part) for part in parts]


def _check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise InvalidInputError("--plot", str(path), "a file named .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        accepted = "matplotlib to be installed, which the extra `experiments` does"
        raise InvalidInputError("--plot", str(path), accepted)


def _draw(path: Path, title: str, figures: "list[BlockSizeFigures]") -> None:
    from rayserve_paged.trace_picture import draw

    try:
        draw(path, title, figures)
    except OSError as error:
        accepted = f"a file that can be written ({error.strerror})"
        raise InvalidInputError("--plot", str(path), accepted) from error


def _print_table(title: str, figures: "list[BlockSizeFigures]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    headings = ("block", "wasted slots", "share", "table", "longest", "block hits", "token hits")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in figures:
        table.add_row(
            str(row.block_size),
            f"{row.internal_fragmentation_slots:,}",
            f"{row.internal_fragmentation_share:.4f}",
            f"{row.mean_table_blocks:,.1f}",
            f"{row.max_table_blocks:,}",
            _rate(row.block_hit_rate),
            _rate(row.token_hit_rate),
        )
    Console().print(table)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.4f}"
