"""What a deployment shows of itself: maps of its replicas, and what has happened lately."""

import dataclasses

from rayserve_paged.core.holdings import BlockView
from rayserve_paged.core.ids import Incarnation, ReplicaId, Term


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened to a deployment.

    Args:
        sequence: Grows with each.
        ago_s: Seconds since.
        kind: In one or two words, such as "replica lost".
        text: What happened.
        tenant: Whose affair it is; "" where it is everybody's.
    """

    sequence: int
    ago_s: float
    kind: str
    text: str
    tenant: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaView:
    """One live replica.

    Args:
        replica_id: Its name.
        incarnation: Its life.
        blocks: Its map.
    """

    replica_id: ReplicaId
    incarnation: Incarnation
    blocks: BlockView


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterView:
    """A deployment at one moment.

    Args:
        term: Of its controller.
        replicas: Those that answer, ordered by name.
        events: The latest, the oldest first.
    """

    term: Term
    replicas: tuple[ReplicaView, ...]
    events: tuple[ClusterEvent, ...]
