"""What the tests of the command share: a run of it in this process, and what it printed."""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rayserve_paged import cli

FINGERPRINT = ["generate", "--model", "fingerprint", "--shell", "inprocess", "--num-blocks", "64"]


@dataclasses.dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def run_main(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["rayserve-paged", *args])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        status = exit_info.value.code
        assert isinstance(status, int | None)
        captured = capfd.readouterr()
        return Ended(status or 0, captured.out, captured.err)

    return run_main


def refusal(ended: Ended) -> str:
    """The one line of a command that was refused."""
    assert ended.status == 2, ended
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    return line.removeprefix("rayserve-paged: ")
