"""Event logs as files: one for each life of a replica or of the controller, in one folder."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.event_log import CONTROLLER, LogEntry, read_lines, to_line
from rayserve_paged.core.ids import Incarnation, ReplicaId


class EventFile:
    """Takes down the entries of one log, each at once, so that a killed process leaves them.

    Args:
        file: Where to write; closed by `close`.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, entry: LogEntry) -> None:
        """Write an entry; dropped once the file is closed."""
        if not self._file.closed:
            self._file.write(to_line(entry) + "\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def open_replica_log(folder: str, replica_id: ReplicaId, incarnation: Incarnation) -> EventFile:
    """Create the file of a replica's life: `r0.0.jsonl` in the folder, which is made.

    Raises:
        InvalidInputError: It is there already, or cannot be written.
    """
    file = _create(folder, f"{replica_id}.{incarnation}.jsonl")
    if file is None:
        accepted = f"a folder without {replica_id}.{incarnation}.jsonl, the log of another run"
        raise InvalidInputError("event_log_dir", folder, accepted)
    return EventFile(file)


def open_controller_log(folder: str) -> EventFile:
    """Create the file of a controller's life: `controller.0.jsonl`, or the first free number.

    Raises:
        InvalidInputError: It cannot be written.
    """
    files = (_create(folder, f"{CONTROLLER}.{number}.jsonl") for number in itertools.count())
    return EventFile(next(file for file in files if file is not None))


def _create(folder: str, name: str) -> TextIO | None:
    """Create a file, written line by line; None where there is one of this name."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        return (path / name).open("x", encoding="utf-8", buffering=1)
    except FileExistsError:
        return None
    except OSError as error:
        accepted = f"a folder that can be written ({error.strerror})"
        raise InvalidInputError("event_log_dir", folder, accepted) from error


def log_files(path: Path) -> list[Path]:
    """Return the logs that a path names: itself, or those in a folder, by name.

    Raises:
        InvalidInputError: There is no such path, or no log in it.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise InvalidInputError("log", str(path), "a folder with event logs (.jsonl)")
    return files


def read_log(path: Path) -> Iterator[LogEntry]:
    """Yield the entries of a file.

    Raises:
        InvalidInputError: It cannot be read, or is no event log.
    """
    try:
        with path.open(encoding="utf-8") as file:
            yield from read_lines(file)
    except OSError as error:
        raise InvalidInputError("log", str(path), f"a readable file ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        accepted = f"an event log ({type(error).__name__}: {error})"
        raise InvalidInputError("log", str(path), accepted) from error
