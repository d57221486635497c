"""The workload of a recorded run: its event logs, as `event_log_dir` or `simulate --log` left them.

A request arrives when the controller first took its submission in, counted from the first of all.
Its prompt is the recorded one, and its answer as long as the longest of its samples that replicas
delivered, over all attempts. A request that got no token is left out and counted.
"""

from collections.abc import Iterator
from pathlib import Path

from rayserve_paged.core.controller_messages import SubmitRequest
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.event_log import LogEntry, LoggedCommands, LoggedEvent
from rayserve_paged.core.ids import RequestId
from rayserve_paged.core.replica_messages import AnswerPoll
from rayserve_paged.core.request import Request
from rayserve_paged.core.stream_messages import StreamItem, TokenRun
from rayserve_paged.event_files import log_files, read_log
from rayserve_paged.sim.workload import TraceRequest, Workload

_FIRST_LINE_CHARS = 4096


def is_event_log(path: Path) -> bool:
    """Return whether a path is a folder, which only event logs come in, or one event log."""
    if path.is_dir():
        return True
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(_FIRST_LINE_CHARS).startswith('{"machine":')
    except OSError:
        return False  # Whoever reads it as a trace says why.


def read_recorded(path: Path) -> Workload:
    """Read a recorded run.

    Args:
        path: A folder with the logs of one run, or one file that holds all machines.

    Raises:
        InvalidInputError: It is no event log, or no request in it got a token.
    """
    arrivals: dict[RequestId, tuple[float, Request]] = {}
    lengths: dict[RequestId, int] = {}
    for file in log_files(path):
        for entry in read_log(file):
            match entry:
                case LoggedEvent(_machine, now, SubmitRequest(request)):
                    known = arrivals.get(request.request_id)
                    if known is None or now < known[0]:
                        arrivals[request.request_id] = (now, request)
                case _:
                    for request_id, length in _delivered(entry):
                        lengths[request_id] = max(length, lengths.get(request_id, 0))
    served = sorted(
        ((now, request) for now, request in arrivals.values() if lengths.get(request.request_id)),
        key=lambda arrival: arrival[0],
    )
    if not served:
        accepted = f"the logs of a run in which a request got a token ({len(arrivals)} did not)"
        raise InvalidInputError("trace", str(path), accepted)
    zero = served[0][0]
    requests = tuple(
        TraceRequest(
            (now - zero) * 1000,
            len(request.prompt_token_ids),
            lengths[request.request_id],
            token_ids=request.prompt_token_ids,
        )
        for now, request in served
    )
    return Workload(requests, None, len(arrivals) - len(served))


def _delivered(entry: LogEntry) -> Iterator[tuple[RequestId, int]]:
    """Yield how long streams are known to be from the deliveries among a machine's commands."""
    if not isinstance(entry, LoggedCommands):
        return
    for command in entry.commands:
        if not isinstance(command, AnswerPoll):
            continue
        for item in command.delivery.items:
            match item:
                case StreamItem(name, index, token_ids):
                    yield name.request_id, index + len(token_ids)
                case TokenRun(names, indices, token_ids):
                    for name, index in zip(names, indices.tolist(), strict=True):
                        yield name.request_id, index + len(token_ids)
