"""`rayserve-paged profile`: measures steps, messages and the start of a model on this machine."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rayserve_paged.profiling.grid import HeldOut
    from rayserve_paged.profiling.live import LiveFigures


@contextlib.contextmanager
def told_progress() -> Iterator[Callable[[str], object]]:
    """Give what shows on stderr how far a measurement is, where a person watches."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update


def profile(
    out: Annotated[Path, typer.Option(help="Where to write the profile.")],
    model: Annotated[str, typer.Option(help="As `generate` takes it.")] = "smollm2",
    tp: Annotated[int, typer.Option(help="Ranks of each replica.")] = 1,
    replicas: Annotated[
        int, typer.Option(help="Replicas of this machine that run steps at once.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    block_size: Annotated[int, typer.Option(help="Slots per block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences of a step, at most.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step, at most.")] = 512,
    max_context: Annotated[
        int, typer.Option(help="Tokens in the cache of a sequence, at most; beyond, lines go on.")
    ] = 512,
    passes: Annotated[int, typer.Option(help="Times that every step is gone through.")] = 3,
    live_requests: Annotated[
        int, typer.Option(help="Requests of a live run on Ray, for messages; 0 for none.")
    ] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a model here, for `simulate --profile`, and print how well steps are predicted."""
    from rayserve_paged.load_config import load_config
    from rayserve_paged.profiling.measure import Effort, add_live, measure_steps
    from rayserve_paged.sim.profile import write_profile

    flags = {
        "name": "profile",
        "model.model": model,
        "model.dtype": dtype,
        "cache.block_size": block_size,
        "batch.max_num_seqs": max_num_seqs,
        "batch.max_num_batched_tokens": max_num_batched_tokens,
        "parallel.tensor_parallel_size": tp,
        "parallel.num_replicas": replicas,
    }
    config = load_config(flags=flags)
    live = None
    with told_progress() as progress:
        measured, held_out = measure_steps(config, Effort(max_context, passes), progress)
        # An hour's measurements are not lost where Ray does not start.
        write_profile(measured, out)
        if live_requests:
            measured, live = add_live(measured, config, live_requests, progress)
            write_profile(measured, out)
    if as_json:
        print(json.dumps({"profile": str(out)} | _figures(held_out, live)))
    else:
        print(f"{out}: {len(measured.tables)} tables of {measured.model}")
        _print_errors(held_out, live)


def _print_errors(held_out: "HeldOut", live: "LiveFigures | None") -> None:
    print(
        f"{held_out.num_steps} steps that are not in them: predicted with an error of "
        f"{held_out.mean_error:.1%} on average, P90 {held_out.p90_error:.1%}"
    )
    if live is None:
        return
    served, messages = live.served, live.messages
    print(
        f"{live.num_steps} steps of a live run: {served.scale:.3f} times the tables and "
        f"{served.extra_s * 1e3:.2f} ms; with that an error of {live.mean_error:.1%} on average, "
        f"P90 {live.p90_error:.1%}; one in ten took {served.ratios[len(served.ratios) // 10]:.2f} "
        f"times as long or less, one in ten {served.ratios[-len(served.ratios) // 10]:.2f} or more"
    )
    print(
        f"messages: {messages.submit_s * 1e3:.2f} ms to the controller, "
        f"{messages.assign_s * 1e3:.2f} ms to a replica, "
        f"{messages.deliver_s * 1e3:.2f} ms to the reader; start {live.start_s:.1f} s"
    )


def _figures(held_out: "HeldOut", live: "LiveFigures | None") -> dict[str, object]:
    figures: dict[str, object] = {"held_out": dataclasses.asdict(held_out), "live": None}
    if live is not None:
        figures["live"] = dataclasses.asdict(live) | {
            "messages": live.messages.model_dump(),
            "served": live.served.model_dump(),
        }
    return figures
