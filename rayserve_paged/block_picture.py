"""Pictures of block pools for a terminal."""

from collections import Counter
from typing import Final

from rich.text import Text

from rayserve_paged.core.accounting import Accounting

_STYLES: Final = {".": "dim", "#": "blue", "=": "bold green", "p": "magenta", "o": "yellow"}
_NAMES: Final = {".": "free", "#": "held", "=": "shared", "p": "pinned", "o": "cached"}


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
    counts = Counter(ledger.block_map)
    line = Text()
    for letter, name in _NAMES.items():
        line.append(f"{letter} ", _STYLES[letter]).append(f"{name} {counts[letter]}   ")
    line.rstrip()
    return line
