"""Try launch configurations on a device: do they run, agree with float64, and how fast are they."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rayserve_kernels.attention import ReferenceBackend
from rayserve_kernels.gpu.backend import TritonBackend
from rayserve_kernels.gpu.cascade import attend_shared
from rayserve_kernels.gpu.configs import Key, Kind, LaunchConfig, LaunchTable, check_support
from rayserve_kernels.gpu.paged_attention import decode, join_splits, prefill
from rayserve_kernels.gpu.tuning import Trial, present
from rayserve_kernels.gpu_bench.step import Step
from rayserve_kernels.gpu_bench.timing import Call, one_line, take_turns
from rayserve_kernels.gpu_bench.traffic import Case, Dtype
from rayserve_kernels.metadata import AttentionMetadata

_KERNELS: tuple[Any, ...] = (decode, join_splits, attend_shared, prefill)
_DTYPES: dict[str, tuple[Dtype, ...]] = {
    "fp32": ("fp32",),
    "half": ("bf16", "fp16"),
    "scaled": ("int8", "fp8"),
}
# Sizes of what is timed, and of what is compared with float64: tokens of no round number.
_TIMED: dict[Kind, tuple[Case, ...]] = {
    "decode": (Case(64, 4096), Case(8, 16384)),
    "decode_wide": (
        Case(64, 4096, num_q_heads=64, num_kv_heads=1),
        Case(8, 16384, num_q_heads=64, num_kv_heads=1),
    ),
    "prefill": (Case(4, 2048, num_queries=2048), Case(4, 8448, num_queries=256)),
}
_CHECKED: dict[Kind, Case] = {
    "decode": Case(3, 1301, num_queries=3, num_q_heads=8, num_kv_heads=2),
    "decode_wide": Case(3, 1301, num_q_heads=64, num_kv_heads=1),
    "prefill": Case(2, 407, num_queries=173, num_q_heads=8, num_kv_heads=2),
}
_SHARED_TIMED = (Case(64, 4096, shared_tokens=3072),)
_SHARED_CHECKED = Case(9, 1301, shared_tokens=1024, num_q_heads=8, num_kv_heads=2)
_WINDOW, _NUM_SINKS, _SOFT_CAP = 100, 5, 20.0


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """A step whose result is known.

    Args:
        step: The step.
        metadata: Of it, with windows where `is_masked`.
        is_masked: With a window, sinks, a soft cap and ALiBi: the variant that needs most.
        expected: float64, like the outputs; None where only bits are compared.
    """

    step: Step
    metadata: AttentionMetadata
    is_masked: bool
    expected: torch.Tensor | None

    def attend(self, backend: TritonBackend | ReferenceBackend, layer: int = 0) -> torch.Tensor:
        """Run the step."""
        queries = self.step.queries
        masks: dict[str, Any] = {}
        if self.is_masked:
            slopes = 0.5 ** torch.arange(1, queries.shape[1] + 1, device=queries.device).float()
            masks = {"soft_cap": _SOFT_CAP, "alibi_slopes": slopes}
        return backend.attend(
            self.step.pool, layer, queries, self.metadata, self.step.scale, **masks
        )

    def fault(self, output: torch.Tensor) -> str | None:
        """Say how an output differs from float64 by more than rounding explains."""
        if self.expected is None:
            return None
        rounding = torch.finfo(output.dtype).eps / 2
        largest = float(self.step.contiguous[:, 1].abs().max())
        difference = float((output.double() - self.expected).abs().max())
        most = (2 * rounding + 64 * 2**-24) * largest
        # Not > alone: NaN compares false either way.
        return None if difference <= most else f"differs from float64 by {difference:.3g}"


@dataclasses.dataclass(frozen=True, eq=False)
class Trials:
    """Tries configurations for one key.

    Args:
        device: To run on.
        table: The present one.
        key: Of the row.
        may_change_bits: Whether other bits than the present row's are accepted.
        num_rounds: Samples of each.
        time_us: As `take_turns` wants it.
    """

    device: torch.device
    table: LaunchTable
    key: Key
    may_change_bits: bool
    num_rounds: int
    time_us: Callable[[Callable[[], object]], float]

    def run(
        self, configs: Sequence[LaunchConfig], timed: Sequence[Case], checked: Sequence[Case]
    ) -> list[Trial]:
        """Try configurations, and time those without a fault in turn.

        Args:
            configs: To try.
            timed: Cases to time, in which bits are compared too.
            checked: Cases to compare with float64.
        """
        checks = [check for case in checked for check in self._checks(case)]
        faults = self._faults(configs, checks)
        times: dict[LaunchConfig, list[float]] = {config: [] for config in configs}
        for case in timed:
            # One case at a time: they are large.
            check = self._plain(case, num_layers=2, has_reference=False)
            sound = [config for config in configs if faults[config] is None]
            faults.update(self._faults(sound, [check]))
            sound = [config for config in sound if faults[config] is None]
            calls: dict[str, Call] = {str(config): self._call(config, check) for config in sound}
            samples = take_turns(calls, 2, self.num_rounds, self.time_us)
            for config in sound:
                median = samples.median_us(str(config))
                if median is None:
                    faults[config] = samples.errors[str(config)]
                else:
                    times[config].append(median)
        return [
            Trial(config, faults[config], () if faults[config] else tuple(times[config]))
            for config in configs
        ]

    def _call(self, config: LaunchConfig, check: Check) -> Call:
        backend = self._backend(config)
        return lambda layer: check.attend(backend, layer)

    def _backend(self, config: LaunchConfig) -> TritonBackend:
        return TritonBackend(self.key.gpu, LaunchTable({**self.table.rows, self.key: config}))

    def _faults(
        self, configs: Sequence[LaunchConfig], checks: Sequence[Check]
    ) -> dict[LaunchConfig, str | None]:
        before: list[torch.Tensor] | None = None
        if not self.may_change_bits:
            backend = self._backend(present(self.table, self.key))
            try:
                before = [check.attend(backend) for check in checks]
            except Exception:
                # The present row does not run here, so there are no bits to keep.
                before = None
        return {config: self._fault(config, checks, before) for config in configs}

    def _fault(
        self, config: LaunchConfig, checks: Sequence[Check], before: list[torch.Tensor] | None
    ) -> str | None:
        forget_kernels()
        backend = self._backend(config)
        try:
            outputs = [check.attend(backend) for check in checks]
        except Exception as error:
            return one_line(error)
        spilled = spills()
        if spilled:
            return f"spills in {', '.join(spilled)}"
        for index, (check, output) in enumerate(zip(checks, outputs, strict=True)):
            fault = check.fault(output)
            if fault is not None:
                return fault
            if before is not None and not torch.equal(output, before[index]):
                return "gives other bits than the present row"
        return None

    def _checks(self, case: Case) -> list[Check]:
        plain = self._plain(case, num_layers=1, has_reference=True)
        num_seqs = case.batch_size
        metadata = AttentionMetadata.for_step(
            plain.step.tables,
            [case.num_tokens - case.num_queries] * num_seqs,
            [case.num_queries] * num_seqs,
            case.block_size,
            self.device,
            np.full(num_seqs, _WINDOW, np.int32),
            np.full(num_seqs, _NUM_SINKS, np.int32),
        )
        shared = plain.metadata.shared_prefixes
        metadata = dataclasses.replace(metadata, shared_prefixes=shared)
        masked = Check(plain.step, metadata, True, None)
        reference = masked.attend(ReferenceBackend(torch.float64))
        return [plain, dataclasses.replace(masked, expected=reference)]

    def _plain(self, case: Case, num_layers: int, has_reference: bool) -> Check:
        step = Step.build(case, self.device, num_layers)
        metadata = step.metadata
        if case.shared_tokens:
            shared = TritonBackend(self.key.gpu, self.table).find_shared_prefixes(
                step.pool.layout,
                case.num_q_heads,
                case.queries,
                step.tables,
                [case.num_tokens - case.num_queries] * case.batch_size,
                [case.num_queries] * case.batch_size,
                self.device,
            )
            if shared is None:
                raise ValueError(f"{case}: expected a prefix that pays")
            metadata = dataclasses.replace(metadata, shared_prefixes=shared)
        check = Check(step, metadata, False, None)
        if not has_reference:
            return check
        return dataclasses.replace(check, expected=check.attend(ReferenceBackend(torch.float64)))


def cases_of(key: Key) -> tuple[list[Case], list[Case]]:
    """Cases to time and cases to compare with float64, in each dtype that the GPU can read."""
    timed = _TIMED.get(key.kind, _SHARED_TIMED)
    checked = _CHECKED.get(key.kind, _SHARED_CHECKED)
    dtypes: list[Dtype] = [dtype for dtype in _DTYPES[key.width] if _reads(key.gpu, dtype)]

    def of(case: Case, dtype: Dtype) -> Case:
        return dataclasses.replace(case, dtype=dtype, head_dim=key.head_dim)

    return (
        [of(case, dtype) for dtype in dtypes for case in timed],
        [of(checked, dtype) for dtype in dtypes],
    )


def forget_kernels() -> None:
    """Drop what Triton has compiled of the kernels, so that `spills` tells of what comes next."""
    for kernel in _KERNELS:
        # The interpreter compiles nothing.
        if hasattr(kernel, "device_caches"):
            kernel.device_caches.clear()


def spills() -> list[str]:
    """Name the kernels that were launched since `forget_kernels` and need local memory."""
    return [
        kernel.__name__
        for kernel in _KERNELS
        for caches in getattr(kernel, "device_caches", {}).values()
        if any(getattr(compiled, "n_spills", 0) for compiled in caches[0].values())
    ]


def _reads(gpu: str, dtype: Dtype) -> bool:
    try:
        check_support(gpu, Case(1, 1, dtype).slots)
    except ValueError:
        return False
    return True
