"""Starts a deployment in the shell that is asked for, and imports no other."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rayserve_paged.core.config import DeploymentConfig
from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_cluster.ray_shell import RayShell
    from rayserve_paged.inprocess import InProcessShell

_BUILT_IN_MODELS: Final = ("fingerprint", "smollm2")


def with_absolute_paths(config: DeploymentConfig) -> DeploymentConfig:
    """Return the configuration with its paths whole, since ranks run in other directories."""
    if config.event_log_dir is not None:
        folder = Path(config.event_log_dir).expanduser().resolve()
        config = config.model_copy(update={"event_log_dir": str(folder)})
    path = Path(config.model.model).expanduser()
    if not path.exists() or config.model.model in _BUILT_IN_MODELS:
        return config
    model = config.model.model_copy(update={"model": str(path.resolve())})
    return config.model_copy(update={"model": model})


def start_deployment(
    config: DeploymentConfig, shell: str, address: str | None
) -> "InProcessShell | RayShell":
    """Start a deployment and wait until it is ready.

    Args:
        config: Of the deployment.
        shell: "ray" for actors on a Ray cluster, "inprocess" for threads of this process.
        address: Ray cluster to join; None to start one.

    Raises:
        InvalidInputError: There is no such shell, or a value of the configuration is not accepted.
        DeploymentError: It cannot be started.
    """
    # A machine without Ray runs the other shell, and a driver of Ray needs no kernels.
    if shell == "ray":
        from rayserve_cluster.ray_shell import RayShell

        return RayShell(config, address)
    if shell != "inprocess":
        raise InvalidInputError("shell", shell, "'ray' or 'inprocess'")
    if address is not None:
        raise InvalidInputError("address", address, "nothing where shell='inprocess'")
    from rayserve_paged.inprocess import InProcessShell

    return InProcessShell(config)
