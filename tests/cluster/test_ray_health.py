"""Liveness of ranks, with ranks that are coroutines."""

import asyncio
import time

from ray.exceptions import ActorDiedError

from rayserve_cluster.health import Loss, Ping, ask, find_cause, watch_rank

SYMPTOM = Loss("connection closed by peer", is_symptom=True)
CAUSE = Loss("ValueError: no such row", is_symptom=False)


async def well() -> Loss | None:
    return None


async def broken() -> Loss | None:
    return SYMPTOM


async def failed() -> Loss | None:
    return CAUSE


async def silent() -> Loss | None:
    await asyncio.Event().wait()
    raise AssertionError("nobody wakes it")


async def dead() -> Loss | None:
    raise ActorDiedError


def test_a_rank_that_answers_is_well() -> None:
    assert asyncio.run(ask(well, 5.0)) is None


def test_a_silent_rank_is_lost_after_its_patience() -> None:
    loss = asyncio.run(ask(silent, 0.05))
    assert loss == Loss("no answer for 0.05 s", is_symptom=False)


def test_a_dead_rank_is_lost_at_once() -> None:
    loss = asyncio.run(watch_rank(dead, 1000.0))
    assert loss.reason.startswith("its process is gone")
    assert not loss.is_symptom


def test_a_rank_is_watched_until_it_complains() -> None:
    answers = [None, SYMPTOM]

    async def ping() -> Loss | None:
        return answers.pop(0)

    assert asyncio.run(watch_rank(ping, 1000.0)) == SYMPTOM
    assert answers == []


def test_the_cause_is_the_rank_that_fails_and_not_those_that_notice() -> None:
    def cause(*pings: Ping) -> tuple[int, Loss] | None:
        return asyncio.run(find_cause(pings, 0.05))

    assert cause(broken, failed, well) == (1, CAUSE)
    assert cause(well, broken, silent) == (2, Loss("no answer for 0.05 s", is_symptom=False))
    assert cause(well, broken, well) is None


def test_time_that_the_asker_slept_through_is_not_held_against_a_rank() -> None:
    async def stalled_asker() -> Loss | None:
        async def slow() -> Loss | None:
            await asyncio.sleep(0.3)
            return None

        asking = asyncio.ensure_future(ask(slow, 0.5))
        await asyncio.sleep(0.01)
        time.sleep(1.0)  # The whole process stands still, as if stopped by a signal.
        return await asking

    assert asyncio.run(stalled_asker()) is None
