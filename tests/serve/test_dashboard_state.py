"""What the dashboard's state says, and to whom; and the routes that serve it."""

import json

import pytest
from dashboard_server import Shown, make_app, make_holdings, make_request
from starlette.testclient import TestClient

from rayserve_paged.core.cluster_view import ClusterEvent
from rayserve_paged.serve.dashboard_state import MAX_REQUESTS, Reader, quantile, totals

ACME = Reader("acme", sees_all=False)


def make_shown() -> Shown:
    held = {"a-0": [0, 1], "b-0": [0, 2], "b-1": [0, 3], "gone": [0]}
    return Shown(
        {"r0": make_holdings(8, held, [0, 5], [6])},
        (
            make_request("secret-1", "b-0", "bolt", age_s=9.0),
            make_request("secret-2", "b-1", "bolt", age_s=8.0),
            make_request("mine", "a-0", "acme", age_s=1.0),
        ),
        events=(
            ClusterEvent(1, 2.0, "replica started", "r0 serves"),
            ClusterEvent(2, 1.0, "quota refusal", "secret-3", "bolt"),
        ),
        readers={"sk-acme": ACME, "sk-root": Reader("", sees_all=True)},
    )


def get(shown: Shown, key: str, query: str = "") -> dict[str, object]:
    with TestClient(make_app(shown)) as client:
        headers = {"authorization": f"Bearer {key}"}
        answer = client.get(f"/dashboard/state{query}", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    shown_fields = json.loads(answer.text)
    assert isinstance(shown_fields, dict)
    return shown_fields


def test_a_tenant_sees_its_own_names_and_counts_of_all() -> None:
    shown = make_shown()
    for query in ("", "?replica=r0&cell=0"):
        text = json.dumps(get(shown, "sk-acme", query))
        assert "secret" not in text
        assert "bolt" not in text
        assert "system" not in text
        assert "mine" in text
        assert all(
            name in json.dumps(get(shown, "sk-root", query)) for name in ("secret-1", "mine")
        )
    state = get(shown, "sk-acme")
    assert [each["name"] for each in state["requests"]] == [  # type: ignore[attr-defined]
        "mine",
        "another tenant",
        "another tenant",
    ]
    assert state["num_requests"] == 3
    cell = get(shown, "sk-acme", "?replica=r0&cell=0")
    named = [(each["name"], each["num_blocks"]) for each in cell["holders"]]  # type: ignore[attr-defined]
    assert named == [("mine", 1), ("another tenant", 3), ("a pin", 1)]


def test_long_names_and_lists_are_cut() -> None:
    shown = make_shown()
    shown.requests = tuple(make_request("x" * 5000, f"a-{i}") for i in range(MAX_REQUESTS + 9))
    state = get(shown, "sk-root")
    requests = state["requests"]
    assert isinstance(requests, list)
    assert len(requests) == MAX_REQUESTS
    assert {len(each["name"]) for each in requests} == {120}
    assert state["num_requests"] == MAX_REQUESTS + 9


def test_the_page_needs_no_key_and_its_data_do() -> None:
    with TestClient(make_app(make_shown())) as client:
        page = client.get("/dashboard")
        assert page.status_code == 200
        assert "secret" not in page.text
        sizes = len(page.content)
        for name in ("dashboard.css", "dashboard.js", "block_map.js", "sparkline.js", "icon.svg"):
            file = client.get(f"/dashboard/{name}")
            assert (
                file.headers["content-security-policy"] == page.headers["content-security-policy"]
            )
            sizes += len(file.content)
        assert sizes < 40_000
        assert client.get("/dashboard/state").status_code == 401
        assert client.get("/dashboard/state?replica=r0&cell=0").status_code == 401
        headers = {"authorization": "Bearer sk-acme"}
        for query in ("replica=r0&cell=8", "replica=r9&cell=0"):
            answer = client.get(f"/dashboard/state?{query}", headers=headers)
            assert answer.status_code == 404
        for name in ("nothing.js", "..%2fapi.py", "__init__.py"):
            assert client.get(f"/dashboard/{name}").status_code == 404


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.99, 4.0), (0.0, 1.0)])
def test_a_quantile_is_a_value_that_was_seen(share: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == value
    assert quantile([], share) is None
    assert totals(1, 2, 3, [], [0.5]).itl_p99_s == 0.5
