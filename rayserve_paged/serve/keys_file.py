"""The keys file: read, watched while an endpoint runs, and rewritten by one writer at a time."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

import yaml

from rayserve_paged.core.errors import InvalidInputError, in_one_line
from rayserve_paged.serve.tenants import KeysFile, Tenant, Tenants, parse_keys

LOOK_EVERY_S: Final = 1.0
_FIELD: Final = "serve.keys_file"

_Stamp = tuple[int, int, int, int]
"""Times of the last changes of content and of mode, in ns; size; inode."""

logger = logging.getLogger(__name__)


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def read_keys(path: Path) -> KeysFile:
    """Read a keys file, YAML or JSON.

    Raises:
        InvalidInputError: It cannot be read, or holds what is not accepted.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[KeysFile, _Stamp]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        accepted = f"a file that can be read ({error.strerror})"
        raise InvalidInputError(_FIELD, str(path), accepted) from error
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        _refuse_text(path, error)
    keys = parse_keys(content, str(path))
    if status.st_mode & 0o077:
        logger.warning(
            "%s can be read by others than its owner (mode %o): chmod 600 it",
            path,
            status.st_mode & 0o777,
        )
    return keys, _stamp(status)


def _refuse_text(path: Path, error: Exception) -> NoReturn:
    # Where it is, but not what is there: that may be a key.
    mark = getattr(error, "problem_mark", None)
    at = f", at line {mark.line + 1}" if mark is not None else ""
    raise InvalidInputError(_FIELD, str(path), f"valid YAML or JSON{at}") from None


class WatchedKeys:
    """The tenants of a keys file as it is now.

    A file that is broken or gone changes nothing: what it held before holds on.

    Args:
        path: The file; None where there are no keys.

    Raises:
        InvalidInputError: As `read_keys`.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp: _Stamp | None = None
        keys = None
        if path is not None:
            keys, self._stamp = _read(path)
        self._tenants = Tenants(keys)

    def authenticate(self, header: str | None) -> Tenant:
        """Return whose request it is; see `Tenants.authenticate`.

        Raises:
            HttpError: 401.
        """
        return self._tenants.authenticate(header)

    async def watch(self) -> None:
        """Look at the file once a second, in a thread, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> bool:
        """Read the file again where it has changed; return whether there is something new."""
        if self._path is None:
            return False
        stamp = None
        with contextlib.suppress(OSError):
            stamp = _stamp(self._path.stat())
        if stamp == self._stamp:
            return False
        try:
            keys, self._stamp = _read(self._path)
        except InvalidInputError as error:
            self._stamp = stamp  # Said once.
            logger.error("the keys of before hold on: %s", in_one_line(error))
            return False
        self._tenants = Tenants(keys)
        logger.info("%s has %d tenants now", self._path, len(keys.tenants))
        return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only writer of a file; others wait. A file beside it, ending in .lock, stays."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        accepted = f"a file beside which {lock.name} can be made ({error.strerror})"
        raise InvalidInputError("file", str(path), accepted) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_keys(path: Path, keys: KeysFile) -> None:
    """Replace a keys file as a whole: whoever reads has the old one or the new one.

    A new file is its owner's alone; one that was there keeps its mode. Comments are lost.
    """
    path = path.resolve()  # A link stays one.
    content = keys.model_dump(mode="json", exclude_defaults=True)
    if path.suffix == ".json":
        text = json.dumps(content, indent=2) + "\n"
    else:
        text = yaml.safe_dump(content, sort_keys=False)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
