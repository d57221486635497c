"""Which modules are given faults, and which faults count."""

from equivalents import EQUIVALENTS
from fault_rules import RULES
from faults import Fault, faults_of
from trials import CORE, ROOT

# What is no part of who holds which block: messages, inputs, the controller, an estimate of value,
# the order of those that wait, and the checks themselves.
_OTHER_MODULES = {
    "__init__",
    "book_invariants",
    "cluster_view",
    "config",
    "controller_messages",
    "errors",
    "event_log",
    "eviction",
    "fair_share",
    "field_checks",
    "ghosts",
    "ids",
    "invariants",
    "keyed_heap",
    "replica_messages",
    "request",
    "run_lists",
    "running_request",
    "sampling_params",
    "step_messages",
    "stream_messages",
    "waiting_queue",
}
MODULES = tuple(
    sorted({path.stem for path in (ROOT / CORE).glob("*.py")} - _OTHER_MODULES),
)


def every_place() -> list[Fault]:
    """Return all that the rules find."""
    return [fault for module in MODULES for fault in faults_of(CORE / f"{module}.py", ROOT, RULES)]


def without_equivalents(places: list[Fault]) -> list[Fault]:
    """Leave out what changes nothing."""
    return [fault for fault in places if not any(each.covers(fault) for each in EQUIVALENTS)]
