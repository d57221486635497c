"""`rayserve-paged build-kernels`: compiles the native kernel before the first rank needs it."""

import sys
from typing import Annotated

import typer


def build_kernels(
    every: Annotated[
        bool,
        typer.Option(
            "--every", help="For every instruction set, as an image needs that runs elsewhere."
        ),
    ] = False,
) -> None:
    """Compile the native kernel for this processor into the cache, unless it is there."""
    from rayserve_kernels.native_build import BuildError, build_library, buildable_widths, widest
    from rayserve_paged.load_config import user_cache_dir

    try:
        for width in buildable_widths() if every else (widest(),):
            print(build_library(user_cache_dir(), width))
    except BuildError as error:
        print(f"no native attention, torch computes it instead: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
