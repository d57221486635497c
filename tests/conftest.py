"""Order of the suite, and property tests that draw the same cases on every run."""

import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Fast and fundamental first: the earlier a failure shows, the nearer it is to its cause.
_FOLDERS = ("core", "", "gpu_kernels", "model", "faults", "cluster", "e2e")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile(
    "no-shrinking",
    derandomize=True,
    deadline=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> Iterator[None]:
    """A shell that starts something in the background lets it ignore them, and its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[:-1]
    name = folder[0] if folder else ""
    return _FOLDERS.index(name) if name in _FOLDERS else len(_FOLDERS)
