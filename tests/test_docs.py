"""What the documents say about the tests is true."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
KNOWN_FAULTS = ROOT / "docs" / "known-faults.md"


def _named_tests(markdown: str) -> list[str]:
    return re.findall(r"`(tests/[^`\s]+\.py::[^`\s]+)`", markdown)


def _dangling(names: list[str], root: Path) -> list[str]:
    return [name for name in names if not _exists(name, root)]


def _exists(name: str, root: Path) -> bool:
    path, *parts = name.partition("[")[0].split("::")
    if not (root / path).is_file():
        return False
    body: list[ast.stmt] = ast.parse((root / path).read_text(encoding="utf-8")).body
    for part in parts:
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _rows(markdown: str) -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| (B\d+) \| (.*?) \| (.*?) \|$", markdown, flags=re.MULTILINE)
    return [(identity, title, held) for identity, title, held in rows]


def test_every_test_that_the_known_faults_name_exists() -> None:
    names = _named_tests(KNOWN_FAULTS.read_text(encoding="utf-8"))
    assert _dangling(names, ROOT) == []


def test_every_test_that_carries_an_id_is_listed_under_it() -> None:
    held = {identity: held for identity, _, held in _rows(KNOWN_FAULTS.read_text("utf-8"))}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for name, number in re.findall(
            r"^(?:async )?def (test_b(\d+)[a-z]?_\w+)", source, re.MULTILINE
        ):
            listed = held[f"B{int(number):02}"]
            assert f"`{path.relative_to(ROOT).as_posix()}::{name}`" in listed, name


def test_a_test_that_does_not_exist_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "def test_one(): ...\nclass TestGroup:\n    async def test_two(self): ...\n"
    )
    markdown = """
    | B01 | x | `tests/test_a.py::test_one`, `tests/test_a.py::test_none` |
    | B02 | x | `tests/test_a.py::TestGroup::test_two[8-cold]` |
    | B03 | x | `tests/test_a.py::TestGroup::test_one` `tests/test_b.py::test_one` |
    """
    assert _dangling(_named_tests(markdown), tmp_path) == [
        "tests/test_a.py::test_none",
        "tests/test_a.py::TestGroup::test_one",
        "tests/test_b.py::test_one",
    ]


def test_every_known_fault_is_listed_once_with_a_test_or_a_reason() -> None:
    rows = _rows(KNOWN_FAULTS.read_text(encoding="utf-8"))
    identities = [identity for identity, _, _ in rows]
    assert identities == sorted(set(identities), key=lambda identity: int(identity[1:]))
    assert len(identities) == 80
    for identity, title, held in rows:
        assert title, identity
        reason = held.startswith(("arrives with ", "does not apply: "))
        assert _named_tests(held) or reason, f"{identity} has neither a test nor a reason"
