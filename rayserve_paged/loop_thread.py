"""An asyncio loop in a thread of its own, used from other threads and from other loops."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class LoopThread:
    """Runs an asyncio loop until `stop`.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there and wait for its result; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    async def iterate(self, generator: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
        """Run an asynchronous generator there and yield its items here, in the caller's loop.

        Items are not held back for a slow reader. Closing this generator closes the other one,
        and returns once that has ended.
        """
        here = asyncio.get_running_loop()
        items: asyncio.Queue[_T | _End] = asyncio.Queue()
        relay = _Relay(generator, here, items)
        self._loop.call_soon_threadsafe(relay.start)
        ended = False
        try:
            while True:
                item = await items.get()
                if isinstance(item, _End):
                    ended = True
                    if item.error is not None:
                        raise item.error
                    return
                yield item
        finally:
            if not ended:
                with contextlib.suppress(RuntimeError):  # The loop is closed, and the relay ended.
                    self._loop.call_soon_threadsafe(relay.cancel)
                while not isinstance(await items.get(), _End):
                    pass

    def stop(self) -> None:
        """End the loop and its thread. What still runs there is cancelled. Idempotent."""
        with contextlib.suppress(RuntimeError):  # The loop is closed already.
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class _Relay(Generic[_T]):
    """Runs a generator on one loop and hands its items to a queue of another."""

    def __init__(
        self,
        generator: AsyncGenerator[_T, None],
        there: asyncio.AbstractEventLoop,
        items: "asyncio.Queue[_T | _End]",
    ) -> None:
        self._generator = generator
        self._there = there
        self._items = items
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        # A callback, since a task that is cancelled before it began runs no `finally`.
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        async with contextlib.aclosing(self._generator) as generator:
            async for item in generator:
                self._there.call_soon_threadsafe(self._items.put_nowait, item)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = concurrent.futures.CancelledError() if task.cancelled() else task.exception()
        with contextlib.suppress(RuntimeError):  # The reader's loop is closed.
            self._there.call_soon_threadsafe(self._items.put_nowait, _End(error))
