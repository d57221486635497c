"""`rayserve-paged build-kernels`: compiles the native kernel before the first rank needs it."""

import sys

import typer


def build_kernels() -> None:
    """Compile the native kernel for this processor into the cache, unless it is there."""
    from rayserve_kernels.native_build import BuildError, build_library, widest
    from rayserve_paged.load_config import user_cache_dir

    try:
        print(build_library(user_cache_dir(), widest()))
    except BuildError as error:
        print(f"no native attention, torch computes it instead: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
