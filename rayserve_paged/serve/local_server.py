"""The endpoint without Ray: one process that answers HTTP over the in-process shell."""

import contextlib
import math
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.load_config import user_cache_dir
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.tokenizer import load_tokenizer
from rayserve_paged.serve.api import create_app
from rayserve_paged.serve.serve_config import EndpointConfig
from rayserve_paged.serve.service import Service
from rayserve_paged.shells import start_deployment, with_absolute_paths

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free.

    Raises:
        InvalidInputError: The address or the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # From here on clients wait until they are served.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        accepted = f"a port that is free on a host of this machine ({error.strerror})"
        raise InvalidInputError("--port", f"{host}:{port}", accepted) from error
    return listener


@contextlib.contextmanager
def local_endpoint(config: EndpointConfig, listener: socket.socket) -> Iterator[str]:
    """Serve on a socket, in a thread, until the block ends; yields the URL.

    Args:
        config: Of the endpoint.
        listener: From `bind`; closed at the end.

    Raises:
        PagedError: The deployment cannot be started.
    """
    deployment_config = with_absolute_paths(config.deployment())
    with contextlib.closing(listener):
        tokenizer = load_tokenizer(resolve_model(deployment_config.model.model, user_cache_dir()))
        deployment = start_deployment(deployment_config, "inprocess", None)
        try:
            app = create_app(Service(deployment, tokenizer, config))
            with served(app, listener, config.serve.drain_timeout_s) as url:
                yield url
        finally:
            deployment.shutdown()


@contextlib.contextmanager
def served(app: FastAPI, listener: socket.socket, drain_timeout_s: float) -> Iterator[str]:
    """Answer by an application, in a thread, until the block ends; yields the URL.

    Args:
        app: From `create_app`.
        listener: From `bind`.
        drain_timeout_s: Running streams have this long at the end.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            lifespan="on",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(drain_timeout_s),
        )
    )
    # Whoever runs it waits for signals.
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        host, port = listener.getsockname()[:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
