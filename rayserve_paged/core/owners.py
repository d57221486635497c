"""Who keeps a deployment: owners renew a lease, or leave; without any it ends.

    renewed                 + lease_s      ends, its owner having gone without a word
       last owner left      + farewell_s   ends, unless another has come by then

An endpoint has several owners, its ingress replicas, of which a change of the endpoint replaces one
after the other: the next one is to find what the last one has left.
"""

_NOBODY = ""


class Owners:
    """The owners of one deployment.

    Args:
        lease_s: An owner that does not renew for this long is gone; None where the deployment
            outlives them all.
        farewell_s: How long the deployment waits once the last one has left.
    """

    def __init__(self, lease_s: float | None, farewell_s: float) -> None:
        self._lease_s = lease_s
        self._farewell_s = farewell_s
        self._until: dict[str, float] = {}
        self._why = ""

    def watch(self, now: float) -> None:
        """Begin to count: whoever made the deployment has a lease to call in."""
        if self._lease_s is not None and not self._until:
            self._until[_NOBODY] = now + self._lease_s
            self._why = f"its owner has not renewed the lease for {self._lease_s:g} s"

    def renew(self, owner: str, now: float) -> None:
        """An owner is alive."""
        if self._lease_s is None:
            return
        self._until.pop(_NOBODY, None)
        self._until[owner] = now + self._lease_s
        self._why = f"its owner has not renewed the lease for {self._lease_s:g} s"

    def leave(self, owner: str, now: float) -> None:
        """An owner goes; unknown ones are ignored."""
        if self._until.pop(owner, None) is None or self._until:
            return
        self._until[_NOBODY] = now + self._farewell_s
        self._why = f"its last owner left {self._farewell_s:g} s ago"

    @property
    def lapses_at(self) -> float | None:
        """When the deployment ends if nobody calls: None for never, at once before `watch`."""
        if self._lease_s is None:
            return None
        return max(self._until.values(), default=float("-inf"))

    def lapsed(self, now: float) -> str | None:
        """Return why the deployment ends now; None where it goes on."""
        gone = [owner for owner, until in self._until.items() if until <= now]
        if len(gone) == len(self._until):
            return self._why if self._until else None
        for owner in gone:
            del self._until[owner]
        return None
