"""`rayserve-paged keys`, as its user calls it."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayserve_paged.cli import app
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.tenant_quota import TenantQuota
from rayserve_paged.serve.api_keys import key_hash
from rayserve_paged.serve.keys_file import WatchedKeys, read_keys


def call(command: str, file: Path, *arguments: str) -> str:
    """What a command prints on stdout."""
    result = CliRunner().invoke(app, ["keys", command, "--file", str(file), *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout.strip()


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_a_key_is_added_listed_used_and_revoked(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    first = call("add", file, "--tenant", "a", "--requests-per-minute", "60", "--admin")
    second = call("add", file, "--tenant", "a", "--block-share", "0.5", "--priority", "3")
    third = call("add", file, "--tenant", "b", "--prefix-group", "g")
    ids = [key_hash(key)[:12] for key in (first, second, third)]
    assert call("list", file).splitlines() == [
        "a requests_per_minute=60 block_share=0.5 priority=3 admin",
        f"  {ids[0]}",
        f"  {ids[1]}",
        "b prefix_group=g",
        f"  {ids[2]}",
    ]
    watched = WatchedKeys(file)
    tenant = watched.authenticate(f"Bearer {first}")
    assert tenant.quota == TenantQuota(requests_per_minute=60, block_share=0.5)
    assert tenant.salt not in ("", watched.authenticate(f"Bearer {third}").salt)
    assert call("revoke", file, ids[0]) == f"revoked {ids[0]}"
    assert call("revoke", file, third) == f"revoked {ids[2]}"
    assert call("list", file).splitlines()[1:] == [f"  {ids[1]}", "b prefix_group=g"]
    assert watched.refresh()
    assert watched.authenticate(f"Bearer {second}").salt == tenant.salt


def test_what_is_not_accepted_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = call("add", file, "--tenant", "a")
    before = file.read_bytes()
    with pytest.raises(InvalidInputError, match=r"tenants.0.quota.block_share=1.5 .* an option"):
        call("add", file, "--tenant", "a", "--block-share", "1.5")
    with pytest.raises(InvalidInputError, match=r"tenants.1.name='a b' is not accepted"):
        call("add", file, "--tenant", "a b")
    for wrong in ("0" * 12, key_hash(key)[:11], "", f"{key}x"):
        with pytest.raises(
            InvalidInputError, match=r"a key of .*, or its id of 12 digits"
        ) as refused:
            call("revoke", file, wrong)
        assert key not in str(refused.value)
    assert file.read_bytes() == before


def test_writers_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"

    def add(number: int) -> str:
        command = [sys.executable, "-m", "rayserve_paged", "keys", "add"]
        command += ["--file", str(file), "--tenant", f"t{number % 2}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        added = set(pool.map(add, range(6)))
    kept = {one for tenant in read_keys(file).tenants for one in tenant.key_hashes}
    assert kept == {key_hash(key) for key in added}
    assert len(kept) == 6
