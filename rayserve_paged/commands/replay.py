"""`rayserve-paged replay`: event logs, live or simulated, in fresh state machines."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rayserve_paged.core.errors import InvalidInputError


def replay(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Event logs, or folders of them as event_log_dir names one."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per log.")] = False,
) -> None:
    """Feed event logs to fresh state machines, and say whether they answer what they answered.

    Ends with status 1 where one does not, after printing the first difference.
    """
    from rayserve_paged.core import replay as core_replay
    from rayserve_paged.event_files import log_files, read_log

    num_different = 0
    for path in [file for log in logs for file in log_files(log)]:
        try:
            result = core_replay.replay(read_log(path))
        except KeyError as error:
            accepted = f"an event log with the start of every machine (none of {error})"
            raise InvalidInputError("log", str(path), accepted) from error
        difference = result.difference
        num_different += difference is not None
        if as_json:
            row = {
                "log": str(path),
                "num_machines": result.num_machines,
                "num_events": result.num_events,
                "num_commands": result.num_commands,
                "is_identical": difference is None,
                "difference": None if difference is None else str(difference),
            }
            print(json.dumps(row))
        else:
            print(
                f"{path}: {result.num_events:,} events, {result.num_commands:,} commands: "
                + ("identical" if difference is None else f"DIFFERENT at {difference}")
            )
    if num_different:
        raise typer.Exit(1)
