"""Runs an endpoint for the command line: says where it is, and waits until it is to end."""

import contextlib
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from rich.console import Console

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.load_config import load_config_as
from rayserve_paged.process_times import seconds_since_start
from rayserve_paged.serve.local_server import bind, local_endpoint
from rayserve_paged.serve.serve_config import EndpointConfig


def run(
    path: Path | None,
    flags: Mapping[str, object],
    *,
    host: str,
    port: int,
    address: str | None,
    shell: str,
) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for running streams.

    Args:
        path: Configuration file.
        flags: What wins over it, with dotted names.
        host: Interface to listen on.
        port: Port to listen on.
        address: Ray cluster to join; None to start one on this machine.
        shell: "ray" or "inprocess".

    Raises:
        InvalidInputError: A value is not accepted.
        DeploymentError: It cannot be started.
    """
    begin, age_s = time.monotonic(), seconds_since_start()
    config = _settings(path, flags)
    with _signals() as asked_to_end, contextlib.ExitStack() as stack:
        with _status(f"starting {config.model.model}"):
            url = stack.enter_context(_endpoint(config, host, port, address, shell))
        if not asked_to_end.is_set():
            _print_ready(config, url, age_s + time.monotonic() - begin)
        asked_to_end.wait()
        print("waiting for running streams; interrupt again to cut them off", file=sys.stderr)


def _settings(path: Path | None, flags: Mapping[str, object]) -> EndpointConfig:
    try:
        return load_config_as(EndpointConfig, path, flags)
    except InvalidInputError as error:
        if error.field != "model.model" or error.value is not None:
            raise
        accepted = "a model, here, in the file of --config or in RAYSERVE_MODEL__MODEL"
        raise InvalidInputError("--model", None, accepted) from error


def _endpoint(
    config: EndpointConfig, host: str, port: int, address: str | None, shell: str
) -> contextlib.AbstractContextManager[str]:
    if shell == "ray":
        # The other shell runs where there is no Ray.
        from rayserve_paged.serve.endpoint import ray_endpoint

        return ray_endpoint(config, host, port, address)
    if shell != "inprocess":
        raise InvalidInputError("--shell", shell, "ray or inprocess")
    if address is not None:
        raise InvalidInputError("--address", address, "nothing with --shell inprocess")
    return local_endpoint(config, bind(host, port))


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Turn the first signal to end into an event, and the next one into an interrupt."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_ready(config: EndpointConfig, url: str, seconds: float) -> None:
    body = json.dumps(
        {
            "model": config.model_name,
            "messages": [{"role": "user", "content": "What is a KV cache?"}],
            "max_tokens": 64,
        }
    )
    route = "chat/completions"
    if config.model.model == "fingerprint":  # It knows no roles.
        body = json.dumps({"model": config.model_name, "prompt": "hello", "max_tokens": 16})
        route = "completions"
    key = ' -H "Authorization: Bearer $KEY"' if config.serve.keys_file else ""
    print(f"{config.model_name} is served at {url}/v1 (ready after {seconds:.1f} s)")
    print()
    print(
        f"  curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
    print()
    print(f"  dashboard  {url}/dashboard", flush=True)


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield
