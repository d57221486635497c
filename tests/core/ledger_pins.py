"""The pinned prefixes of the ledger machine, and that each is found at any time."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ledger_oracle import LedgerOracle
from ledger_requests import LedgerReplica

from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.block_identity import RequestScope
from rayserve_paged.core.errors import PinLimitError
from rayserve_paged.core.ids import BlockKey, PinId

PIN_IDS = (PinId("a"), PinId("b"))


class Pinned(NamedTuple):
    """What a pin was asked to keep, and how many tokens it keeps."""

    keys: list[BlockKey]
    num_tokens: int
    windows: tuple[AttentionWindow, ...]
    num_kept: int


class FollowedPins:
    """The pins of a replica, as its answers tell.

    Args:
        replica: Whose pins.
        oracle: Knows the keys of a prefix.
    """

    def __init__(self, replica: LedgerReplica, oracle: LedgerOracle) -> None:
        self._pins, self._kv, self._limits = replica.pins, replica.kv, replica.limits
        self._oracle = oracle
        self._pinned: dict[PinId, Pinned] = {}

    def pin_or_unpin(
        self, name: PinId, token_ids: Sequence[int], scope: RequestScope
    ) -> Literal["pin", "unpin"] | None:
        """Keep what is computed of a prefix, or let go of what was kept under this name.

        Returns:
            What came of it; None where nothing of the prefix is computed, or too many blocks are.
        """
        if name in self._pins.tables:
            self._pins.unpin(name)
            return "unpin"
        num_tokens = len(token_ids)
        keys = self._oracle.beam(token_ids, num_tokens, scope).keys
        windows = scope.windows(self._limits.layer_groups)
        num_pinned, num_held = self._pins.num_blocks, self._kv.pool.num_held
        try:
            num_kept = self._pins.pin(name, keys, num_tokens, windows)
        except PinLimitError as error:
            num_new = error.num_blocks
        else:
            assert num_kept <= num_tokens
            assert (name in self._pins.tables) == (num_kept > 0)
            if not num_kept:
                return None
            self._pinned[name] = Pinned(keys, num_tokens, windows, num_kept)
            return "pin"
        assert num_pinned + num_new > self._limits.max_pinned_blocks
        assert (self._pins.num_blocks, self._kv.pool.num_held) == (num_pinned, num_held)
        return None

    def check(self) -> None:
        """Look all of them up."""
        for name in self._pins.tables:
            keys, num_tokens, windows, num_kept = self._pinned[name]
            lengths = [len(self._kv.match(keys, num_tokens + more, windows)) for more in (0, 1)]
            assert max(lengths) * self._limits.block_size >= num_kept
