"""Streams of events as they are written: what goes together, what ends, who has left."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from rayserve_paged.serve.event_stream import EventStream

NEVER = 3600.0


class Wire:
    """What is written, and a client that stays until it is told to leave."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.is_ended = False
        self.leaves = asyncio.Event()

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            if message["body"]:
                self.bodies.append(message["body"])
            self.is_ended = not message["more_body"]


def test_events_that_follow_closely_go_in_one_write_and_the_last_ones_are_not_held_back() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(100):
            yield b"%d " % number
            await asyncio.sleep(0)

    async def run() -> Wire:
        wire = Wire()
        # With a gap without end: whatever is not the first is written when all has come.
        await EventStream(b"first ", events(), lambda: NEVER)({}, wire.receive, wire.send)
        return wire

    wire = asyncio.run(run())
    assert b"".join(wire.bodies) == b"first " + b"".join(b"%d " % number for number in range(100))
    assert wire.bodies[0] == b"first "
    assert len(wire.bodies) <= 3
    assert wire.is_ended


def test_without_a_gap_each_event_that_comes_alone_is_written_alone() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            await asyncio.sleep(0.01)
            yield b"x"

    async def run() -> Wire:
        wire = Wire()
        await EventStream(b"x", events(), lambda: 0.0)({}, wire.receive, wire.send)
        return wire

    assert asyncio.run(run()).bodies == [b"x"] * 4


@pytest.mark.parametrize("gap_s", [0.0, NEVER])
def test_a_client_that_leaves_closes_what_is_sent(gap_s: float) -> None:
    async def run() -> tuple[Wire, bool]:
        wire, is_closed = Wire(), False

        async def events() -> AsyncGenerator[bytes, None]:
            nonlocal is_closed
            try:
                yield b"second"
                wire.leaves.set()
                await asyncio.Event().wait()
            finally:
                is_closed = True

        await EventStream(b"first", events(), lambda: gap_s)({}, wire.receive, wire.send)
        return wire, is_closed

    wire, is_closed = asyncio.run(run())
    assert is_closed
    assert not wire.is_ended


def test_what_breaks_a_stream_is_raised_and_does_not_end_it() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"second"
        raise ValueError("broken")

    async def run(wire: Wire) -> None:
        await EventStream(b"first", events(), lambda: 0.0)({}, wire.receive, wire.send)

    async def check() -> None:
        wire = Wire()
        with pytest.raises(ValueError, match="broken"):
            await run(wire)
        assert not wire.is_ended

    asyncio.run(check())
