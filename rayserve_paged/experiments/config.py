"""What an experiment's YAML may say: a run's settings, the axes of the matrix, the objective."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rayserve_paged.core.config import DeploymentConfig, ModelConfig
from rayserve_paged.sim.faults import ClusterFault
from rayserve_paged.sim.synthetic import SyntheticWorkload

Mode = Literal["simulate", "live"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class WorkloadConfig(_Section):
    """Which requests are served, and when they come."""

    synthetic: SyntheticWorkload | None = None
    """A made-up workload, or"""
    trace: Path | None = None
    """a file: Mooncake's JSON lines, the CSV of Azure or of BurstGPT, or a folder with the event
    logs of a run. A relative path is looked up beside the experiment's file."""
    time_scale: _Positive = 1.0
    """Factor on the times of arrival: 0.5 doubles the load."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first so many requests."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of a trace's requests that are kept."""
    repeat: int = Field(default=1, ge=1)
    """Times that a trace is served, one after the other."""
    skip_invalid: bool = False
    """Leave out and count the rows of a trace that make no sense, instead of refusing it."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.synthetic is None) == (self.trace is None):
            raise ValueError("give either synthetic or trace")
        if self.synthetic is not None:
            for field in ("sample", "repeat", "skip_invalid"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(f"{field} is for a trace, and this workload is synthetic")
        return self


class SimulationConfig(_Section):
    """The cluster that does not exist; used where the mode is `simulate`."""

    gpu: str = "H200"
    """Of each rank: A100, H100, H200, B200 or L40S."""
    model_shape: str = "llama-8b"
    """`smollm2-135m`, `llama-8b`, `llama-70b` or `llama-405b`; in bf16."""
    profile: Path | None = None
    """Measured step times to use instead of the roofline; looked up beside the file."""
    num_consumers: int = Field(default=1, ge=1)
    """Processes that submit the requests in turn and read the streams."""


class LiveConfig(_Section):
    """Where a run is served for real; used where the mode is `live`."""

    shell: Literal["inprocess", "ray"] = "inprocess"
    """`ray` for actors on a Ray cluster, `inprocess` for threads of this process."""
    address: str | None = None
    """Ray cluster to join, "auto" for this machine's; absent: start one."""


class FailuresConfig(_Section):
    """What goes wrong in a simulated run, and how long it takes to start anew what has died."""

    plan: tuple[Annotated[ClusterFault, Field(discriminator="kind")], ...] = ()
    """Faults at given times, as in the plans of docs/chaos.md."""
    replica_life_s: _Positive | None = None
    """Each replica dies again and again, after lives of this length on average: exponential, and
    drawn from the seed; as long as requests come. None for never."""
    controller_life_s: _Positive | None = None
    """The same for the controller."""
    controller_down_s: _NotNegative = 2.0
    """How long it then takes until another one takes its place."""
    start_s: _NotNegative = 30.0
    """How long a replica takes to start again: processes, then weights."""
    notice_s: _NotNegative = 0.5
    """After which the controller notices that a replica's process is gone; that it hangs is
    noticed after `timeouts.rank_liveness_s`."""

    @property
    def has_rates(self) -> bool:
        """Whether anything dies at random."""
        return (self.replica_life_s, self.controller_life_s) != (None, None)


class CellConfig(DeploymentConfig):
    """All settings of one run: a deployment, its load, and what serves it.

    Everything that a deployment's YAML may say stands here under the same names.
    """

    model: ModelConfig = ModelConfig(model="fingerprint")
    """Of a live run; a simulated one has `simulation.model_shape`."""
    mode: Mode = "simulate"
    workload: WorkloadConfig
    simulation: SimulationConfig = SimulationConfig()
    live: LiveConfig = LiveConfig()
    failures: FailuresConfig = FailuresConfig()
    sample_every_s: _Positive = 1.0
    """How often the state of the replicas is taken down."""

    @field_validator("keep_alive")
    @classmethod
    def _ends(cls, keep_alive: bool) -> bool:
        if keep_alive:
            raise ValueError("keep_alive is false: a run ends its deployment")
        return keep_alive

    @field_validator("failures")
    @classmethod
    def _is_simulated(cls, failures: FailuresConfig, info: ValidationInfo) -> FailuresConfig:
        if info.data.get("mode") == "live" and (failures.plan or failures.has_rates):
            raise ValueError(
                "failures are simulated: mode=simulate with them, and with mode=live neither plan "
                "nor replica_life_s nor controller_life_s"
            )
        return failures


class SloConfig(_Section):
    """What a request has to keep to be of use to its user; absent bounds are kept by all."""

    ttft_s: _Positive | None = None
    """Time to the first token at most."""
    itl_s: _Positive | None = None
    """Mean time from token to token at most."""


_Label = Annotated[str, Field(min_length=1, max_length=60)]
_NAMES = re.compile(r"[A-Za-z][A-Za-z0-9_. -]{0,59}")


class ExperimentHead(_Section):
    """What an experiment's YAML says beside the settings that all of its runs have."""

    title: str = Field(min_length=1, max_length=120)
    question: str = ""
    """Which question it answers."""
    axes: Mapping[str, list[object] | Mapping[_Label, object]] = {}
    """What is varied: by field (`batch.max_num_seqs`) a list of values, or a mapping of labels to
    values; or under a name of its own a mapping of labels to mappings of fields to values."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field(default=(0,), min_length=1)
    """Each draws the workload anew."""
    x: str | None = None
    """Axis along which the pictures run; absent: the load, or else the first that is numeric."""
    slo: SloConfig = SloConfig(ttft_s=2.0, itl_s=0.1)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        for name, values in self.axes.items():
            if not _NAMES.fullmatch(name):
                raise ValueError(f"axis {name!r}: a name of letters, digits, spaces and _.-")
            if not values:
                raise ValueError(f"axis {name!r}: at least one value")
        if self.x is not None and self.x not in self.axes:
            raise ValueError(f"x={self.x!r} is one of the axes: {', '.join(self.axes) or 'none'}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)} has one twice")
        return self
