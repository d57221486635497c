"""The application for `serve run` and for Serve's configuration files."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from rayserve_paged.load_config import load_config_as
from rayserve_paged.serve.ingress import Ingress
from rayserve_paged.serve.serve_config import EndpointConfig

_MAX_OPEN_CALLS = 100_000
"""An ingress has its own bound, and says in OpenAI's shape when it is reached."""


def app(args: Mapping[str, object]) -> Application:
    """Build the application: `rayserve_paged.serve.build:app`.

    Args:
        args: The sections of `EndpointConfig`, nested or with dotted names, as in
            `serve run rayserve_paged.serve.build:app model.model=smollm2 serve.max_prompts=8`.
            What they leave out is taken from the RAYSERVE_ environment of the process that
            builds, else from the defaults.

    Raises:
        InvalidInputError: A name is unknown, or a value is refused.
    """
    return build(load_config_as(EndpointConfig, flags=args))


def build(config: EndpointConfig) -> Application:
    """Build the application of a checked configuration."""
    # Ray's annotations take the class for what it returns.
    ingress: Any = serve.ingress()(Ingress)
    deployment: Any = serve.deployment(
        ingress,
        name="ingress",
        num_replicas=config.serve.num_ingress_replicas,
        ray_actor_options={"num_cpus": config.serve.ingress_num_cpus},
        max_ongoing_requests=_MAX_OPEN_CALLS,
        graceful_shutdown_timeout_s=config.serve.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        # Every request has a line of our own.
        logging_config=LoggingConfig(enable_access_log=False),
    )
    application: Application = deployment.bind(config.with_absolute_paths())
    return application
