"""What the replicas of one machine share: its cores and the bandwidth of its memory."""

from typing import Protocol


class SharesMachine(Protocol):
    """An executor whose steps take longer while others of the machine run theirs."""

    def pace(self) -> None:
        """Take in that more or fewer replicas run steps from now on."""
        ...


class Machine:
    """Knows which replicas of a machine run a step, and tells them when that changes."""

    def __init__(self) -> None:
        # In order of beginning, so that a run is the same run again.
        self._active: dict[SharesMachine, None] = {}

    @property
    def num_active(self) -> int:
        """Replicas that run a step now."""
        return len(self._active)

    def begin(self, executor: SharesMachine) -> None:
        """Take in that a replica runs steps from now on; nothing where it did."""
        if executor not in self._active:
            others = list(self._active)
            self._active[executor] = None
            for other in others:
                other.pace()

    def end(self, executor: SharesMachine) -> None:
        """Take in that a replica runs no step any more; nothing where it ran none."""
        if executor in self._active:
            del self._active[executor]
            for other in list(self._active):
                other.pace()
