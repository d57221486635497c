"""The tuner's trials, run on small cases in the interpreter: what is refused, and what is timed."""

import typing

import pytest
import torch
from paged_case import DEVICE

from rayserve_kernels.gpu.configs import Key, Kind, LaunchConfig, LaunchTable, gpu_family
from rayserve_kernels.gpu_bench import trials as module
from rayserve_kernels.gpu_bench.traffic import Case
from rayserve_kernels.gpu_bench.trials import Trials, cases_of

ROW = LaunchConfig(16, 32, 64, 4, 2)
TABLE = LaunchTable(
    {
        Key("any", head_dim, "half", kind): (
            ROW if "decode" in kind else LaunchConfig(32, 32, None, 4, 2)
        )
        for head_dim in (64, 128)
        for kind in typing.get_args(Kind)
    }
)
CASE = Case(2, 130, num_q_heads=2, num_kv_heads=1, head_dim=64)


def trials(may_change_bits: bool) -> Trials:
    key = Key(gpu_family(DEVICE), 64, "half", "decode")
    return Trials(DEVICE, TABLE, key, may_change_bits, 2, lambda call: (call(), 5.0)[1])


def test_a_configuration_of_other_bits_is_refused_unless_they_may_change() -> None:
    # More stages are of no account to the interpreter; tiles of other lengths change bits.
    same, other = LaunchConfig(16, 32, 64, 4, 3), LaunchConfig(16, 16, 64, 4, 2)
    configs = [ROW, same, other]
    kept = trials(may_change_bits=False).run(configs, [], [CASE])
    assert [trial.config for trial in kept] == configs
    assert [trial.fault for trial in kept] == [None, None, "gives other bits than the present row"]
    free = trials(may_change_bits=True).run([ROW, other], [CASE], [CASE])
    assert [(trial.fault, trial.us) for trial in free] == [(None, (5.0,))] * 2


def test_what_differs_from_float64_spills_or_raises_is_refused_and_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = module.TritonBackend.attend
    split = LaunchConfig(16, 32, 128, 4, 2)
    raising = LaunchConfig(16, 32, 256, 4, 2)

    def broken(self, *args, **edits) -> torch.Tensor:  # noqa: ANN001, ANN002, ANN003
        rows = set(self._table.rows.values())
        if raising in rows:
            raise RuntimeError("out of resource: shared memory")
        output = attend(self, *args, **edits)
        return output if split not in rows else output + 0.5

    monkeypatch.setattr(module.TritonBackend, "attend", broken)
    spilling = LaunchConfig(16, 32, 64, 8, 2)
    found = iter([[], ["decode"], []])
    monkeypatch.setattr(module, "spills", lambda: next(found))
    kept = trials(may_change_bits=True).run([ROW, spilling, split, raising], [], [CASE])
    faults = [trial.fault for trial in kept]
    assert faults[:2] == [None, "spills in decode"]
    assert str(faults[2]).startswith("differs from float64 by 0.")
    assert faults[3] == "RuntimeError: out of resource: shared memory"


def test_every_kind_has_cases_in_the_dtypes_that_a_gpu_reads() -> None:
    for kind in typing.get_args(Kind):
        timed, checked = cases_of(Key("sm80", 64, "scaled", kind))
        assert {case.dtype for case in (*timed, *checked)} == {"int8"}
        timed, checked = cases_of(Key("sm90", 256, "scaled", kind))
        assert {case.dtype for case in timed} == {"int8", "fp8"}
        assert {case.dtype for case in checked} == {"int8", "fp8"}
        assert {case.head_dim for case in (*timed, *checked)} == {256}
        is_prefill = kind == "prefill"
        assert all((case.num_queries > 8) == is_prefill for case in (*timed, *checked))
        assert all(bool(case.shared_tokens) == (kind == "shared") for case in (*timed, *checked))
        if kind == "decode_wide":
            assert all(case.num_q_heads // case.num_kv_heads > 16 for case in (*timed, *checked))
