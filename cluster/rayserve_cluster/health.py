"""Liveness of ranks: a dead or silent rank is noticed without help from the tensor group."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ray.exceptions import RayError

PING_INTERVAL_S: Final = 0.5

_SLICES: Final = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """Why a rank is lost.

    Args:
        reason: For a person.
        is_symptom: The rank only sees its group broken: the cause may be another rank.
    """

    reason: str
    is_symptom: bool


Ping = Callable[[], Awaitable[Loss | None]]
"""Asks a rank, which answers from a thread of its own: None while all is well, else what broke.
Raises a RayError once the rank's process is gone."""


async def watch_rank(ping: Ping, liveness_s: float) -> Loss:
    """Ping one rank until it is lost.

    Args:
        ping: Asks the rank.
        liveness_s: Silence after which the rank counts as dead.
    """
    while True:
        loss = await ask(ping, liveness_s)
        if loss is not None:
            return loss
        await asyncio.sleep(PING_INTERVAL_S)


async def ask(ping: Ping, patience_s: float) -> Loss | None:
    """Ping one rank once; return why it is lost, or None where it is well."""
    answer = asyncio.ensure_future(ping())
    try:
        if await _silent(answer, patience_s):
            return Loss(f"no answer for {patience_s:g} s", is_symptom=False)
        return answer.result()
    except RayError as error:
        return Loss(f"its process is gone ({death_cause(error)})", is_symptom=False)
    finally:
        answer.cancel()


async def find_cause(pings: Sequence[Ping], patience_s: float) -> tuple[int, Loss] | None:
    """Look for the rank that broke a group whose other ranks only see the broken connections.

    Args:
        pings: Ask each rank.
        patience_s: How long each has to answer.

    Returns:
        A rank and why it is lost; None where every rank answers and none of them is to blame.
    """
    losses = await asyncio.gather(*(ask(ping, patience_s) for ping in pings))
    for rank, loss in enumerate(losses):
        if loss is not None and not loss.is_symptom:
            return rank, loss
    return None


async def _silent(answer: "asyncio.Future[Loss | None]", liveness_s: float) -> bool:
    """Wait for an answer for `liveness_s`, and say whether it stayed out.

    The wait is cut into slices, and a slice during which the asker itself slept through is not
    held against the rank: a controller that was stopped, or starved of its core, would find every
    rank silent otherwise.
    """
    clock = asyncio.get_running_loop().time
    slice_s = liveness_s / _SLICES
    slices_left = _SLICES
    while slices_left > 0:
        begin = clock()
        done, _ = await asyncio.wait({answer}, timeout=slice_s)
        if done:
            return False
        if clock() - begin < 2.0 * slice_s:
            slices_left -= 1
    return True


def death_cause(error: Exception) -> str:
    """Return the telling sentence of one of Ray's many-line errors about a dead actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor is dead because")]
    line = (causes or lines or [type(error).__name__])[0]
    return line.split(". ")[0].rstrip(".")
