"""What one tenant may use of a deployment: at once, and per minute."""

import dataclasses
import math
from typing import Final

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.field_checks import check_integer, check_number

MAX_PER_MINUTE: Final = 10**12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """Limits of one tenant, over all ingresses and replicas; None for no limit.

    A request carries the quota of its tenant, so the latest request brings the one that is in
    force.

    Args:
        max_concurrent_requests: Requests that were placed and have not ended.
        requests_per_minute: Requests placed. As many may come at once after a minute without any.
        tokens_per_minute: Prompt tokens and `max_tokens` of each sample, charged when a request is
            placed, whether or not it then has as many.
        block_share: Of the blocks that all live replicas have for requests, those that live
            requests of the tenant may come to need; above 0 and up to 1.

    Raises:
        InvalidInputError: A value is of another type or range.
    """

    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    block_share: float | None = None

    def __post_init__(self) -> None:
        """Check every limit."""
        for field in ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, field)
            if value is not None:
                accepted = f"an integer from 1 to {MAX_PER_MINUTE}, or None"
                check_integer(f"quota.{field}", value, accepted, 1, MAX_PER_MINUTE)
        share: object = self.block_share
        accepted = "a number above 0 and up to 1, or None"
        if share is not None and check_number("quota.block_share", share, accepted, 0.0, 1.0) == 0:
            raise InvalidInputError("quota.block_share", share, accepted)

    def num_blocks(self, num_usable_blocks: int) -> int:
        """Return the share of so many blocks, rounded down."""
        if self.block_share is None:
            return num_usable_blocks
        # Rounded first: 0.29 of 100 is a little less than 29 to a float.
        return math.floor(round(self.block_share * num_usable_blocks, 6))

    def most_output_tokens(self, num_prompt_tokens: int, num_rows: int) -> int | None:
        """Return the largest `max_tokens` that a minute's tokens allow; None for no limit."""
        if self.tokens_per_minute is None:
            return None
        return max(0, self.tokens_per_minute - num_prompt_tokens) // num_rows
