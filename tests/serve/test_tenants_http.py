"""Tenants over HTTP: keys, salts, quotas, and what one sees of another."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from http_endpoint import MODEL, Endpoint, Gate, body, endpoint_of, greedy, wait_for

from rayserve_paged.serve.api_keys import key_hash, new_key

KEYS = {name: new_key() for name in ("a", "b", "limited", "admin")}
PROMPT = [(7 * place) % 900 for place in range(64)]


def write(path: Path, *names: str) -> None:
    tenants: list[dict[str, Any]] = [
        {"name": name, "key_hashes": [key_hash(KEYS[name])], "salt": f"salt-{name}"}
        for name in names
    ]
    for tenant in tenants:
        if tenant["name"] == "limited":
            tenant["quota"] = {"requests_per_minute": 1}
        if tenant["name"] == "admin":
            tenant["is_admin"] = True
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    path.chmod(0o600)


@pytest.fixture(scope="module")
def keys_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, *KEYS)
    return path


@pytest.fixture(scope="module")
def guarded(keys_path: Path) -> Iterator[Endpoint]:
    settings = {
        "serve.keys_file": str(keys_path),
        "cache.block_size": 16,
        "parallel.num_replicas": 2,
        "placement": "round-robin",
    }
    with endpoint_of(settings) as endpoint:
        yield endpoint


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def client(endpoint: Endpoint, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=key, max_retries=0)


def cached(endpoint: Endpoint, name: str, **rayserve: object) -> int:
    fields = body(prompt=PROMPT, max_tokens=1, rayserve=rayserve)
    answer = endpoint.http.post("/v1/completions", json=fields, headers=headers(name))
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize(
    ("given", "code"),
    [({}, "missing_api_key"), ({"Authorization": "Bearer rsp-no"}, "invalid_api_key")],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/dashboard/state"),
        ("GET", "/no/such/route"),
    ],
)
def test_without_a_key_nothing_is_told(
    guarded: Endpoint, method: str, path: str, given: dict[str, str], code: str
) -> None:
    answer = guarded.http.request(method, path, content=b"{", headers=given)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == code
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/openapi.json", "/dashboard", "/dashboard/icon.svg"])
def test_what_tells_of_nobody_needs_no_key(guarded: Endpoint, path: str) -> None:
    assert guarded.http.get(path).status_code == 200


def test_the_openai_client_sends_its_key(guarded: Endpoint) -> None:
    answer = client(guarded, KEYS["a"]).completions.create(
        model=MODEL, prompt="x", max_tokens=3, temperature=0
    )
    assert answer.choices[0].text == greedy("x", 3)
    with pytest.raises(openai.AuthenticationError):
        client(guarded, "rsp-wrong").models.list()


def test_a_quota_is_a_429_that_says_when_to_come_back(guarded: Endpoint) -> None:
    limited = client(guarded, KEYS["limited"])
    limited.completions.create(model=MODEL, prompt="x", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as refused:
        limited.completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    with pytest.raises(openai.RateLimitError):
        limited.completions.create(model=MODEL, prompt="x", max_tokens=1, stream=True)
    # Nobody else is held up.
    client(guarded, KEYS["a"]).completions.create(model=MODEL, prompt="x", max_tokens=1)


def test_b07_a_tenant_finds_nothing_of_what_another_has_computed(guarded: Endpoint) -> None:
    # Placed in turn, so that each replica serves each of them.
    assert [cached(guarded, "a") for _ in range(2)] == [0, 0]
    assert [cached(guarded, "b") for _ in range(2)] == [0, 0]
    assert [cached(guarded, "b", salt="salt-a") for _ in range(2)] == [0, 0]
    assert [cached(guarded, "a") for _ in range(2)] == [48, 48]
    assert [cached(guarded, "b") for _ in range(2)] == [48, 48]


def test_b92_tenants_may_use_the_same_request_id(guarded: Endpoint, gate: Gate) -> None:
    statuses: list[int] = []

    def post(name: str) -> None:
        fields = body(prompt="x", max_tokens=2, rayserve={"request_id": "same"})
        answer = guarded.http.post("/v1/completions", json=fields, headers=headers(name))
        statuses.append(answer.status_code)

    gate.close()
    threads = [threading.Thread(target=post, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    wait_for(lambda: gate.num_waiting == 2, "both run")
    post("a")
    assert statuses == [400], "it is in use by the tenant itself"
    gate.open()
    for thread in threads:
        thread.join()
    assert statuses == [400, 200, 200]


def test_the_dashboard_names_a_tenants_own_requests_alone(guarded: Endpoint) -> None:
    def names(reader: str) -> list[str]:
        state = guarded.http.get("/dashboard/state", headers=headers(reader)).json()
        return [request["name"] for request in state["requests"]]

    fields = body(prompt="x", max_tokens=3500, stream=True, rayserve={"request_id": "secret"})
    with guarded.http.stream("POST", "/v1/completions", json=fields, headers=headers("a")):
        wait_for(lambda: names("a") == ["a/secret"], "the ingress reports it")
        assert names("b") == ["another tenant"]
        assert names("admin") == ["a/secret"]
    guarded.wait_for_blocks()


def test_a_key_that_is_revoked_stops_to_work(guarded: Endpoint, keys_path: Path) -> None:
    def status() -> int:
        return guarded.http.get("/v1/models", headers=headers("b")).status_code

    assert status() == 200
    write(keys_path, "a", "limited", "admin")
    wait_for(lambda: status() == 401, "the file is read again")
    keys_path.write_text("tenants: [")
    assert guarded.http.get("/v1/models", headers=headers("a")).status_code == 200
    write(keys_path, *KEYS)
    wait_for(lambda: status() == 200, "the file is read again")
