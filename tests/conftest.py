"""Order of the suite, and property tests that draw the same cases on every run."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported,
# which model libraries do as well: before any test module.
if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Fast and fundamental first: the earlier a failure shows, the nearer it is to its cause.
_FOLDERS = ("core", "", "gpu_kernels", "model", "faults", "cluster", "e2e", "serve")

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
