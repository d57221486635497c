"""`rayserve-paged bench`: benchmarks that print what was measured."""

import json
import statistics
from typing import Annotated

import typer

from rayserve_paged.commands.decode import decode
from rayserve_paged.commands.fidelity import fidelity
from rayserve_paged.commands.perplexity import perplexity

bench = typer.Typer(help="Measure parts of the system.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Keep the subcommands' names, however few there are."""


bench.command()(fidelity)
bench.command()(decode)
bench.command()(perplexity)


@bench.command()
def control(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Cost of the control plane, without a model: µs per step and per request, bytes per block."""
    from rayserve_paged.experiments import control_bench

    figures = {f"step_us_{n}": control_bench.step_us(n) for n in control_bench.BATCH_SIZES}
    figures |= control_bench.request_us()
    figures["manager_bytes_per_block"] = control_bench.manager_bytes_per_block()
    if as_json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
        return
    for n in control_bench.BATCH_SIZES:
        print(f"{n:5d} decoding: {figures[f'step_us_{n}']:8.1f} µs per step")
    ratio = figures["hash_us"] / figures["sha256_floor_us"]
    print(
        f"a request of {control_bench.PROMPT_LEN} tokens: {figures['request_us']:.1f} µs, of which "
        f"hashing {figures['hash_us']:.1f} µs ({ratio:.2f} times bare SHA-256), "
        f"hit rate {figures['hit_rate']:.3f}; {figures['pack_us']:.1f} µs before, to pack its ids"
    )
    print(
        f"a pool of 1,000,000 cached blocks: {figures['manager_bytes_per_block']:.1f} bytes per "
        f"block for ledger, keys and order of eviction"
    )


@bench.command()
def placement(
    actor: Annotated[
        bool, typer.Option("--actor", help="Through the controller's actor on a local Ray cluster.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a controller takes in with 8, 128 and 1,024 replicas, per second.

    Placements of prompts of 1,024 tokens, and keys that replicas report: on one core and without
    a network, or with --actor on Ray, where assignments and reports are sent, and replicas pinged.
    """
    from rayserve_paged.experiments import placement_bench

    measure = placement_bench.rates
    if actor:  # Else it needs no Ray.
        from rayserve_paged.experiments import actor_placement_bench

        measure = actor_placement_bench.rates
    figures = {num: measure(num) for num in placement_bench.NUM_REPLICAS}
    if as_json:
        flat = {
            f"{name}_{num}": round(rate, 3)
            for num, rates in figures.items()
            for name, rate in rates.items()
        }
        print(json.dumps(flat))
        return
    for num, rates in figures.items():
        last = (
            f"{rates['controller_us']:.0f} µs of the controller's process for each"
            if actor
            else f"hit rate {rates['hit_rate']:.3f}"
        )
        print(
            f"{num:5d} replicas: {rates['placements_per_s']:8,.0f} placements/s, "
            f"{rates['directory_updates_per_s']:10,.0f} keys/s in "
            f"{rates['reports_per_s']:7,.0f} reports/s, {last}"
        )


@bench.command()
def http(
    streams: Annotated[str, typer.Option(help="Streams at once, with commas.")] = "1,8,64,200",
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each stream.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of rounds at each.")] = 11,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What HTTP costs a token beside `LLM.stream`, on a local Ray cluster with the fingerprint
    model, in alternating rounds: µs of wall time and of each process per token, and the delay of a
    token of one stream alone.
    """
    from rayserve_paged.core.errors import InvalidInputError
    from rayserve_paged.experiments.http_bench import http_delay, http_overheads, percentile

    try:
        concurrencies = [int(part) for part in streams.split(",")]
    except ValueError:
        concurrencies = []
    if not concurrencies or min(concurrencies) < 1:
        raise InvalidInputError("--streams", streams, "integers of at least 1, with commas")
    for one in http_overheads(concurrencies, tokens, rounds):
        direct, through = statistics.median(one.direct_us), statistics.median(one.http_us)
        cpu = {name: round(us, 1) for name, us in one.cpu_us.items()}
        figures = {
            "num_streams": one.num_streams,
            "direct_us": round(direct, 1),
            "http_us": round(through, 1),
            "overhead_median_us": round(one.median_us, 1),
            "overhead_p99_us": round(one.p99_us, 1),
            "ratio": round(through / direct, 3),
            "cpu_us": cpu,
        }
        text = (
            f"{one.num_streams:4d} streams: {direct:8.1f} µs per token direct, {through:8.1f} over "
            f"HTTP ({through / direct:.2f} times); overhead {one.median_us:.1f} µs in the median, "
            f"{one.p99_us:.1f} in the 99th percentile of {rounds} rounds; processes, µs per token: "
            + ", ".join(f"{name} {us}" for name, us in cpu.items())
        )
        print(json.dumps(figures) if as_json else text, flush=True)
    delay = http_delay(tokens, rounds)
    figures = {
        "delay_direct_median_us": round(percentile(delay.direct_us, 0.5), 1),
        "delay_http_median_us": round(percentile(delay.http_us, 0.5), 1),
        "delay_added_median_us": round(delay.added_median_us, 1),
        "delay_added_p99_us": round(delay.added_p99_us, 1),
    }
    text = (
        f"one stream alone, from the end of a token's step until it is read: "
        f"{figures['delay_direct_median_us']} µs direct, {figures['delay_http_median_us']} over "
        f"HTTP; HTTP adds {delay.added_median_us:.0f} µs to the median and "
        f"{delay.added_p99_us:.0f} to the 99th percentile"
    )
    print(json.dumps(figures) if as_json else text)


@bench.command()
def disconnects(
    streams: Annotated[int, typer.Option(min=0, help="Streams that others read meanwhile.")] = 64,
    count: Annotated[int, typer.Option(min=1, help="Clients that leave.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of when they leave.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How soon the blocks of a client that leaves its stream are free, on a local Ray cluster with
    the fingerprint model. Ends with status 1 where one took more than two steps and 50 ms.
    """
    from rayserve_paged.experiments.disconnect_bench import departures
    from rayserve_paged.experiments.http_load import quantiles

    found = departures(streams, count, seed)
    num_late = sum(not one.is_soon for one in found)
    figures = {
        "num_streams": streams,
        "num_departures": count,
        "told_s": quantiles([one.told_s for one in found]),
        "free_s": quantiles([one.free_s for one in found]),
        "num_steps": quantiles([one.num_steps for one in found]),
        "num_late": num_late,
    }
    if as_json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}={value}")
    if num_late:
        raise typer.Exit(1)
