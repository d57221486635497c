"""`rayserve-paged bench decode`: what the native attention is worth on this processor."""

import json
from typing import Annotated

import typer


def decode(
    model: Annotated[str, typer.Option(help="Model, as `generate` takes it.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    kv_dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, int8 or fp8.")] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokens per second of one replica, with torch's attention and with the native kernel's.

    Batches of 1, 8 and 32 cached prompts decode in this process on its CPUs, without Ray.
    """
    from rayserve_paged.experiments.decode_bench import decode_rates
    from rayserve_paged.load_config import load_config

    checked = load_config(
        flags={"model.model": model, "model.dtype": dtype, "model.kv_dtype": kv_dtype}
    ).model
    rates = decode_rates(
        model,
        ("torch", None),
        dtype=checked.dtype,
        kv_dtype=checked.kv_dtype,
        batch_sizes=(1, 8, 32),
        prompt_len=prompt_len,
        output_len=output_len,
        num_rounds=rounds,
    )
    pairs = iter(rates)
    for before in pairs:
        after = next(pairs)
        ratio = after.tokens_per_s / before.tokens_per_s
        if as_json:
            print(
                json.dumps(
                    {
                        "batch_size": before.batch_size,
                        "torch_tokens_per_s": round(before.tokens_per_s, 2),
                        "native_tokens_per_s": round(after.tokens_per_s, 2),
                        "ratio": round(ratio, 3),
                    }
                ),
                flush=True,
            )
            continue
        print(
            f"{before.batch_size:3d} decoding after {prompt_len} tokens: torch "
            f"{before.tokens_per_s:7.1f} tokens/s, native {after.tokens_per_s:7.1f} ({ratio:.2f} "
            f"times)",
            flush=True,
        )
