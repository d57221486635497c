"""How soon the blocks of a client that has left are free again, through Ray Serve.

A client reads some of its stream and closes its connection, again and again, while others read
theirs. The replica's event log, replayed, tells when it held no block of that request any more.
"""

import dataclasses
import multiprocessing
import random
import secrets
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rayserve_paged.core.event_log import LogEntry, LoggedEvent, LoggedStart, ReplicaStart
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.replay import new_replica
from rayserve_paged.core.replica import Replica
from rayserve_paged.core.replica_messages import (
    AssignRequest,
    ControllerMessage,
    ReplicaEvent,
    StepFinished,
)
from rayserve_paged.core.sequence import SequenceState
from rayserve_paged.event_files import read_log
from rayserve_paged.experiments.http_client import keep_reading, request_bytes
from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.endpoint import ray_endpoint
from rayserve_paged.serve.serve_config import EndpointConfig

MAX_STEPS: Final = 2
MAX_FREE_S: Final = 0.05
"""Blocks are to be free within so many steps or so many seconds, whichever is longer."""

_MODEL: Final = "fingerprint"
_VOCAB_SIZE: Final = 1000
_MAX_TOKENS: Final = 2000
_READ_EVENTS: Final = 2
_TIMEOUT_S: Final = 60.0
_BETWEEN_S: Final = 0.2
"""From one departure to the next request, for the first to have its effect."""


@dataclasses.dataclass(frozen=True, slots=True)
class Departure:
    """One client that left, and what its replica did about it.

    Args:
        told_s: From the client's closing of its connection until the replica was told to cancel.
        free_s: Until the replica held no block of its request.
        num_steps: Steps that ended meanwhile.
    """

    told_s: float
    free_s: float
    num_steps: int

    @property
    def is_soon(self) -> bool:
        """Whether its blocks were free as soon as they are to be."""
        return self.free_s <= MAX_FREE_S or self.num_steps <= MAX_STEPS


def departures(num_streams: int, num_departures: int, seed: int = 0) -> list[Departure]:
    """Measure on a local Ray cluster.

    Args:
        num_streams: Streams of other clients that are read all the time.
        num_departures: Clients that leave, one after the other.
        seed: Of when they leave.

    Raises:
        DeploymentError: The endpoint cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="rayserve-paged-") as folder:
        flags = {
            "name": f"bench-{secrets.token_hex(3)}",
            "model.model": _MODEL,
            "cache.num_blocks": 64 * (num_streams + 2) * 3,
            "batch.max_num_seqs": num_streams + 2,
            "event_log_dir": folder,
            "serve.drain_timeout_s": 0.0,
        }
        config = load_config_as(EndpointConfig, flags=flags, environ={})
        with ray_endpoint(config, "127.0.0.1", 0, None) as url:
            host, _, port = url.removeprefix("http://").rpartition(":")
            # In a process of its own: what it reads is not to delay the client that leaves.
            others = multiprocessing.get_context("spawn").Process(
                target=keep_reading, args=(host, int(port), _bodies(num_streams)), daemon=True
            )
            others.start()
            try:
                left_at = _leave_again_and_again((host, int(port)), num_departures, seed)
            finally:
                others.terminate()
                others.join()
        found: dict[int, Departure] = {}
        for path in sorted(Path(folder).glob("r*.jsonl")):
            found |= take_down(read_log(path), left_at)
    return [found[number] for number in range(num_departures)]


def _bodies(num_streams: int) -> list[dict[str, object]]:
    return [_body([0, number]) for number in range(num_streams)]


def _body(prompt: Sequence[int]) -> dict[str, object]:
    return {
        "model": _MODEL,
        "prompt": list(prompt),
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }


def prompt_of(number: int) -> tuple[int, int]:
    """Return a prompt that no other client has."""
    return 1 + number // _VOCAB_SIZE, number % _VOCAB_SIZE


def _leave_again_and_again(address: tuple[str, int], number: int, seed: int) -> list[float]:
    """Return when each client closed its connection, on the clock of time.monotonic."""
    drawn = random.Random(seed)
    left_at = []
    for one in range(number):
        with socket.create_connection(address, _TIMEOUT_S) as connection:
            connection.sendall(request_bytes(address[0], _body(prompt_of(one))))
            read = b""
            while read.count(b"data: ") < _READ_EVENTS:
                data = connection.recv(1 << 16)
                assert data, f"a stream broke: {read!r}"
                read += data
            # At any time between two steps.
            time.sleep(drawn.random() * 0.02)
            left_at.append(time.monotonic())
        time.sleep(_BETWEEN_S)
    return left_at


def take_down(entries: Iterable[LogEntry], left_at: Sequence[float]) -> dict[int, Departure]:
    """Replay a replica's log, and look when it had done with each client that left.

    Args:
        entries: The log of one life of a replica.
        left_at: When each client left, by its number.

    Returns:
        Those that were served there, by their numbers.
    """
    numbers: dict[tuple[int, ...], int]
    numbers = {prompt_of(number): number for number in range(len(left_at))}
    found: dict[int, Departure] = {}
    replica: Replica | None = None
    watched: dict[int, _Watch] = {}
    for entry in entries:
        match entry:
            case LoggedStart(_, ReplicaStart() as start):
                replica = new_replica(start)
            case LoggedEvent(_, now, event):
                assert replica is not None, "a log begins with the start of its machine"
                assert isinstance(event, ReplicaEvent), "of a replica"
                replica.handle(event, now)
                if isinstance(event, ControllerMessage) and isinstance(event.event, AssignRequest):
                    request = event.event.request
                    number = numbers.get(tuple(request.prompt_token_ids))
                    if number is not None:
                        watched[number] = _Watch(request.request_id, left_at[number])
                for number, watch in list(watched.items()):
                    done = watch.look(replica, event, now)
                    if done is not None:
                        found[number] = done
                        del watched[number]
    return found


@dataclasses.dataclass(slots=True)
class _Watch:
    """A request whose client leaves, until its blocks are free."""

    request_id: RequestId
    left_at: float
    told_at: float | None = None
    num_steps: int = 0

    def look(self, replica: Replica, event: object, now: float) -> Departure | None:
        """Look at a replica after an event."""
        if now < self.left_at:
            return None
        self.num_steps += isinstance(event, StepFinished)
        batcher = replica.batcher
        if self.told_at is None and not any(map(self._is_it, batcher.running)):
            self.told_at = now
        if self.told_at is None or any(map(self._is_it, batcher.retiring)):
            return None
        return Departure(self.told_at - self.left_at, now - self.left_at, self.num_steps)

    def _is_it(self, sequence: SequenceState) -> bool:
        return sequence.request.request_id == self.request_id
