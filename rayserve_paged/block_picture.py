"""Pictures of block pools for a terminal."""

from typing import Final

from rich.text import Text

from rayserve_paged.core.accounting import Accounting

_STYLES: Final = {".": "dim", "#": "blue", "=": "bold green", "o": "yellow"}
_NAMES: Final = {".": "free", "#": "held", "=": "shared", "o": "cached"}


def block_picture(ledger: Accounting, width: int) -> Text:
    """Draw a pool: one letter per block, as in `Accounting.block_map`.

    Args:
        ledger: Of the pool.
        width: Letters in a line.
    """
    picture = Text()
    for begin in range(0, ledger.num_blocks, width):
        if begin:
            picture.append("\n")
        for letter in ledger.block_map[begin : begin + width]:
            picture.append(letter, _STYLES[letter])
    return picture


def legend(ledger: Accounting) -> Text:
    """Name the letters of a pool's picture, and count them."""
    shared = ledger.num_shared_blocks
    counts = {
        ".": ledger.num_free_blocks,
        "#": ledger.num_held_blocks - shared,
        "=": shared,
        "o": ledger.num_cached_blocks,
    }
    line = Text()
    for letter, count in counts.items():
        line.append(f"{letter} ", _STYLES[letter]).append(f"{_NAMES[letter]} {count}   ")
    line.rstrip()
    return line
