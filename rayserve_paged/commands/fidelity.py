"""`rayserve-paged bench fidelity`: the simulation beside two live runs of the same workload."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.profiling.fidelity import Fidelity
    from rayserve_paged.sim.synthetic import SyntheticWorkload


def fidelity(
    out: Annotated[
        Path, typer.Option(help="Folder for the profile, the event logs and fidelity.json.")
    ],
    model: Annotated[str, typer.Option(help="As `generate` takes it.")] = "smollm2",
    tp: Annotated[int, typer.Option(help="Ranks of each replica.")] = 1,
    replicas: Annotated[int, typer.Option(help="Replicas, all on this machine.")] = 2,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    requests: Annotated[int, typer.Option(help="Requests of each run.")] = 200,
    load: Annotated[
        float, typer.Option(help="Share of the time in which the replicas are to be busy, about.")
    ] = 0.5,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences of a step, at most.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step, at most.")] = 256,
    profile: Annotated[
        Path | None,
        typer.Option(help="Measured here before, with or without a live run; absent: measure now."),
    ] = None,
    passes: Annotated[int, typer.Option(help="Of the measuring.")] = 3,
    live_requests: Annotated[int, typer.Option(help="Of the profile's own live run.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Profile a model here, serve a workload live on Ray, twice, and in simulation; compare."""
    from rayserve_paged.commands.profile import told_progress
    from rayserve_paged.load_config import load_config
    from rayserve_paged.profiling.fidelity import compare_runs
    from rayserve_paged.profiling.measure import Effort, add_live, measure_steps
    from rayserve_paged.profiling.workload import suitable_workload
    from rayserve_paged.sim.profile import read_profile, write_profile
    from rayserve_paged.sim.profiled_cost import ProfiledCost
    from rayserve_paged.sim.synthetic import generate

    flags = {
        "name": "fidelity",
        "model.model": model,
        "model.dtype": dtype,
        "batch.max_num_seqs": max_num_seqs,
        "batch.max_num_batched_tokens": max_num_batched_tokens,
        "parallel.tensor_parallel_size": tp,
        "parallel.num_replicas": replicas,
    }
    config = load_config(flags=flags)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        accepted = f"a folder that can be written ({error.strerror})"
        raise InvalidInputError("--out", str(out), accepted) from error
    with told_progress() as progress:
        if profile is None:
            measured, _errors = measure_steps(config, Effort(num_passes=passes), progress)
            write_profile(measured, out / "profile.json")
        else:
            measured = read_profile(profile)
        if measured.served is None:
            measured, _figures_of_live = add_live(measured, config, live_requests, progress)
            write_profile(measured, out / "profile.json")
        workload = suitable_workload(ProfiledCost(measured), requests, replicas, load)
        progress(f"{requests} requests live, twice, and simulated")
        result = compare_runs(config, measured, list(generate(workload, seed)), out)
    figures = _figures(result, workload)
    (out / "fidelity.json").write_text(json.dumps(figures, indent=1) + "\n")
    if as_json:
        print(json.dumps(figures))
    else:
        _print_table(result)


def _figures(result: "Fidelity", workload: "SyntheticWorkload") -> dict[str, object]:
    return {
        "workload": workload.model_dump(),
        "comparisons": {
            one.name: {
                "live": list(one.live),
                "simulated": one.simulated,
                "error": one.error,
                "live_difference": one.live_difference,
                "is_within_aim": one.is_within_aim,
            }
            for one in result.comparisons
        },
        "live": [dataclasses.asdict(figures) for figures in result.live],
        "simulated": dataclasses.asdict(result.simulated),
        "replays_identically": result.replays_identically,
    }


def _print_table(result: "Fidelity") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result.simulated.num_requests} requests, live twice and simulated")
    table.add_column("")
    for heading in ("live", "again", "differ", "simulated", "error", "in aim"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in result.comparisons:
        table.add_row(
            one.name,
            *(f"{value:.4g}" for value in one.live),
            f"{one.live_difference:.1%}",
            f"{one.simulated:.4g}",
            f"{one.error:.1%}",
            "yes" if one.is_within_aim else "no",
        )
    console = Console()
    console.print(table)
    replayed = "identically" if result.replays_identically else "DIFFERENTLY"
    console.print(f"The event logs of the live runs replay {replayed} in the core.")
