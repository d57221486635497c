"""What the tests of the endpoint on Ray Serve share: a cluster with Serve, clients, processes."""

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray_harness import PATIENCE_S, wait_for

from rayserve_cluster.launch import connect, disconnect
from rayserve_cluster.placement import CONTROLLER_NAME, actors_of, groups_of, namespace_of
from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.build import build
from rayserve_paged.serve.serve_config import EndpointConfig

FAREWELL_S = 5.0
"""Long enough for the next ingress to start, on a busy machine too."""


@pytest.fixture(scope="module")
def serve_port() -> Iterator[int]:
    """A local cluster with Ray Serve, shared by the tests of a file; the port that it serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    connection = connect("tests", None)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        yield port
        serve.shutdown()
    finally:
        disconnect(connection)


def endpoint_config(name: str, **fields: object) -> EndpointConfig:
    flags = {
        "name": name,
        "model.model": "fingerprint",
        "cache.num_blocks": 512,
        "timeouts.farewell_s": FAREWELL_S,
        **fields,
    }
    return load_config_as(EndpointConfig, flags=flags, environ={})


def start(config: EndpointConfig) -> None:
    serve.run(build(config), name=config.name, route_prefix="/")


def stop(config: EndpointConfig) -> None:
    """End an endpoint, and wait until nothing is left of what was behind it."""
    serve.delete(config.name)
    wait_until_gone(config)


def wait_until_gone(config: EndpointConfig) -> None:
    name = config.deployment().name
    wait_for(lambda: not actors_of(name) and not groups_of(name), f"the end of {name}")


def controller_pid(config: EndpointConfig) -> int:
    namespace = namespace_of(config.deployment().name)
    controller: Any = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
    status: Any = ray.get(controller.status.remote())
    return status.pid


def rank_pids(config: EndpointConfig) -> list[int]:
    namespace = namespace_of(config.deployment().name)
    controller: Any = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
    return [rank.pid for rank in ray.get(controller.stats.remote())]


def held_blocks(config: EndpointConfig) -> int:
    namespace = namespace_of(config.deployment().name)
    controller: Any = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
    return sum(ledger.num_held_blocks for _, ledger in ray.get(controller.accounting.remote()))


def num_recoveries(config: EndpointConfig) -> list[int]:
    """Return how often each running request had to go on elsewhere, as last reported."""
    namespace = namespace_of(config.deployment().name)
    controller: Any = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
    reports = ray.get(controller.owner_reports.remote())
    return [one.num_recoveries for report in reports for one in report.running]


def ingress_pids() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
            if "ServeReplica" in " ".join(process.cmdline() or [process.name()]):
                found.add(process.pid)
    return found


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def completion(prompt: list[int], max_tokens: int, **fields: object) -> dict[str, Any]:
    return {
        "model": "fingerprint",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        **fields,
    }


@dataclasses.dataclass
class Reader(threading.Thread):
    """Reads one stream in a thread of its own."""

    port: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.broke: Exception | None = None
        self._leave = False
        self.start()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json", **self.headers}
        try:
            body = json.dumps({**self.body, "stream": True})
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                self.error = json.loads(response.read())["error"]
                return
            # Not by its lines, whose reader takes a broken chunk for the end.
            rest = b""
            while data := response.read1():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line.strip())
                if self._leave:
                    return
        except (OSError, http.client.HTTPException) as error:
            self.broke = error
        finally:
            connection.close()

    def _take(self, line: bytes) -> None:
        if not line:
            return
        if line == b"data: [DONE]":
            self.is_done = True
            return
        fields = json.loads(line.removeprefix(b"data: "))
        if "error" in fields:
            self.error = fields["error"]
            return
        (choice,) = fields["choices"]
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"]

    def leave(self) -> None:
        """Close the connection with the next event."""
        self._leave = True

    def wait(self) -> "Reader":
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the stream does not end"
        return self

    def wait_for_text(self) -> "Reader":
        wait_for(lambda: self.text or not self.is_alive(), "the first text of a stream")
        assert self.text, (self.error, self.broke)
        return self

    @property
    def whole(self) -> str:
        """Its text, where it ended as it should."""
        assert (self.error, self.broke) == (None, None)
        assert self.is_done
        assert self.finish_reason == "length"
        return self.text
