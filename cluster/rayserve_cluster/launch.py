"""Starts or joins a Ray cluster, and removes what a deployment holds on it."""

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import ray
from ray._private import auto_init_hook, ray_constants, services
from ray._private import worker as ray_worker

from rayserve_cluster.placement import (
    CONTROLLER_NAME,
    actors_of,
    groups_of,
    namespace_of,
    remove_group,
)
from rayserve_paged.core.errors import DeploymentError

# Nothing of ours passes through the object store: take the least that Ray allows.
_OBJECT_STORE_BYTES: Final = 80 * 2**20
_LOOPBACK: Final = "127.0.0.1"
_REMOVAL_TIMEOUT_S: Final = 20.0
_LOOK_S: Final = 0.05
_MAX_PORT: Final = 65535
_REACH_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """How this process came to be connected to a cluster.

    Args:
        started_cluster: The cluster is local, and ends with this process.
        connected: This process was not connected before.
    """

    started_cluster: bool
    connected: bool


def connect(deployment: str, address: str | None) -> Connection:
    """Connect this process to a cluster, unless it is connected already.

    Args:
        deployment: For the error.
        address: A cluster to join, `auto` for the one that Ray finds on this machine; None to start
            a local one that listens on loopback alone.

    Raises:
        DeploymentError: No cluster answers at the address, or none could be started.
    """
    if ray.is_initialized():
        return Connection(started_cluster=False, connected=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call after somebody's `ray.shutdown()` would start a cluster of its own to make it on.
    auto_init_hook.enable_auto_connect = False
    _keep_off_standard_output()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None or address == "local":
            _bind_to_loopback()
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address=_LOOPBACK,
                **quiet,
            )
            return Connection(started_cluster=True, connected=True)
        _check_reachable(address)
        if _is_bound_to_loopback(address):
            _bind_to_loopback()
        # As it was given: Ray shows its token to a cluster that it found itself, and to one with
        # an explicit address only where the environment says so.
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        is_local = address is None or address == "local"
        what = "cannot start a local Ray cluster," if is_local else "no Ray cluster at"
        reason = f"{what} address={address!r} ({_first_line(error)})"
        raise DeploymentError(deployment, reason) from error
    return Connection(started_cluster=False, connected=True)


def _check_reachable(address: str) -> None:
    # Ray goes on trying for many minutes, and prints what it tries.
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal() and int(port) <= _MAX_PORT:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S).close()


def _is_bound_to_loopback(address: str) -> bool:
    # A cluster that others reach is told apart by where its GCS was started to listen.
    if address == "auto":
        address = services.get_ray_address_from_environment(address, None)
    address = address.replace("localhost", _LOOPBACK)
    return address.startswith(f"{_LOOPBACK}:") and address in services.find_gcs_addresses()


def _keep_off_standard_output() -> None:
    # Ray prints what goes wrong on the cluster to standard output, between the lines of results
    # that a reader parses. Those who lose a request to it hear of it in that request's error.
    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        logger.info("Ray says: %s", " ".join(data["lines"]))

    ray_worker.print_to_stdstream = log


def _bind_to_loopback() -> None:
    # Ray rewrites the address alone to one that other machines reach. Its daemons read the
    # variable when they start; in this process it may have been read long ago, on import.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ray_constants.ENABLE_RAY_CLUSTER = False


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def disconnect(connection: Connection) -> None:
    """Undo `connect`: leave the cluster, and end it if it was started."""
    if connection.connected:
        ray.shutdown()


def remove_deployment(deployment: str, *, keep_controller: bool = False) -> tuple[str, ...]:
    """Remove all that a deployment holds on the connected cluster; idempotent.

    Args:
        deployment: Its name.
        keep_controller: Leave the controller, which asks.

    Returns:
        What was removed: names of actors, then of placement groups.

    Raises:
        DeploymentError: Some of it is still there after 20 s.
    """

    def actors() -> list[str]:
        names = actors_of(deployment)
        return [name for name in names if not keep_controller or name != CONTROLLER_NAME]

    killed = actors()
    if CONTROLLER_NAME in killed:
        # First, so that it starts nothing behind our back.
        with contextlib.suppress(ValueError):  # It is gone already.
            ray.kill(ray.get_actor(CONTROLLER_NAME, namespace=namespace_of(deployment)))
    groups = groups_of(deployment)
    for group in groups.values():
        remove_group(group)  # And with it the ranks inside.
    await_removal(deployment, lambda: [*actors(), *groups_of(deployment)])
    return (*killed, *groups)


def await_removal(deployment: str, left: Callable[[], list[str]]) -> None:
    """Wait until nothing is left of what was removed.

    Args:
        deployment: For the error.
        left: Names what is still there.

    Raises:
        DeploymentError: Some of it is still there after 20 s.
    """
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_S
    while names := left():
        if time.monotonic() > deadline:
            raise DeploymentError(deployment, f"cannot remove {', '.join(names)}")
        time.sleep(_LOOK_S)


def down(deployment: str, address: str | None = None) -> tuple[str, ...]:
    """Remove all that a deployment holds: its controller, its ranks, their placement groups.

    Args:
        deployment: Its name.
        address: Its cluster; None for the one on this machine.

    Returns:
        What was removed; nothing where there was nothing.

    Raises:
        DeploymentError: No cluster answers, or something cannot be removed.
    """
    connection = connect(deployment, address or "auto")
    try:
        return remove_deployment(deployment)
    finally:
        disconnect(connection)
