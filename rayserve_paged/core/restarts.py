"""When a lost replica is started again, and as which incarnation."""

import dataclasses

from rayserve_paged.core.config import RecoveryConfig
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term

LIVES_PER_TERM = 1_000_000
"""Incarnations that one term may start. A controller that was started anew has forgotten how many
there were, so each term numbers its own above those of all before."""


@dataclasses.dataclass(slots=True)
class _Lives:
    """What is known of one replica's lives.

    Args:
        last: Highest incarnation seen.
        began: When it registered; None where it has not.
        num_short: Lives in a row that did not last.
        due: When the next one is to be started; None where that is not planned.
        starting_since: When it was started; None where none is starting.
    """

    last: Incarnation
    began: float | None = None
    num_short: int = 0
    due: float | None = None
    starting_since: float | None = None


class Restarts:
    """The lives of all replicas of a deployment.

    Args:
        config: Whether lost ones are started again, and after which pause; None for never.
        start_timeout_s: A life that has not registered after this long has failed to start.
        term: Of the controller.
    """

    def __init__(self, config: RecoveryConfig | None, start_timeout_s: float, term: Term) -> None:
        self._config = config if config is not None and config.restart else None
        self._start_timeout_s = start_timeout_s
        self._first = Incarnation(term * LIVES_PER_TERM)
        self._lives: dict[ReplicaId, _Lives] = {}
        # Those that are due or starting.
        self._pending: dict[ReplicaId, _Lives] = {}

    @property
    def is_hopeful(self) -> bool:
        """Whether a life is starting or will be started."""
        return bool(self._pending)

    def expects(self, replica_id: ReplicaId) -> bool:
        """Return whether a replica that does not live is starting or will be started."""
        return replica_id in self._pending

    def is_starting(self, replica_id: ReplicaId, incarnation: Incarnation) -> bool:
        """Return whether this life was started and has not registered."""
        lives = self._lives.get(replica_id)
        return lives is not None and lives.starting_since is not None and lives.last == incarnation

    def is_overtaken(self, replica_id: ReplicaId, incarnation: Incarnation) -> bool:
        """Return whether a later life than this one was started and has not registered."""
        lives = self._lives.get(replica_id)
        return lives is not None and lives.starting_since is not None and lives.last > incarnation

    def register(self, replica_id: ReplicaId, incarnation: Incarnation, now: float) -> None:
        """Note that a life has begun."""
        lives = self._lives.setdefault(replica_id, _Lives(incarnation))
        lives.last = incarnation
        lives.began = now
        lives.due = lives.starting_since = None
        self._pending.pop(replica_id, None)

    def lose(self, replica_id: ReplicaId, incarnation: Incarnation | None, now: float) -> None:
        """Note that a life has ended, or never began, and plan the next one.

        Args:
            replica_id: The replica.
            incarnation: The life; None where none is known.
            now: Seconds.
        """
        if incarnation is None:
            incarnation = Incarnation(self._first - 1)
        lives = self._lives.setdefault(replica_id, _Lives(incarnation))
        if incarnation < lives.last:
            return
        lives.last = incarnation
        config = self._config
        if config is None:
            return
        lasted = lives.began is not None and now - lives.began >= config.lasting_life_s
        num_short = 0 if lasted else lives.num_short
        pause_s = 0.0
        if num_short:
            # Bounded before it is raised to a power that no float holds.
            doublings = min(num_short - 1, 32)
            pause_s = min(config.max_restart_delay_s, config.restart_delay_s * 2.0**doublings)
        lives.num_short = num_short + 1
        lives.due = now + pause_s
        lives.began = lives.starting_since = None
        self._pending[replica_id] = lives

    def take_due(self, now: float) -> list[tuple[ReplicaId, Incarnation]]:
        """Return the lives that are to be started now."""
        started = []
        for replica_id, lives in self._pending.items():
            if lives.due is not None and lives.due <= now:
                lives.last = Incarnation(max(lives.last + 1, self._first))
                lives.due, lives.starting_since = None, now
                started.append((replica_id, lives.last))
        return started

    @property
    def starting(self) -> list[tuple[ReplicaId, Incarnation]]:
        """Lives that were started and have not registered."""
        return [
            (replica_id, lives.last)
            for replica_id, lives in self._pending.items()
            if lives.starting_since is not None
        ]

    def overdue(self, now: float) -> list[tuple[ReplicaId, Incarnation]]:
        """Return the lives that have taken too long to start."""
        return [
            (replica_id, lives.last)
            for replica_id, lives in self._pending.items()
            if lives.starting_since is not None
            and now - lives.starting_since >= self._start_timeout_s
        ]

    @property
    def next_tick(self) -> float | None:
        """When a life is to be started, or to be given up; None where none is."""
        times = [lives.due for lives in self._pending.values() if lives.due is not None]
        times += [
            lives.starting_since + self._start_timeout_s
            for lives in self._pending.values()
            if lives.starting_since is not None
        ]
        return min(times, default=None)
