"""A request that has not finished, as those who watch see it."""

import dataclasses
import enum


class RequestStage(enum.Enum):
    """How far a request has come."""

    QUEUED = "queued"
    """No replica has taken it, or the one that had is lost."""
    PREFILL = "prefill"
    """A replica has it, and nothing has come of it yet."""
    DECODE = "decode"
    """Tokens have come."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunningRequest:
    """A live request of one ingress.

    Args:
        request_id: Towards the deployment, as holders of blocks are called.
        name: Towards the user, who may have chosen it.
        tenant: Whose it is; "" for nobody's.
        replica: Where it is served; None where it is not.
        stage: How far it has come.
        num_prompt_tokens: Of its prompt.
        num_cached_tokens: Those of them that came from a prefix cache.
        num_output_tokens: Of all its samples so far.
        max_output_tokens: All its samples together may have; None where the model alone sets it.
        age_s: Seconds since it was submitted.
        num_recoveries: How often it went on elsewhere, or began anew.
    """

    request_id: str
    name: str
    tenant: str
    replica: str | None
    stage: RequestStage
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_output_tokens: int | None
    age_s: float
    num_recoveries: int
