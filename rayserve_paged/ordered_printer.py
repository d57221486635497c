"""Shows results in their order, while those that show them late hold nobody up."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

_T = TypeVar("_T")


class OrderedPrinter(Generic[_T]):
    """Shows numbered results, each as soon as it and all before it are there.

    In a thread of its own: whoever reads them may be slow, and whoever hands them over must not
    wait for that. A context manager, which is left once all that can be shown has been.

    Args:
        show: Called with one result after another, from number 0 on. What it raises is raised by
            the next `put`, or at the end.
    """

    def __init__(self, show: Callable[[_T], None]) -> None:
        self._show = show
        self._results: queue.SimpleQueue[tuple[int, _T] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)

    def put(self, number: int, result: _T) -> None:
        """Hand over a result, from any thread."""
        if self._error is not None:
            raise self._error
        self._results.put((number, result))

    def _run(self) -> None:
        early: dict[int, _T] = {}
        following = 0
        while (item := self._results.get()) is not None:
            number, result = item
            early[number] = result
            while following in early:
                try:
                    self._show(early.pop(following))
                except Exception as error:  # The thread's end: who hands over or waits raises it.
                    self._error = error
                    return
                following += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._results.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error
