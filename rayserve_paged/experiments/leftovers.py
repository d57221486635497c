"""What a deployment that has ended may have left on this machine: processes, segments."""

import dataclasses
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

import psutil

_PATIENCE_S: Final = 180.0
_LOOK_S: Final = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Stock:
    """What there was before.

    Args:
        children: Processes below this one.
        segments: Named shared-memory segments of this machine.
    """

    children: frozenset[int]
    segments: frozenset[str]


def take_stock() -> Stock:
    """Look at what there is."""
    children = psutil.Process().children(recursive=True)
    return Stock(frozenset(child.pid for child in children), shared_memory())


def shared_memory() -> frozenset[str]:
    """Return the named shared-memory segments of this machine."""
    folder = Path("/dev/shm")
    return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


def leftovers(before: Stock, pids: AbstractSet[int], *, owns_cluster: bool) -> str | None:
    """Wait until nothing is left; return what is left after three minutes, or None.

    Args:
        before: What there was before the deployment was started.
        pids: Its own processes.
        owns_cluster: Whether its cluster was started for it, and is to be gone as well.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        alive, segments = {pid for pid in pids if is_running(pid)}, frozenset[str]()
        if owns_cluster:
            now = take_stock()
            alive |= {pid for pid in now.children - before.children if is_running(pid)}
            segments = now.segments - before.segments
        if not alive and not segments:
            return None
        if time.monotonic() > deadline:
            return f"left behind: processes {sorted(alive)}, segments {sorted(segments)}"
        time.sleep(_LOOK_S)


def is_running(pid: int) -> bool:
    """Return whether a process runs, or is stopped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
