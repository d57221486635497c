"""The command `rayserve-paged`.

Results are on stdout alone; logs, progress and errors are on stderr. Exit status: 0 done, 1 a bug,
2 something that was asked for is not accepted or cannot be had (said in one line), 130 interrupted.
"""

import os
import sys
from typing import Annotated

import typer

from rayserve_paged import __version__
from rayserve_paged.commands.analyze import analyze
from rayserve_paged.commands.bench import bench
from rayserve_paged.commands.build_kernels import build_kernels
from rayserve_paged.commands.chaos import chaos
from rayserve_paged.commands.demo import demo
from rayserve_paged.commands.down import down
from rayserve_paged.commands.experiment import experiment
from rayserve_paged.commands.generate import generate
from rayserve_paged.commands.http_load import load
from rayserve_paged.commands.keys import keys
from rayserve_paged.commands.plan import plan
from rayserve_paged.commands.profile import profile
from rayserve_paged.commands.replay import replay
from rayserve_paged.commands.serve import serve
from rayserve_paged.commands.simulate import simulate
from rayserve_paged.core.errors import PagedError, in_one_line


def _version(asked: bool) -> None:
    if asked:
        print(f"rayserve-paged {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="rayserve-paged",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """A distributed, multi-GPU KV-cache runtime for LLM serving on Ray."""


app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.command()(serve)
app.command()(generate)
app.command()(demo)
app.command()(down)
app.command()(build_kernels)
app.command()(analyze)
app.command()(simulate)
app.command()(plan)
app.command()(replay)
app.command()(profile)
app.command()(experiment)
app.command()(chaos)
app.command()(load)


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        app()
    except PagedError as error:
        print(f"rayserve-paged: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader has enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
