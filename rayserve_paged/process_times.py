"""Times and memory of this process, as the Linux kernel keeps them."""

import os
import resource
import time
from pathlib import Path


def seconds_since_start() -> float:
    """Return how long ago this process began, with a resolution of 10 ms."""
    stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    # Field 22; the second one, in parentheses, may hold anything.
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    num_resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(num_resident) * resource.getpagesize()
