"""Which modules are given faults, and which faults count."""

from equivalents import EQUIVALENTS
from fault_rules import RULES
from faults import Fault, faults_of
from trials import CORE, ROOT

MODULES = (
    "accounting",
    "batcher",
    "attachments",
    "block_identity",
    "block_pool",
    "block_table",
    "kv_manager",
    "partial_index",
    "plan_steps",
    "policy",
    "prefix_wait",
    "prefix_index",
    "prompt_scores",
    "replica",
    "running_batch",
    "scored_tokens",
    "sequence",
    "step_commit",
    "step_planner",
)


def every_place() -> list[Fault]:
    """Return all that the rules find."""
    return [fault for module in MODULES for fault in faults_of(CORE / f"{module}.py", ROOT, RULES)]


def all_faults() -> list[Fault]:
    """Return all that the rules find, without what changes nothing."""
    return [fault for fault in every_place() if not any(e.covers(fault) for e in EQUIVALENTS)]
