"""Spares Python's collector of cycles what a simulation is built of."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def spared_by_collector() -> Iterator[None]:
    """Let the collector walk over nothing that is there now, as long as the context lasts.

    The pools of a cluster are lists with an entry for each block, and none of them is part of a
    cycle. Each full collection would walk over all of them, and there is one whenever the
    requests since the last have made enough of objects.
    """
    is_outermost = not gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if is_outermost:
            gc.unfreeze()
