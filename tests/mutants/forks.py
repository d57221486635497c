"""Forks of this process that try things which may fail, never end or take all memory."""

import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import IO

Tell = Callable[[bytes], None]

_FAILED = 1
_BROKEN = 2
_MAX_MEMORY_BYTES = 4 << 30


class HarnessError(Exception):
    """Faults cannot be tried."""


class Fork:
    """A fork of this process that runs tests, and tells which one it runs or what it found.

    Args:
        work: Returns whether all tests passed.
    """

    def __init__(self, work: Callable[[Tell], bool]) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._start = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            status = _BROKEN
            try:
                _limit()
                status = 0 if work(self._tell) else _FAILED
            except BaseException:
                self._tell(traceback.format_exc().encode())
            finally:
                os._exit(status)

    def _tell(self, message: bytes) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(message)
        self._file.flush()

    def end(self, status: int) -> tuple[str | None, bytes]:
        """Return which test failed, and what the fork, which has ended, told last.

        Raises:
            HarnessError: The fork could not run the tests.
        """
        with self._file as file:
            file.seek(0)
            told = file.read()
        code = os.waitstatus_to_exitcode(status)
        if code == _BROKEN:
            raise HarnessError(told.decode())
        if code == 0:
            return None, told
        ends = {-signal.SIGPROF: ", which does not end", _FAILED: ""}
        return told.decode() + ends.get(code, f", which ends the process with {code}"), told

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self._start


def _limit() -> None:
    """Run as tests do whose output nobody reads, and that take too much."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
