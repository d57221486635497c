"""`rayserve-paged bench perplexity`: what a dtype of the KV cache does to a model's predictions."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from rayserve_paged.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rayserve_paged.core.config import Dtype, KvDtype


def perplexity(
    model: Annotated[str, typer.Option(help="As `generate` takes it.")] = "smollm2",
    text: Annotated[
        Path | None, typer.Option(help="UTF-8; absent: the manual that Python has for help().")
    ] = None,
    num_tokens: Annotated[int, typer.Option(help="Of the text, from its start.")] = 20_000,
    window: Annotated[int, typer.Option(help="Tokens that are scored together, at most.")] = 2048,
    kv_dtype: Annotated[
        str, typer.Option(help="Of the cache, several with commas, beside fp32.")
    ] = "bf16,fp16,int8,fp8",
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Perplexity of a text with KV caches of several dtypes, and its ratio to that with fp32."""
    dtypes = _kv_dtypes(kv_dtype)
    weights = _dtype(dtype)
    from rayserve_paged.commands.profile import told_progress
    from rayserve_paged.experiments import perplexity_bench

    content = perplexity_bench.reference_manual() if text is None else _read(text)
    windows = perplexity_bench.windows_of(content, model, num_tokens, window)
    digest = hashlib.sha256(content.encode()).hexdigest()
    results = []
    with told_progress() as progress:
        progress(f"{dtypes[0]}: {num_tokens} tokens")
        for result in perplexity_bench.perplexities(windows, model, dtypes, weights):
            results.append(result)
            progress(f"{len(results)} of {len(dtypes)} dtypes done")
    if as_json:
        figures = {"text_sha256": digest, "num_tokens": num_tokens, "window": window}
        print(json.dumps(figures | {"kv": [dataclasses.asdict(result) for result in results]}))
        return
    name = "Python's manual" if text is None else str(text)
    print(f"{num_tokens} tokens of {name} (sha256 {digest[:16]}) in windows of {window}:")
    for result in results:
        print(
            f"{result.kv_dtype:5s} perplexity {result.value:9.5f}, "
            f"{result.ratio:8.6f} times that with fp32"
        )


def _kv_dtypes(given: str) -> "list[KvDtype]":
    from rayserve_paged.core.config import KvDtype

    known: tuple[KvDtype, ...] = get_args(KvDtype)
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            raise InvalidInputError("--kv-dtype", name, f"some of {', '.join(known)}")
    return ["fp32", *(each for each in known if each in names and each != "fp32")]


def _dtype(given: str) -> "Dtype":
    from rayserve_paged.core.config import Dtype

    known: tuple[Dtype, ...] = get_args(Dtype)
    for each in known:
        if each == given:
            return each
    raise InvalidInputError("--dtype", given, " or ".join(known))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("--text", str(path), f"a file of UTF-8 ({error})") from error
