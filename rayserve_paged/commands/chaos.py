"""`rayserve-paged chaos`: random faults, and whether anything that must hold is broken by them."""

import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.experiments.chaos_case import ChaosCase
    from rayserve_paged.experiments.chaos_seeds import Verdict
    from rayserve_paged.experiments.kill_times import KillTimes
    from rayserve_paged.experiments.live_chaos import LiveChaosConfig
    from rayserve_paged.sim.faults import FaultPlan

_Simulate = Annotated[bool, typer.Option("--simulate", help="On a simulated cluster.")]
_Live = Annotated[
    bool, typer.Option("--live", help="On a Ray cluster, whose processes are killed as it serves.")
]
_Seeds = Annotated[
    str | None,
    typer.Option(
        help="A..B, both included, or one seed; live: one, or none for 0.", metavar="A..B"
    ),
]
_Model = Annotated[str, typer.Option(help="Live: the model that is served.")]
_Kills = Annotated[int, typer.Option(help="Live: how many ranks are killed or stopped.", min=1)]
_ControllerEvery = Annotated[
    int, typer.Option(help="Live: every so many-th kill is the controller's; 0: none.", min=0)
]
_Address = Annotated[str | None, typer.Option(help="Live: a Ray cluster; absent: start one.")]
_Plan = Annotated[
    Path | None, typer.Option(help="A fault plan in YAML or JSON in place of the seed's own.")
]
_Requests = Annotated[
    str | None, typer.Option(help="Numbers of the requests to serve, with commas; absent: all.")
]
_Jobs = Annotated[
    int | None, typer.Option(help="Seeds at once; absent: as many as there are cores.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def chaos(
    seeds: _Seeds = None,
    simulate: _Simulate = False,
    live: _Live = False,
    model: _Model = "fingerprint",
    kills: _Kills = 20,
    kill_controller_every: _ControllerEvery = 0,
    address: _Address = None,
    plan: _Plan = None,
    requests: _Requests = None,
    jobs: _Jobs = None,
    as_json: _Json = False,
) -> None:
    """Run random workloads with random faults; check every stream and every ledger. Ends with
    status 1 where something does not hold.
    """
    if simulate == live:
        raise InvalidInputError("--simulate", simulate, "one of --simulate and --live")
    if live:
        if plan is not None or requests is not None:
            given = "--plan" if plan is not None else "--requests"
            raise InvalidInputError(given, plan or requests, "nothing with --live")
        from rayserve_paged.experiments.live_chaos import LiveChaosConfig

        _chaos_live(
            LiveChaosConfig(
                model=model,
                num_kills=kills,
                kill_controller_every=kill_controller_every,
                seed=_one_seed(seeds or "0"),
                address=address,
            ),
            as_json=as_json,
        )
        return
    if seeds is None:
        raise InvalidInputError("--seeds", seeds, "A..B with 0 <= A <= B, or one seed")
    first, last = _range(seeds)
    if jobs is not None and jobs < 1:
        raise InvalidInputError("--jobs", jobs, "at least 1")
    start = time.monotonic()
    if plan is not None or requests is not None:
        from rayserve_paged.experiments.chaos_seeds import try_case

        verdicts = [try_case(case) for case in _cases(first, last, plan, requests)]
    else:
        verdicts = _tell_progress(_run(first, last, jobs or len(os.sched_getaffinity(0))))
    seconds = time.monotonic() - start
    bad = [verdict for verdict in verdicts if verdict.violation is not None]
    per_minute = 60.0 * len(verdicts) / seconds
    if as_json:
        figures = {
            "num_seeds": len(verdicts),
            "num_violations": len(bad),
            "seeds_per_minute": per_minute,
            "num_events": sum(verdict.num_events for verdict in verdicts),
            "num_checks": sum(verdict.num_checks for verdict in verdicts),
            "num_tokens": sum(verdict.num_tokens for verdict in verdicts),
            "num_lives": sum(verdict.num_lives for verdict in verdicts),
            "violations": [
                {"seed": one.seed, "violation": one.violation, "plan": one.plan_yaml} for one in bad
            ],
        }
        print(json.dumps(figures))
    else:
        for verdict in bad:
            print(_describe(verdict))
        print(
            f"{len(verdicts):,} seeds, {len(bad)} with a violation; "
            f"{sum(v.num_tokens for v in verdicts):,} tokens, "
            f"{sum(v.num_lives for v in verdicts):,} lives of replicas, "
            f"{sum(v.num_checks for v in verdicts):,} checks; {per_minute:,.0f} seeds per minute"
        )
    if bad:
        raise typer.Exit(1)


def _one_seed(seeds: str) -> int:
    seed, last = _range(seeds)
    if seed != last:
        raise InvalidInputError("--seeds", seeds, "one seed with --live")
    return seed


def _chaos_live(config: "LiveChaosConfig", *, as_json: bool) -> None:
    from rayserve_paged.experiments.live_chaos import run_live_chaos

    numbers = itertools.count(1)

    def show(kill: "KillTimes") -> None:
        print(f"{next(numbers):3}. {kill}", flush=True)

    verdict = run_live_chaos(config, None if as_json else show)
    if as_json:
        print(json.dumps(dataclasses.asdict(verdict)))
    else:
        for problem in verdict.problems:
            print(f"broken: {problem}")
        print(
            f"{len(verdict.kills)} kills, {len(verdict.problems)} problems; "
            f"{verdict.num_requests:,} requests with {verdict.num_tokens:,} tokens, "
            f"{verdict.num_recovered:,} times one was on a replica that was killed"
        )
        print(f"medians: {_medians(verdict.kills)}")
    if verdict.problems:
        raise typer.Exit(1)


def _medians(kills: "Sequence[KillTimes]") -> str:
    figures = {
        "noticed": [kill.detect_s for kill in kills if kill.detect_s is not None],
        "started again": [kill.restart_s for kill in kills if kill.restart_s is not None],
        "went on": [one_s for kill in kills for one_s in kill.continue_s],
    }
    return ", ".join(
        f"{name} after {statistics.median(times):.2f} s (the last after {max(times):.2f} s)"
        for name, times in figures.items()
        if times
    )


def _range(seeds: str) -> tuple[int, int]:
    first, dots, last = seeds.partition("..")
    accepted = "A..B with 0 <= A <= B, or one seed of at least 0"
    try:
        begin, end = int(first), int(last if dots else first)
    except ValueError:
        raise InvalidInputError("--seeds", seeds, accepted) from None
    if not 0 <= begin <= end:
        raise InvalidInputError("--seeds", seeds, accepted)
    return begin, end


def _cases(first: int, last: int, plan: Path | None, requests: str | None) -> "Iterator[ChaosCase]":
    from rayserve_paged.experiments.chaos_case import draw_case, with_plan
    from rayserve_paged.experiments.chaos_shrink import with_requests

    given = None if plan is None else _read_plan(plan)
    numbers = None if requests is None else _numbers(requests)
    for seed in range(first, last + 1):
        case = draw_case(seed)
        if given is not None:
            case = with_plan(case, given)
        if numbers is not None:
            _check_numbers(case, numbers)
            case = with_requests(case, numbers)
        yield case


def _check_numbers(case: "ChaosCase", numbers: "Sequence[int]") -> None:
    known = [one.number for one in case.requests]
    for number in numbers:
        if number not in known:
            accepted = f"numbers of requests of seed {case.seed}: {', '.join(map(str, known))}"
            raise InvalidInputError("--requests", number, accepted)


def _read_plan(path: Path) -> "FaultPlan":
    import yaml

    from rayserve_paged.sim.faults import FaultPlan

    try:
        return FaultPlan.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise InvalidInputError("--plan", str(path), f"a file ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError("--plan", str(path), f"a file of YAML ({error})") from error
    except ValidationError as error:
        one = error.errors()[0]
        field = ".".join(map(str, one["loc"])) or "the plan"
        raise InvalidInputError(f"{path}: {field}", one["input"], one["msg"]) from error


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InvalidInputError("--requests", text, "numbers with commas between them") from None


def _run(first: int, last: int, jobs: int) -> "Iterator[Verdict]":
    from rayserve_paged.experiments.chaos_seeds import try_seed

    seeds = range(first, last + 1)
    if jobs == 1 or len(seeds) == 1:
        yield from map(try_seed, seeds)
        return
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        size = max(1, min(50, len(seeds) // (4 * jobs)))
        yield from pool.map(try_seed, seeds, chunksize=size)


def _tell_progress(verdicts: "Iterator[Verdict]") -> "list[Verdict]":
    from rich.console import Console
    from rich.progress import track

    console = Console(file=sys.stderr)
    return list(track(verdicts, "seeds", console=console, disable=not console.is_terminal))


def _describe(verdict: "Verdict") -> str:
    return (
        f"seed {verdict.seed}: {verdict.violation}\n"
        f"  again: rayserve-paged chaos --simulate --seeds {verdict.seed}\n"
        f"  small: rayserve-paged chaos --simulate --seeds {verdict.seed} "
        f"--requests {','.join(map(str, verdict.requests))} --plan FILE, with FILE\n"
        + "".join(f"    {line}\n" for line in verdict.plan_yaml.splitlines())
    )
