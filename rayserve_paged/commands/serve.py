"""`rayserve-paged serve`: an OpenAI-compatible endpoint over a deployment."""

from pathlib import Path
from typing import Annotated

import typer

_Panel = "Deployment"


def _deployment(text: str, *names: str) -> object:
    return typer.Option(*names, help=text, rich_help_panel=_Panel)


def serve(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face directory, GGUF file, smollm2 or fingerprint.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the sections of a deployment, and `serve`.")
    ] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.")
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="Tenants and their hashed API keys; absent: no keys.")
    ] = None,
    ingress_replicas: Annotated[
        int | None, typer.Option(help="Processes that answer HTTP (1).")
    ] = None,
    tp: Annotated[int | None, _deployment("Ranks of each replica (1).", "--tp")] = None,
    replicas: Annotated[int | None, _deployment("Replicas (1).")] = None,
    dtype: Annotated[str | None, _deployment("fp32, bf16 or fp16 (fp32).")] = None,
    kv_dtype: Annotated[str | None, _deployment("fp32, bf16, fp16, int8 or fp8.")] = None,
    block_size: Annotated[int | None, _deployment("Slots per block (16).")] = None,
    num_blocks: Annotated[int | None, _deployment("Blocks of each rank's pool.")] = None,
    cache_memory: Annotated[
        str | None, _deployment("Bytes of each rank's pool, such as 512MiB.")
    ] = None,
    max_model_len: Annotated[
        int | None, _deployment("Most prompt and output tokens; the model's limit.")
    ] = None,
    name: Annotated[str | None, _deployment("Of the endpoint, unique on its cluster.")] = None,
    address: Annotated[
        str | None, _deployment("Ray cluster to join, or auto; absent: start one here.")
    ] = None,
    shell: Annotated[str, _deployment("ray, or inprocess for threads.")] = "ray",
) -> None:
    """Serve a model over HTTP until interrupted.

    Everything else is configured by the file, or by RAYSERVE_ variables.
    """
    from rayserve_paged.serve.run_command import run

    flags = {
        "name": name,
        "model.model": model,
        "model.dtype": dtype,
        "model.kv_dtype": kv_dtype,
        "model.max_model_len": max_model_len,
        "cache.block_size": block_size,
        "cache.num_blocks": num_blocks,
        "cache.memory": cache_memory,
        "parallel.tensor_parallel_size": tp,
        "parallel.num_replicas": replicas,
        "serve.served_model_name": served_model_name,
        "serve.keys_file": None if keys_file is None else str(keys_file),
        "serve.num_ingress_replicas": ingress_replicas,
    }
    run(config, flags, host=host, port=port, address=address, shell=shell)
