"""How fast the kernels are here, beside others and beside what the memory can do.

`python -m rayserve_kernels.bench [--json]`. Where there is a GPU, the Triton kernels are measured
on it, otherwise the native kernel on the CPU. `--roofline` prints what GPUs allow at most.
"""

import argparse

import torch

from rayserve_kernels import bench_cpu
from rayserve_kernels.gpu_bench import roofline
from rayserve_kernels.native_build import available_widths


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m rayserve_kernels.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object with all samples")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="by default a GPU (of any maker) if there is one"
    )
    parser.add_argument("--roofline", action="store_true", help="only print bounds by bytes")
    on_gpu = parser.add_argument_group("on a GPU")
    on_gpu.add_argument("--full", action="store_true", help="decode in every dtype and order")
    on_gpu.add_argument(
        "--only", choices=("decode", "cascade", "prefill", "copies"), help="one part of the run"
    )
    on_cpu = parser.add_argument_group("on a CPU")
    on_cpu.add_argument("--threads", type=int, help="torch's own number if not given")
    on_cpu.add_argument("--order", choices=("block_major", "hnd", "nhd"), default="block_major")
    on_cpu.add_argument("--width", choices=available_widths(), help="the widest if not given")
    on_cpu.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and the time that it runs: for a machine that others use",
    )
    chosen = parser.parse_args()
    if chosen.roofline:
        print(roofline.table())
        return
    has_gpu = torch.cuda.is_available()
    if chosen.device == "cuda" and not has_gpu:
        parser.error("--device cuda: torch finds no GPU here; cpu would be accepted")
    if has_gpu and chosen.device != "cpu":
        # Here alone: it needs triton.
        from rayserve_kernels.gpu_bench.run import run

        run(chosen)
    else:
        bench_cpu.run(chosen)


if __name__ == "__main__":
    main()
