"""What each tenant has in use, and what it has used of its rates.

A rate is a bucket that holds one minute's limit and leaks as much in a minute: a placement pours in
what it costs, and is refused where that would run over.

                        limit ---------------------------   runs over: refused
                              |  cost of this request   |
        used, before this one |#########################|   leaks limit / 60 s

Rates are counted by this life of the controller alone: one that was started anew begins with empty
buckets, while requests and blocks in use come back with the inventories.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

from rayserve_paged.core.errors import QuotaExceededError
from rayserve_paged.core.request import Request
from rayserve_paged.core.tenant_quota import TenantQuota

_MINUTE_S: Final = 60.0
_ROUNDING: Final = 0.01
"""Of one request or token: what floating-point time may be wrong by after `retry_after_s`."""
_FIRST_SWEEP: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class InUse:
    """What the live requests of a tenant take.

    Args:
        num_requests: How many they are.
        num_blocks: Blocks that they may come to need.
    """

    num_requests: int = 0
    num_blocks: int = 0


class _Rate:
    """One bucket. A changed limit changes how fast what is in it leaks from then on."""

    __slots__ = ("_at", "_limit", "_used")

    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self._used = 0.0
        self._at = now

    def leak(self, now: float, limit: int | None = None) -> float:
        """Return what is in it; the limit becomes another one, unless None."""
        self._used = max(0.0, self._used - (now - self._at) * self._limit / _MINUTE_S)
        self._at = now
        if limit is not None:
            self._limit = limit
        return self._used

    def wait_s(self, cost: int) -> float:
        """Return after how many seconds there is room, as of the last leak; 0 for at once."""
        excess = self._used + cost - self._limit
        return excess * _MINUTE_S / self._limit if excess > _ROUNDING else 0.0

    def pour(self, cost: int) -> None:
        """Add a cost."""
        self._used += cost


@dataclasses.dataclass(slots=True)
class _Book:
    """What is known of one tenant; rates by the names of their limits."""

    in_use: InUse = InUse()
    rates: dict[str, _Rate] = dataclasses.field(default_factory=dict)

    def is_blank(self, now: float) -> bool:
        return self.in_use == InUse() and all(rate.leak(now) == 0 for rate in self.rates.values())


class TenantBooks:
    """All tenants that have something in use or in their buckets, and few others."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}
        self._sweep_at = _FIRST_SWEEP

    @property
    def in_use(self) -> Mapping[str, InUse]:
        """What is in use, by tenant; nothing of those that have nothing."""
        return {
            tenant: book.in_use for tenant, book in self._books.items() if book.in_use != InUse()
        }

    def __len__(self) -> int:
        """Tenants that are in the books."""
        return len(self._books)

    def check(
        self, request: Request, num_blocks: int, num_usable_blocks: int, now: float
    ) -> QuotaExceededError | None:
        """Return what a request would exceed of its quota; None where it may be placed.

        An attempt after the first was let in before, and is not counted again.

        Args:
            request: With `max_tokens` set.
            num_blocks: That it may come to need.
            num_usable_blocks: That all live replicas have for requests.
            now: Seconds.
        """
        tenant, quota = request.tenant, request.quota
        if tenant is None or quota is None or request.attempt:
            return None
        book = self._books.get(tenant, _Book())
        used, limit = book.in_use.num_requests, quota.max_concurrent_requests
        if limit is not None and used + 1 > limit:
            return QuotaExceededError(tenant, "max_concurrent_requests", limit, used, 1, None)
        used, limit = book.in_use.num_blocks, quota.num_blocks(num_usable_blocks)
        if quota.block_share is not None and used + num_blocks > limit:
            return QuotaExceededError(tenant, "block_share", limit, used, num_blocks, None)
        refused = None
        for name, limit, asked in _costs(request, quota):
            rate = book.rates.get(name)
            if rate is None:
                continue
            used = math.ceil(rate.leak(now, limit) - _ROUNDING)
            wait_s = rate.wait_s(asked)
            # Of two that are exceeded, the one for which to wait longer.
            if wait_s > 0 and (refused is None or wait_s > (refused.retry_after_s or 0.0)):
                refused = QuotaExceededError(tenant, name, limit, used, asked, wait_s)
        return refused

    def charge(self, request: Request, now: float) -> None:
        """Count a request that was placed; an attempt after the first was counted before."""
        tenant, quota = request.tenant, request.quota
        if tenant is None or quota is None or request.attempt:
            return
        rates = self._book(tenant, now).rates
        for name, limit, asked in _costs(request, quota):
            rate = rates.get(name)
            if rate is None:
                rate = rates[name] = _Rate(limit, now)
            rate.leak(now, limit)
            rate.pour(asked)

    def enter(self, tenant: str | None, num_blocks: int, now: float) -> None:
        """Note a request that lives."""
        if tenant is not None:
            book = self._book(tenant, now)
            book.in_use = InUse(book.in_use.num_requests + 1, book.in_use.num_blocks + num_blocks)

    def leave(self, tenant: str | None, num_blocks: int) -> None:
        """Note the end of one that was entered, with the same number of blocks."""
        if tenant is None:
            return
        book = self._books[tenant]
        book.in_use = InUse(book.in_use.num_requests - 1, book.in_use.num_blocks - num_blocks)
        if book.in_use == InUse() and not book.rates:
            del self._books[tenant]

    def _book(self, tenant: str, now: float) -> _Book:
        book = self._books.get(tenant)
        if book is None:
            if len(self._books) >= self._sweep_at:
                # Names come from outside: those that are idle for a minute are forgotten.
                self._books = {t: b for t, b in self._books.items() if not b.is_blank(now)}
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._books))
            book = self._books[tenant] = _Book()
        return book


def _costs(request: Request, quota: TenantQuota) -> list[tuple[str, int, int]]:
    """Return what a request costs of each rate: name, limit per minute, cost."""
    costs = (
        ("requests_per_minute", quota.requests_per_minute, 1),
        ("tokens_per_minute", quota.tokens_per_minute, request.num_promised_tokens),
    )
    return [(name, limit, cost) for name, limit, cost in costs if limit is not None]
