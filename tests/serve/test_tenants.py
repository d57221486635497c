"""Keys, tenants and their salts, without HTTP."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_driver import ReplicaDriver, depths, make_limits, make_request, prompt_keys

from rayserve_paged.core.directory import Directory
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.tenant_quota import TenantQuota
from rayserve_paged.serve.api_keys import KEY_PREFIX, bearer_key, key_hash, new_key
from rayserve_paged.serve.http_errors import HttpError
from rayserve_paged.serve.keys_file import WatchedKeys, read_keys, write_keys
from rayserve_paged.serve.tenants import ANONYMOUS, Tenant, Tenants, parse_keys

KEY = new_key()
TEXTS = st.text() | st.sampled_from(['","', '"', "\\", "\ud83d\ude00", "😀", "a", "b"])


def make_tenants(*tenants: dict[str, Any]) -> Tenants:
    return Tenants(parse_keys({"tenants": list(tenants)}, "keys.yaml"))


def refusal(tenants: Tenants, header: str | None) -> str | None:
    with pytest.raises(HttpError) as refused:
        tenants.authenticate(header)
    assert refused.value.status == 401
    assert refused.value.headers["WWW-Authenticate"] == "Bearer"
    return refused.value.code


# --- keys ---------------------------------------------------------------------------------


def test_a_tenant_is_known_by_each_of_its_keys() -> None:
    other = new_key()
    quota = {"requests_per_minute": 60, "block_share": 0.5}
    tenants = make_tenants(
        {"name": "a", "key_hashes": [key_hash(KEY), key_hash(other)], "quota": quota},
        {"name": "b", "key_hashes": [key_hash("secret")], "is_admin": True},
    )
    for key in (KEY, other):
        tenant = tenants.authenticate(f"Bearer {key}")
        assert (tenant.name, tenant.charged, tenant.is_admin) == ("a", "a", False)
        assert tenant.quota == TenantQuota(requests_per_minute=60, block_share=0.5)
    admin = tenants.authenticate("bearer  secret ")
    assert (admin.name, admin.quota, admin.is_admin) == ("b", None, True)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic a", f"Bearer {'x' * 600}", "a b c"])
def test_a_header_without_a_key_is_refused_as_that(header: str | None) -> None:
    tenants = make_tenants({"name": "a", "key_hashes": [key_hash(KEY)]})
    assert refusal(tenants, header) == "missing_api_key"


def test_without_a_keys_file_everyone_is_one_tenant_and_with_an_empty_one_nobody_is() -> None:
    assert WatchedKeys(None).authenticate(None) is ANONYMOUS
    assert WatchedKeys(None).authenticate("Bearer anything") is ANONYMOUS
    assert (ANONYMOUS.charged, ANONYMOUS.quota, ANONYMOUS.is_admin) == (None, None, True)
    assert refusal(make_tenants(), f"Bearer {KEY}") == "invalid_api_key"


def test_keys_are_random_and_only_their_hashes_are_kept(tmp_path: Path) -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) == 47 for key in keys)
    path = tmp_path / "keys.yaml"
    entry = {"name": "a", "key_hashes": [key_hash(KEY)]}
    write_keys(path, parse_keys({"tenants": [entry]}, "here"))
    assert KEY.removeprefix(KEY_PREFIX) not in path.read_text()


def test_b95_what_is_compared_tells_nothing_of_how_many_characters_are_right() -> None:
    tenants = make_tenants({"name": "a", "key_hashes": [key_hash(KEY)]})
    kept, common = key_hash(KEY), []
    for num_right in range(len(KEY)):
        wrong = "~" if KEY[num_right] != "~" else "-"
        guess = KEY[:num_right] + wrong + KEY[num_right + 1 :]
        assert refusal(tenants, f"Bearer {guess}") == "invalid_api_key"
        # A comparison of digests stops after so many digits.
        alike = zip(kept, key_hash(guess), strict=True)
        common.append(len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], alike))))
    # Each is 0 with a probability of 15/16, wherever the guess is wrong.
    assert max(common) <= 5
    assert sum(common) / len(common) < 1
    assert tenants.authenticate(f"Bearer {KEY}").name == "a"


def test_any_header_is_taken_apart() -> None:
    assert bearer_key("BEARER x") == "x"
    assert bearer_key("Bearer \ud800") == "\ud800"
    assert len(key_hash("\ud800")) == 64


# --- salts --------------------------------------------------------------------------------


def test_b07_tenants_share_nothing_on_any_replica_whatever_salt_they_send() -> None:
    limits = make_limits(num_blocks=24, block_size=16)
    drivers = [ReplicaDriver(limits), ReplicaDriver(limits)]
    a, b = Tenant("a", "1f"), Tenant("b", "2e")
    of_a = make_request(range(64), 1, tenant_salt=a.scope_salt(None))
    of_b = make_request(range(64), 1, tenant_salt=b.scope_salt(None))
    # It knows all about the other one, and says so.
    as_a = make_request(range(64), 1, tenant_salt=b.scope_salt(a.scope_salt(None)))
    directory = Directory()
    for place, driver in enumerate(drivers):
        cached, computed = [], []
        for request in (of_a, of_b, as_a, of_a):
            num_steps = len(driver.rank.history)
            cached.append(driver.generate(request)[0].num_cached_tokens)
            computed.append(sum(row.num_tokens for row in driver.rank.history[num_steps]))
        assert cached == [0, 0, 0, 48]
        assert computed == [64, 64, 64, 16]
        directory.update(place, prompt_keys(of_a, driver.scope), ())
    for request in (of_b, as_a):
        assert depths(directory, prompt_keys(request, drivers[0].scope), 2) == [0, 0]


def test_a_group_shares_and_its_users_salts_still_part_it() -> None:
    a, b = Tenant("a", "1", "g"), Tenant("b", "2", "g")
    assert a.scope_salt(None) == b.scope_salt(None)
    assert a.scope_salt("s") == b.scope_salt("s") != a.scope_salt(None)
    assert a.scope_salt("") != a.scope_salt(None)
    assert Tenant("g", "1").scope_salt(None) != a.scope_salt(None)
    # Another tenant that is given the name later.
    assert Tenant("a", "1").scope_salt(None) != Tenant("a", "3").scope_salt(None)


PEOPLE = st.builds(Tenant, TEXTS, TEXTS, st.none() | TEXTS)
USER_SALTS = st.none() | TEXTS


@given(PEOPLE, PEOPLE, USER_SALTS, USER_SALTS)
def test_two_salts_are_equal_only_where_they_are_to_share(
    one: Tenant, other: Tenant, salt: str | None, other_salt: str | None
) -> None:
    def shares(tenant: Tenant) -> tuple[str | None, ...]:
        group = tenant.prefix_group
        return (tenant.name, tenant.salt) if group is None else (group,)

    is_one_scope = (shares(one), salt) == (shares(other), other_salt)
    assert (one.scope_salt(salt) == other.scope_salt(other_salt)) == is_one_scope


def test_a_request_is_as_urgent_as_its_tenant_at_most() -> None:
    tenant = Tenant("a", priority=2)
    assert [tenant.request_priority(asked) for asked in (-5, 0, 3)] == [2, 2, 5]
    assert [ANONYMOUS.request_priority(asked) for asked in (-5, 0, 3)] == [-5, 0, 3]


# --- the file -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tenants: [{name: a b}]", "tenants.0.name='a b' is not accepted"),
        ("tenants: [{name: a, quota: {block_share: 2}}]", "tenants.0.quota.block_share=2 .*1"),
        ("tenants: [{name: a, keys: []}]", "tenants.0.keys='...' .*not permitted"),
        ("tenants: [{name: a}, {name: a}]", "names that differ .'a' is there 2 times"),
        (
            f"tenants: [{{name: a, key_hashes: ['{'0' * 64}', '{'0' * 64}']}}]",
            "each key once .'a' and 'a' have 000000000000",
        ),
        (f"tenants: [{{name: a, key_hashes: [{KEY}]}}]", "key_hashes.0='47 characters'"),
        (f"tenants: [{KEY}: ]}}", "valid YAML or JSON, at line 1"),
    ],
)
def test_a_broken_file_is_refused_by_field_and_shows_no_key(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=message) as refused:
        read_keys(path)
    assert str(path) in str(refused.value)
    assert KEY not in str(refused.value)


def test_a_change_is_seen_a_broken_one_is_told_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    entry = {"name": "a", "key_hashes": [key_hash(KEY)]}
    write_keys(path, parse_keys({"tenants": [entry]}, "here"))
    watched = WatchedKeys(path)
    assert not watched.refresh()
    path.write_text('{"tenants": [{"name": "a", "quota": {"requests_per_minute": 0}}]}')
    for _ in range(3):
        assert not watched.refresh()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "tenants.0.quota.requests_per_minute=0 is not accepted" in said
    path.unlink()
    assert not watched.refresh()
    assert watched.authenticate(f"Bearer {KEY}").quota is None
    write_keys(path, parse_keys({"tenants": [entry | {"quota": {"tokens_per_minute": 9}}]}, "here"))
    assert watched.refresh()
    assert watched.authenticate(f"Bearer {KEY}").quota == TenantQuota(tokens_per_minute=9)
    write_keys(path, parse_keys({"tenants": []}, "here"))
    assert watched.refresh()
    with pytest.raises(HttpError):
        watched.authenticate(f"Bearer {KEY}")


def test_a_file_of_the_same_size_and_time_is_another_one_where_it_was_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.yaml"
    other = new_key()

    def write(key: str) -> None:
        entry = {"name": "a", "key_hashes": [key_hash(key)]}
        write_keys(path, parse_keys({"tenants": [entry]}, "here"))
        os.utime(path, ns=(10**18, 10**18))

    write(KEY)
    watched = WatchedKeys(path)
    write(other)
    assert watched.refresh()
    assert watched.authenticate(f"Bearer {other}").name == "a"


def test_a_new_file_is_its_owners_alone_and_one_that_others_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    keys = parse_keys({"tenants": [{"name": "a", "salt": "00"}]}, "here")
    write_keys(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path) == keys
    assert not caplog.records
    path.chmod(0o640)
    read_keys(path)
    assert "can be read by others than its owner (mode 640)" in caplog.text
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    write_keys(link, keys)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(one.name for one in tmp_path.iterdir()) == ["keys.yaml", "link.yaml"]
