"""The ingress on Ray Serve: a replica that answers HTTP, and is a consumer of the deployment."""

import concurrent.futures
from typing import Any, Final

from fastapi import FastAPI
from ray.serve._private import replica as serve_replica

from rayserve_cluster.ray_shell import RayShell
from rayserve_paged.load_config import user_cache_dir
from rayserve_paged.model.loader import resolve_model
from rayserve_paged.model.tokenizer import load_tokenizer
from rayserve_paged.serve.api import create_app
from rayserve_paged.serve.serve_config import EndpointConfig
from rayserve_paged.serve.service import Service
from rayserve_paged.shells import with_absolute_paths

_NO_PORT: Final = 0


class Ingress:
    """One process that answers HTTP.

    It joins the deployment behind the endpoint, or creates it where it is the first, and is one of
    its owners until it ends. As one of several it can die or be replaced at any time: the
    deployment goes on, and what it had open is cancelled by its consumer lease.

    Args:
        config: Of the endpoint.
    """

    def __init__(self, config: EndpointConfig) -> None:
        _keep_off_the_network()
        deployment = with_absolute_paths(config.deployment())
        # Not on the loop that runs this: starting blocks, on Ray too.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            loading = pool.submit(
                lambda: load_tokenizer(resolve_model(deployment.model.model, user_cache_dir()))
            )
            starting = pool.submit(RayShell, deployment, "auto", is_shared=True)
            self._shell = starting.result()
            self._service = Service(self._shell, loading.result(), config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Ray Serve calls this once, after the constructor.

        Ray Serve's proxy gives every answer the id of its request.
        """
        return create_app(self._service, on_close=self._shell.shutdown, adds_request_id=False)


def _keep_off_the_network() -> None:
    """Keep this process from serving Ray Serve's calls between deployments.

    Ray Serve has every replica listen on all interfaces for calls that other deployments make by
    gRPC, and unpickles what comes there from anyone. Nothing calls an ingress so: the proxies reach
    it as an actor.
    """

    def refuse(server: object, address: str) -> int:
        del server, address
        return _NO_PORT

    # Nothing public turns it off (Ray 2.60); a test lists the sockets that an endpoint opens.
    module: Any = serve_replica
    module.add_port_to_grpc_server = refuse
