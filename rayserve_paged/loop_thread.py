"""An asyncio loop in a thread of its own, used from other threads and from other loops."""

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

_T = TypeVar("_T")
_ItemT = TypeVar("_ItemT")
_LOOK_AGAIN_S: Final = 0.5


class LoopThread:
    """Runs an asyncio loop until `stop`.

    Args:
        name: Of the thread.
        stopped: Makes the error of what comes after `stop`, or is cut short by it.
    """

    def __init__(self, name: str, stopped: Callable[[], Exception]) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = stopped
        # Guards against a start behind the end of the loop, which nobody would ever answer.
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there and wait for its result.

        An interrupt here cancels it there and goes on as soon as it has ended; a second one does
        not wait for that.
        """
        return self.call_reporting(lambda _report: coroutine, lambda _item: None)

    def call_reporting(
        self,
        make: Callable[[Callable[[_ItemT], None]], Coroutine[Any, Any, _T]],
        take: Callable[[_ItemT], None],
    ) -> _T:
        """As `call`, of a coroutine that reports items on its way.

        Args:
            make: Makes it, given what takes its items there.
            take: Called with each item here, in the thread of the caller; what it raises is an
                interrupt.
        """
        items: queue.SimpleQueue[_ItemT | _End[_T]] = queue.SimpleQueue()
        relay = _Relay(make(items.put), items.put)
        try:
            self._start(relay)
            while not isinstance(item := _get(items), _End):
                take(item)
            return item.result(self._stopped)
        finally:
            if not relay.ended.is_set():
                self._cancel(relay)
                # An interrupt may have cost the item that came with it, so not from the queue.
                relay.ended.wait()

    async def iterate(self, generator: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
        """Run an asynchronous generator there and yield its items here, in the caller's loop.

        Items are not held back for a slow reader. Closing this generator closes the other one,
        and returns once that has ended.
        """
        here = asyncio.get_running_loop()
        items: asyncio.Queue[_T | _End[None]] = asyncio.Queue()

        def put(item: _T | _End[None]) -> None:
            here.call_soon_threadsafe(items.put_nowait, item)

        async def read() -> None:
            async with contextlib.aclosing(generator):
                async for item in generator:
                    put(item)

        relay = _Relay(read(), put)
        self._start(relay)
        ended = False
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
            ended = True
            item.result(self._stopped)
        finally:
            if not ended:
                self._cancel(relay)
                while not isinstance(await items.get(), _End):
                    pass

    def _start(self, relay: "_Relay[Any]") -> None:
        with self._lock:
            if not self._is_stopping:
                self._loop.call_soon_threadsafe(relay.start)
                return
        relay.drop()
        raise self._stopped()

    def _cancel(self, relay: "_Relay[Any]") -> None:
        try:
            self._loop.call_soon_threadsafe(relay.cancel)
        except RuntimeError:  # The loop is closed: it has ended, or never began.
            relay.drop()

    def stop(self) -> None:
        """End the loop and its thread. What still runs there is cancelled. Idempotent."""
        with self._lock:
            if not self._is_stopping:
                self._is_stopping = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _get(items: queue.SimpleQueue[_ItemT]) -> _ItemT:
    while True:
        # An interrupt between its last look and its wait would wait with this thread for ever.
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=_LOOK_AGAIN_S)


@dataclasses.dataclass(frozen=True, slots=True)
class _End(Generic[_T]):
    task: asyncio.Task[_T]

    def result(self, stopped: Callable[[], Exception]) -> _T:
        if self.task.cancelled():
            raise stopped()
        return self.task.result()


class _Relay(Generic[_T]):
    """Runs a coroutine as a task of the loop, and tells its end, whatever that is.

    Args:
        coroutine: To run.
        tell: Called in the loop with the end.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, _T], tell: Callable[[_End[_T]], None]
    ) -> None:
        self._coroutine = coroutine
        self._tell = tell
        self._task: asyncio.Task[_T] | None = None
        self.ended = threading.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._coroutine)
        # A callback, since a task that is cancelled before it began runs no `finally`.
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.drop()  # An interrupt came before its start.

    def drop(self) -> None:
        """End it where it does not run."""
        self._coroutine.close()
        self.ended.set()

    def _end(self, task: asyncio.Task[_T]) -> None:
        if not task.cancelled():
            task.exception()  # Looked at, even where nobody waits for the end any more.
        with contextlib.suppress(RuntimeError):  # The reader's loop is closed.
            self._tell(_End(task))
        self.ended.set()
