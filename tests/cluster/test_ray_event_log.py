"""The event logs of a live deployment on Ray replay to the same commands in this process."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from ray_harness import deployment_config, prompts, read_all, request, tokens, wait_for

from rayserve_cluster.ray_shell import RayShell
from rayserve_paged import cli
from rayserve_paged.core.controller_messages import SubmitRequest
from rayserve_paged.core.event_log import LoggedEvent
from rayserve_paged.core.replay import replay
from rayserve_paged.core.replica_messages import CancelRequest, ControllerMessage, StepFinished
from rayserve_paged.event_files import log_files, read_log
from rayserve_paged.experiments.leftovers import is_running
from rayserve_paged.sim.recorded_workload import read_recorded

pytestmark = pytest.mark.ray


async def serve_and_cancel(shell: RayShell) -> int:
    """Serve several requests, one of which its reader gives up; return the tokens read."""
    long = request("given-up", [5, 6, 7], 4000, consumer="other")
    giving_up = asyncio.create_task(read_all(shell, [long], "other"))
    streams = await read_all(shell, [request(f"q{i}", p, 20) for i, p in enumerate(prompts(6))])
    giving_up.cancel()
    await asyncio.gather(giving_up, return_exceptions=True)
    return sum(len(tokens(updates)) for updates in streams)


def seen_by_replicas(folder: Path) -> set[type]:
    """The kinds of events that replicas have logged so far."""
    return {
        type(entry.event.event)
        for path in log_files(folder)
        for entry in read_log(path)
        if isinstance(entry, LoggedEvent) and isinstance(entry.event, ControllerMessage)
    }


def test_a_live_run_and_a_killed_replica_replay_command_for_command(
    cluster: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "logs"
    config = deployment_config("logged", replicas=2).model_copy(
        update={"event_log_dir": str(folder)}
    )
    shell = RayShell(config, cluster)
    try:
        assert asyncio.run(serve_and_cancel(shell)) == 120
        wait_for(lambda: CancelRequest in seen_by_replicas(folder), "the cancel is on its replica")
        victim = asyncio.run(shell.stats()).ranks[0]
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: not is_running(victim.pid), "the killed rank is gone")
    finally:
        shell.shutdown()
    logs = log_files(folder)
    assert [path.name for path in logs][:3] == ["controller.0.jsonl", "r0.0.jsonl", "r1.0.jsonl"]
    seen: set[type] = set()
    for path in logs:
        result = replay(read_log(path))
        assert result.difference is None, str(result.difference)
        assert result.num_machines == 1
        assert result.num_commands > 0
        events = [entry.event for entry in read_log(path) if isinstance(entry, LoggedEvent)]
        seen |= {type(e.event if isinstance(e, ControllerMessage) else e) for e in events}
    assert seen >= {CancelRequest, StepFinished, SubmitRequest}
    monkeypatch.setattr(sys, "argv", ["rayserve-paged", "replay", str(folder)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    out = capsys.readouterr().out
    assert out.count(": identical\n") == len(logs)

    # The same logs are a workload: what got tokens, as it was submitted.
    workload = read_recorded(folder)
    served = {(tuple(r.token_ids or ()), r.output_length) for r in workload.requests}
    assert served >= {(tuple(prompt), 20) for prompt in prompts(6)}
    assert len(workload.requests) + workload.num_skipped == 7
