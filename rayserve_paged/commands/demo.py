"""`rayserve-paged demo`: replicas of a small model answer prompts that share a beginning."""

from typing import Annotated

import typer


def demo(
    model: Annotated[str, typer.Option(help="A chat model.")] = "smollm2",
    tp: Annotated[int, typer.Option(help="Ranks of each replica.")] = 2,
    replicas: Annotated[int, typer.Option(help="Replicas.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 40,
    shell: Annotated[str, typer.Option(help="ray, or inprocess for threads.")] = "ray",
) -> None:
    """Answer a handful of prompts, then show who shared which blocks."""
    import asyncio
    import contextlib

    from rich.console import Console

    from rayserve_paged.core.sampling_params import SamplingParams
    from rayserve_paged.demo import NUM_BLOCKS, demo_waves, run_demo
    from rayserve_paged.llm import LLM

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    console, progress = Console(), Console(stderr=True)
    text = f"starting {replicas} replicas of {model}, {tp} ranks each"
    with progress.status(text) if progress.is_terminal else contextlib.nullcontext():
        llm = LLM(
            model,
            tensor_parallel_size=tp,
            num_replicas=replicas,
            num_blocks=NUM_BLOCKS,
            shell=shell,
            name="demo",
        )
    with llm:
        asyncio.run(run_demo(llm, demo_waves(), params, console))
