"""Draws what block sizes do to a trace."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayserve_paged.sim.analysis import BlockSizeFigures


def draw(path: Path, title: str, figures: Sequence[BlockSizeFigures]) -> None:
    """Draw waste, table sizes and, where the trace has hash ids, hit rates by block size.

    Args:
        path: The file to write; its suffix names the format.
        title: Of the whole picture.
        figures: One per block size, in any order.

    Raises:
        OSError: The file cannot be written.
    """
    rows = sorted(figures, key=lambda row: row.block_size)
    has_hits = rows[0].block_hit_rate is not None
    # No pyplot: nothing global, and no window whatever the machine has.
    picture = Figure(figsize=(4.2 * (3 if has_hits else 2), 3.8), layout="constrained")
    picture.suptitle(title)
    panels = picture.subplots(1, 3 if has_hits else 2)
    sizes = [row.block_size for row in rows]

    shares = {"": [100 * row.internal_fragmentation_share for row in rows]}
    _panel(panels[0], "Wasted slots", "% of the allocated slots", sizes, shares)
    tables = {
        "longest": [float(row.max_table_blocks) for row in rows],
        "mean": [row.mean_table_blocks for row in rows],
    }
    # Twice the block is half the table: straight lines.
    panels[1].set_yscale("log")
    _panel(panels[1], "Block table", "blocks of a request", sizes, tables)
    if has_hits:
        hits = {
            "of tokens": [100 * (row.token_hit_rate or 0) for row in rows],
            "of blocks": [100 * (row.block_hit_rate or 0) for row in rows],
        }
        _panel(panels[2], "Prefix cache hits", "%", sizes, hits)
    picture.savefig(path, dpi=150)


def _panel(
    panel: Axes, title: str, unit: str, sizes: Sequence[int], lines: dict[str, list[float]]
) -> None:
    # The second line is dashed, since the two may lie on each other.
    for (name, values), style in zip(lines.items(), ("-", "--"), strict=False):
        panel.plot(sizes, values, style, marker="o", label=name)
    panel.set_title(title)
    panel.set_xlabel("slots per block")
    panel.set_ylabel(unit)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    if panel.get_yscale() == "linear":
        panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    if len(lines) > 1:
        panel.legend()
