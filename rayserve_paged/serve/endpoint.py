"""An endpoint on Ray Serve that lasts as long as the process which started it."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from rayserve_cluster.launch import Connection, connect, disconnect, remove_deployment
from rayserve_paged.core.errors import DeploymentError
from rayserve_paged.load_config import user_cache_dir
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.parallel import deal_heads
from rayserve_paged.model.spec import check_kv_dtype
from rayserve_paged.serve.build import build
from rayserve_paged.serve.keys_file import read_keys
from rayserve_paged.serve.local_server import bind
from rayserve_paged.serve.serve_config import EndpointConfig
from rayserve_paged.shells import with_absolute_paths

_SERVE_CONTROLLER: Final = ("SERVE_CONTROLLER_ACTOR", "serve")


@contextlib.contextmanager
def ray_endpoint(
    config: EndpointConfig, host: str, port: int, address: str | None
) -> Iterator[str]:
    """Serve until the block ends; yields the URL once a replica can serve.

    At the end running streams have `serve.drain_timeout_s` to end. Then all of the endpoint is
    taken down, and Ray Serve and the cluster where they were started here.

    Args:
        config: Of the endpoint, whose name is that of its application.
        host: Interface to listen on, of every node that has a proxy; not changed where Ray Serve
            runs already.
        port: Likewise; 0 for any that is free.
        address: Ray cluster to join; None to start one on this machine.

    Raises:
        InvalidInputError: A value is not accepted.
        DeploymentError: It cannot be started.
    """
    deployment = with_absolute_paths(config.deployment())
    check_model(config)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    connection = connect(config.name, address)
    try:
        starts_serve = not _serve_runs()
        if starts_serve:
            # Ray Serve would go on trying, and does not choose.
            with contextlib.closing(bind(host, port)) as listener:
                port = listener.getsockname()[1]
            serve.start(http_options=HTTPOptions(host=host, port=port))
        try:
            _run(config)
            yield _url()
        finally:
            _end(config.name, starts_serve, connection)
            remove_deployment(deployment.name)
    finally:
        disconnect(connection)


def check_model(config: EndpointConfig) -> None:
    """Refuse here, before anything is started, what the ranks would refuse.

    Raises:
        InvalidInputError: There is no such model, or not in this width or dtype; or the keys
            cannot be read.
    """
    if config.serve.keys_file is not None:
        read_keys(Path(config.serve.keys_file).expanduser())
    source = resolve_model(config.model.model, user_cache_dir())
    check_kv_dtype(source, config.model.kv_dtype)
    deal_heads(
        source.spec.num_heads, source.spec.num_kv_heads, config.parallel.tensor_parallel_size
    )


def _serve_runs() -> bool:
    name, namespace = _SERVE_CONTROLLER
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True


def _run(config: EndpointConfig) -> None:
    try:
        serve.run(build(config), name=config.name, route_prefix="/")
    except RuntimeError as error:
        reason = f"its application does not start ({' '.join(str(error).split())[-800:]})"
        raise DeploymentError(config.name, reason) from error


def _url() -> str:
    client: Any = _get_global_client()
    options = client.http_config
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::", "") else options.host
    return f"http://{f'[{host}]' if ':' in host else host}:{options.port}"


def _end(application: str, started_serve: bool, connection: Connection) -> None:
    # Also where the start was interrupted; an application that is not there is no error.
    serve.delete(application)
    if started_serve and not connection.started_cluster:
        serve.shutdown()
