"""A loop in a thread of its own: what is begun there ends, however its caller does."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

import pytest

from rayserve_paged.loop_thread import LoopThread


class StoppedError(Exception):
    """What these loops raise behind their end."""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test", StoppedError)
    yield loop
    loop.stop()


async def endless(ended: list[str], begun: Callable[[], object] = lambda: None) -> None:
    try:
        begun()
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.05)
        ended.append("ended")


def test_an_interrupt_goes_on_when_what_was_called_has_ended(loop: LoopThread) -> None:
    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        loop.call(endless(ended, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert ended == ["ended"]


def test_an_interrupt_that_comes_with_the_end_does_not_wait_for_another_one(
    loop: LoopThread,
) -> None:
    async def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def call_and_wait() -> None:
        loop.call(interrupt())
        signal.pause()  # Where the call was over before the interrupt came.

    for _ in range(200):
        with pytest.raises(KeyboardInterrupt):
            call_and_wait()


def test_what_takes_the_items_runs_in_the_callers_thread_and_may_call(loop: LoopThread) -> None:
    async def count(report: Callable[[int], None]) -> int:
        for number in range(3):
            report(number)
        return 3

    async def double(number: int) -> int:
        return 2 * number

    seen: list[tuple[int, int]] = []

    def take(number: int) -> None:
        seen.append((threading.get_ident(), loop.call(double(number))))

    assert loop.call_reporting(count, take) == 3
    assert seen == [(threading.get_ident(), 2 * number) for number in range(3)]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_whatever_the_taker_raises_ends_the_call_and_not_the_loop(
    loop: LoopThread, error: type[BaseException]
) -> None:
    ended: list[str] = []

    async def report_one(report: Callable[[int], None]) -> None:
        await endless(ended, lambda: report(1))

    def take(_number: int) -> None:
        raise error

    with pytest.raises(error):
        loop.call_reporting(report_one, take)
    assert ended == ["ended"]
    assert loop.call(asyncio.sleep(0, "still there")) == "still there"


def test_a_call_that_the_end_cuts_short_says_so() -> None:
    loop = LoopThread("test", StoppedError)
    ended: list[str] = []
    stopper = threading.Thread(target=loop.stop)
    with pytest.raises(StoppedError):
        loop.call(endless(ended, stopper.start))
    stopper.join()
    assert ended == ["ended"]


def test_behind_the_end_nothing_begins() -> None:
    loop = LoopThread("test", StoppedError)
    loop.stop()
    ended: list[str] = []
    with pytest.raises(StoppedError):
        loop.call(endless(ended))

    async def numbers() -> AsyncGenerator[int, None]:
        yield 1

    with pytest.raises(StoppedError):
        asyncio.run(anext(loop.iterate(numbers())))
    assert ended == []
