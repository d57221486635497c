"""`rayserve-paged load`: many clients over HTTP, of which some leave, while processes die."""

import json
import sys
from typing import Annotated

import typer


def load(
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 200,
    duration_s: Annotated[float, typer.Option(min=1, help="Seconds.")] = 300.0,
    disconnects: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests whose clients leave early.")
    ] = 0.1,
    kills: Annotated[
        int, typer.Option(min=0, help="Kills, in turn of ranks, replicas and the controller.")
    ] = 0,
    ingress_kills: Annotated[int, typer.Option(min=0, help="Kills of ingress replicas.")] = 0,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of each.")] = 1,
    ingress_replicas: Annotated[int, typer.Option(min=1, help="Processes that answer HTTP.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of requests and victims.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load an endpoint of the fingerprint model on a local Ray cluster, and check every stream
    and every block. Ends with status 1 where something does not hold.
    """
    from rayserve_paged.experiments.http_load import HttpLoadConfig, as_fields, run_http_load

    config = HttpLoadConfig(
        num_clients=clients,
        duration_s=duration_s,
        disconnect_share=disconnects,
        num_kills=kills,
        num_ingress_kills=ingress_kills,
        num_replicas=replicas,
        tensor_parallel_size=tp,
        num_ingress_replicas=ingress_replicas,
        seed=seed,
    )
    verdict = run_http_load(config, lambda kill: print(kill, file=sys.stderr, flush=True))
    fields = as_fields(verdict)
    if as_json:
        print(json.dumps(fields))
    else:
        for kill in verdict.kills:
            print(kill)
        for name, value in fields.items():
            if name not in ("problems", "kills"):
                print(f"{name}={value}")
        print(f"problems: {len(verdict.problems)}")
        for problem in verdict.problems[:20]:
            print(f"  {problem}")
    if verdict.problems:
        raise typer.Exit(1)
