"""Fault plans: what goes wrong in a run, where and when. They are data, and name what they touch:

    r0, r1, ...   the replicas
    c0, c1, ...   the consumers
    controller    the controller

All times are in seconds from the start of the run.
"""

from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayserve_paged.core.errors import InvalidInputError

_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Fault(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Spell(_Fault):
    """A fault that lasts for a while."""

    from_s: _Time
    until_s: _Time

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.until_s < self.from_s:
            raise ValueError(f"until_s={self.until_s:g} is before from_s={self.from_s:g}")
        return self

    def covers(self, now: float) -> bool:
        """Return whether a moment lies in it."""
        return self.from_s <= now < self.until_s


class KillReplica(_Fault):
    """The processes of a replica end, or hang."""

    kind: Literal["kill-replica"] = "kill-replica"
    at_s: _Time
    replica: str
    hangs: bool = False
    """They hang or are cut off instead: nothing is heard of them, and no connection breaks."""


class KillRank(_Fault):
    """A rank of a replica that is not its first ends: the step under way fails, none follows, and
    the first rank, which lives, says so.
    """

    kind: Literal["kill-rank"] = "kill-rank"
    at_s: _Time
    replica: str


class KillController(_Fault):
    """The controller's process ends, and one that knows nothing is started after a while."""

    kind: Literal["kill-controller"] = "kill-controller"
    at_s: _Time
    down_s: _Seconds


class DisturbMessages(_Spell):
    """Messages between two places are lost, come twice or come late, and so out of order."""

    kind: Literal["disturb-messages"] = "disturb-messages"
    ends: tuple[str, str] = ("any", "any")
    """Names, or any; in both directions."""
    lost: _Share = 0.0
    twice: _Share = 0.0
    late: _Share = 0.0
    late_s: _Seconds = 0.5
    """A late message, and the second of two, comes up to this much later."""

    def concerns(self, one: str, other: str) -> bool:
        """Return whether messages between two places are those that it disturbs."""
        first, second = self.ends
        return (_is(first, one) and _is(second, other)) or (_is(first, other) and _is(second, one))


class Partition(_Spell):
    """No message passes between some places and all others."""

    kind: Literal["partition"] = "partition"
    places: Annotated[tuple[str, ...], Field(min_length=1)]

    def parts(self, one: str, other: str) -> bool:
        """Return whether two places are on different sides."""
        return (one in self.places) != (other in self.places)


class SlowReplica(_Spell):
    """The steps of a replica take longer."""

    kind: Literal["slow-replica"] = "slow-replica"
    replica: str
    factor: Annotated[float, Field(ge=1, le=1e6)]


class PinBlocks(_Spell):
    """Prompts are pinned on a replica, which leaves fewer blocks for all others."""

    kind: Literal["pin-blocks"] = "pin-blocks"
    replica: str
    requests: Annotated[tuple[int, ...], Field(min_length=1)]
    """Whose prompts."""


class ResetCaches(_Fault):
    """All that was computed so far is not to be found any more."""

    kind: Literal["reset-caches"] = "reset-caches"
    at_s: _Time
    replica: str


class PoisonRequest(_Fault):
    """A step that samples a token of a request ends the processes of its replica."""

    kind: Literal["poison-request"] = "poison-request"
    request: Annotated[int, Field(ge=0)]
    output_index: Annotated[int, Field(ge=0)] = 0
    """The token that kills."""


ClusterFault = KillReplica | KillRank | KillController | DisturbMessages | Partition | SlowReplica
"""What happens to the machines and messages of a cluster, whatever it serves."""

Fault = ClusterFault | PinBlocks | ResetCaches | PoisonRequest


class FaultPlan(_Fault):
    """All that goes wrong in one run."""

    faults: tuple[Annotated[Fault, Field(discriminator="kind")], ...] = ()

    @property
    def end_s(self) -> float:
        """When the last of it is over, but for what a death has set off."""
        ends = [0.0]
        for fault in self.faults:
            match fault:
                case KillController():
                    ends.append(fault.at_s + fault.down_s)
                case KillReplica() | KillRank() | ResetCaches():
                    ends.append(fault.at_s)
                case PoisonRequest():
                    pass
                case _:
                    ends.append(fault.until_s)
        return max(ends)

    @property
    def disturbs_messages(self) -> bool:
        """Whether any of it is about messages."""
        return any(isinstance(one, DisturbMessages | Partition) for one in self.faults)

    def check_names(
        self, field: str, num_replicas: int, num_consumers: int, whose: str = ""
    ) -> None:
        """Check that all that it names is in a cluster.

        Args:
            field: Where the faults stand, for the error.
            num_replicas: Of the cluster.
            num_consumers: Of the cluster.
            whose: Which cluster that is, for the error.

        Raises:
            InvalidInputError: Something is not.
        """
        replicas = [f"r{index}" for index in range(num_replicas)]
        places = ["any", *replicas, *(f"c{i}" for i in range(num_consumers)), "controller"]
        for number, fault in enumerate(self.faults):
            named = {
                "replica": (getattr(fault, "replica", replicas[0]),),
                "places": getattr(fault, "places", ()),
                "ends": getattr(fault, "ends", ()),
            }
            for part, names in named.items():
                known = replicas if part == "replica" else places
                for name in names:
                    if name not in known:
                        accepted = f"one of {', '.join(known)}{whose}"
                        raise InvalidInputError(f"{field}.{number}.{part}", name, accepted)

    def without(self, left_out: Collection[int]) -> "FaultPlan":
        """Return the plan without some of its faults, given by their places in it."""
        return FaultPlan(
            faults=tuple(fault for place, fault in enumerate(self.faults) if place not in left_out)
        )


def _is(name: str, place: str) -> bool:
    return name in ("any", place)
