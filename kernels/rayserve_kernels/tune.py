"""Refresh the table of launch configurations on the GPU that is here.

`python -m rayserve_kernels.tune`. For each key of the table it tries a grid of configurations,
refuses those that spill, do not fit, or differ from float64 by more than rounding explains, times
the others in turn, and writes what it keeps after each key. Without `--numerics` results keep their
bits: tile lengths and splits stay as they are, and of the other fields only what gives the present
row's bits is kept (`gpu/tuning.py` says why). With it they may change, in more trials; and whatever
is kept, a table that changed has another digest, so caches are not shared with those of before.
"""

import argparse
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rayserve_kernels.gpu import tuning
from rayserve_kernels.gpu.configs import (
    Key,
    Kind,
    LaunchConfig,
    LaunchTable,
    Width,
    gpu_family,
)

_TABLE = Path(tuning.__file__).parent / "launch_configs.json"


def main() -> None:
    """Tune what is asked for, or list what would be tried."""
    parser = argparse.ArgumentParser(prog="python -m rayserve_kernels.tune", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="list what would be tried; no GPU")
    parser.add_argument("--gpu", help="family to list, such as sm90; with --dry-run only")
    parser.add_argument("--numerics", action="store_true", help="results may change their bits")
    parser.add_argument("--head-dim", type=int, nargs="+", help="of the keys; all by default")
    parser.add_argument("--width", choices=typing.get_args(Width), nargs="+", help="likewise")
    parser.add_argument("--kind", choices=typing.get_args(Kind), nargs="+", help="likewise")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each")
    parser.add_argument("--output", type=Path, default=_TABLE, help="by default the shipped table")
    chosen = parser.parse_args()
    if chosen.gpu and not chosen.dry_run:
        parser.error("--gpu: only with --dry-run; what is tuned is the GPU that is here")
    if not chosen.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --dry-run would be accepted")
    if chosen.dry_run and not chosen.gpu and not torch.cuda.is_available():
        parser.error("--dry-run without a GPU: expected --gpu, such as --gpu sm90")
    table = LaunchTable.read()
    gpu = chosen.gpu or gpu_family(torch.device("cuda", torch.cuda.current_device()))
    keys = [key for key in tuning.keys_of(table, gpu) if _is_chosen(key, chosen)]
    if chosen.dry_run:
        for key in keys:
            for config in tuning.candidates(table, key, chosen.numerics):
                print(*key, _text(config), "present" * (config == tuning.present(table, key)))
    else:
        _tune(table, keys, chosen)


def _tune(table: LaunchTable, keys: list[Key], chosen: argparse.Namespace) -> None:
    # Here alone: they need triton.
    from rayserve_kernels.gpu_bench.run import describe
    from rayserve_kernels.gpu_bench.timing import EventTimer
    from rayserve_kernels.gpu_bench.trials import Trials, cases_of

    device = torch.device("cuda", torch.cuda.current_device())
    timer, about = EventTimer(device), describe(device)
    # Beside the table, which only the shipped one's place is called otherwise for.
    path = chosen.output.with_name(tuning.PROVENANCE.name)
    provenance = tuning.read_provenance(path) if path.exists() else {}
    with torch.inference_mode():
        for key in keys:
            timed, checked = cases_of(key)
            trials = Trials(device, table, key, chosen.numerics, chosen.rounds, timer)
            outcome = trials.run(tuning.candidates(table, key, chosen.numerics), timed, checked)
            for trial in outcome:
                print(*key, _text(trial.config), _verdict(trial), flush=True)
            kept = tuning.choose(tuning.present(table, key), outcome)
            if kept is None:
                print(*key, "keeps its row: every configuration was refused", flush=True)
                continue
            print(*key, "keeps" if kept is outcome[0] else "takes", _text(kept.config), flush=True)
            table = LaunchTable({**table.rows, key: kept.config})
            provenance[key] = _entry(kept, outcome[0], about, chosen.numerics)
            table.write(chosen.output)
            tuning.write_provenance(provenance, path)


def _entry(
    kept: tuning.Trial, before: tuning.Trial, about: Mapping[str, Any], numerics: bool
) -> dict[str, Any]:
    """On what a row was measured, and what it gained."""
    card: Mapping[str, str] = about["card"] or {}
    gain = None if before.fault else round(tuning.mean_us(before) / tuning.mean_us(kept), 3)
    return {
        "card": about["gpu"],
        "driver": card.get("driver_version"),
        "runtime": about["runtime"],
        "torch": about["torch"],
        "triton": about["triton"],
        "numerics": numerics,
        "times_as_fast_as_before": gain,
    }


def _is_chosen(key: Key, chosen: argparse.Namespace) -> bool:
    wanted = ((chosen.head_dim, key.head_dim), (chosen.width, key.width), (chosen.kind, key.kind))
    return all(values is None or value in values for values, value in wanted)


def _text(config: LaunchConfig) -> str:
    names = ("block_m", "block_n", "split_tokens", "num_warps", "num_stages")
    return " ".join(f"{name}={getattr(config, name)}" for name in names)


def _verdict(trial: tuning.Trial) -> str:
    if trial.fault is not None:
        return f"refused: {trial.fault}"
    return " ".join(f"{us:.1f}us" for us in trial.us)


if __name__ == "__main__":
    main()
