"""What each tenant was served, per weight: the books of weighted-fair queueing."""

from collections.abc import Collection, Mapping

Tenant = str
"""Who is charged; "" for requests that name nobody."""

MAX_TENANTS_AHEAD = 256
"""So many tenants that are ahead of the others are remembered while they ask for nothing."""


class FairShare:
    """Counters of tokens served over weight, one for each tenant.

    A tenant that comes back after it asked for nothing starts where the least served of those
    that wait is: it is owed nothing for the time in between, and neither is a new one.

    Args:
        weights: Of tenants; 1 for those that are not named.
    """

    def __init__(self, weights: Mapping[Tenant, float]) -> None:
        self._weights = weights
        self._served: dict[Tenant, float] = {}
        # Where the last tenant to start stood before.
        self._level = 0.0
        self._sweep_at = 2 * MAX_TENANTS_AHEAD

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant: Tenant) -> float:
        """Return the tokens that a tenant was served, over its weight."""
        return self._served.get(tenant, self._level)

    def come_back(
        self, tenant: Tenant, waiting: Collection[Tenant], least_waiting: float | None
    ) -> None:
        """Note that a tenant of which nothing waited asks again.

        Args:
            tenant: Who.
            waiting: The tenants of whom something waits.
            least_waiting: What the least served of the waiting tenants was served; None where
                nobody waits.
        """
        level = self._level if least_waiting is None else least_waiting
        self._served[tenant] = max(self._served.get(tenant, level), level)
        if len(self._served) >= self._sweep_at:
            self._forget({*waiting, tenant}, level)

    def _forget(self, asking: Collection[Tenant], level: float) -> None:
        """Forget who asks for nothing and is not ahead of the level, or the least so."""
        served = self._served
        ahead = [name for name in served if name not in asking and served[name] > level]
        ahead.sort(key=served.__getitem__, reverse=True)
        kept = [*ahead[:MAX_TENANTS_AHEAD], *asking]
        self._served = {name: served[name] for name in kept}
        self._sweep_at = 2 * (MAX_TENANTS_AHEAD + len(kept))

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Note that a request starts, and all the tokens that it may take."""
        self._level = self.served(tenant)
        self._served[tenant] = self._level + num_tokens / self._weights.get(tenant, 1.0)

    def refund(self, tenant: Tenant, num_tokens: int) -> None:
        """Give back what a request was charged and did not take."""
        if tenant in self._served:
            self._served[tenant] -= num_tokens / self._weights.get(tenant, 1.0)
