"""`rayserve-paged down`: removes all that a deployment holds on a Ray cluster."""

from typing import Annotated

import typer


def down(
    name: Annotated[str, typer.Option(help="Name of the deployment.")] = "default",
    address: Annotated[
        str | None, typer.Option(help="Ray cluster; this machine's by default.")
    ] = None,
) -> None:
    """Take a deployment down: its controller, its ranks, their placement groups."""
    from rayserve_cluster import launch

    removed = launch.down(name, address)
    for what in removed:
        print(f"removed {what}")
    if not removed:
        print(f"deployment {name!r} holds nothing")
