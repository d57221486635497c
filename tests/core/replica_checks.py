"""What must hold of the requests of the replica machine, of its figures and of its reports."""

import dataclasses
import math
from collections import Counter

from replica_driver import ReplicaDriver, Stream

from rayserve_paged.core.ids import BlockKey
from rayserve_paged.core.request import FinishReason, ModelLimits, Request
from rayserve_paged.core.step_messages import TokenLogprobs
from rayserve_paged.sim.fingerprint_rank import Expected


@dataclasses.dataclass(eq=False)
class Tracked:
    """A request and what may become of it.

    Args:
        request: The request.
        samples: What each of its samples must give, and has given.
        poison: (output index, sibling) of the draw that raises; None for the sibling means all.
        due: When its deadline is, on the replica's clock.
        cancelled_siblings: Those that were cancelled alone.
        num_steps: Of its search; None where it has none.
        scores: Of its prompt, where they are asked for.
    """

    request: Request
    samples: list[tuple[Expected, Stream]]
    poison: tuple[int, int | None] | None
    due: float = math.inf
    cancelled_siblings: set[int] = dataclasses.field(default_factory=set)
    num_steps: int | None = None
    scores: tuple[TokenLogprobs, ...] = ()
    cancelled: bool = False
    abandoned: bool = False
    lapsed: bool = False
    fenced: bool = False
    forgotten: bool = False

    @property
    def is_open(self) -> bool:
        return any(stream.finish is None for _expected, stream in self.samples)

    def failing_draw(self, sibling: int) -> int | None:
        """Output index at which a sample fails, where it does not end before."""
        if self.poison is None:
            return None
        draw, poisoned = self.poison
        # Samples that are not forked yet fail together.
        return draw if draw == 0 or poisoned is None or poisoned == sibling else None

    def check_so_far(self) -> None:
        """Compare what every stream has got with its oracle's."""
        for expected, stream in self.samples:
            assert stream.token_ids == expected.token_ids[: len(stream.token_ids)]
        first = self.samples[0][1]
        assert first.prompt_logprobs == (self.scores if first.token_ids else ())

    def check_end(self, now: float) -> None:
        """Compare every stream with its oracle's, or see why it ended otherwise."""
        for sibling, (expected, stream) in enumerate(self.samples):
            draw = self.failing_draw(sibling)
            if stream.finish is None:
                # One whose replica was lost, or gave its reader up, goes on as its next attempt.
                is_lost = self.fenced or self.lapsed
                assert self.abandoned or self.forgotten or is_lost, "a stream that never ends"
            elif stream.finish is FinishReason.CANCELLED:
                alone = sibling in self.cancelled_siblings
                assert alone or self.cancelled or self.lapsed
            elif stream.finish is FinishReason.DEADLINE:
                assert now >= self.due
            elif stream.finish is FinishReason.ERROR and not self.fenced:
                assert stream.error == f"draw {draw} is poisoned"
                assert len(stream.token_ids) == (draw if self.num_steps is None else 0)
            elif stream.finish is not FinishReason.ERROR:
                assert (stream.token_ids, stream.finish) == expected
                # A draw that nobody wanted any more was not made.
                unwanted = self.poison is not None and self.poison[1] in self.cancelled_siblings
                assert draw is None or unwanted or (self.num_steps or len(stream.token_ids)) <= draw


def check_figures(driver: ReplicaDriver, limits: ModelLimits) -> None:
    """See that all figures of the ledger add up."""
    figures = driver.replica.accounting()
    waste = figures.internal_fragmentation_slots
    assert figures.allocated_slots == figures.unique_live_tokens + waste
    num_holders = limits.max_num_seqs * len(limits.layer_groups)
    assert 0 <= waste <= num_holders * (limits.block_size - 1)
    most = len(limits.layer_groups) * (limits.block_size - 1)
    wastes = figures.sequence_fragmentation_slots.values()
    assert all(0 <= own <= most for own in wastes)
    assert sum(wastes) >= waste
    assert figures.prefix_sharing_saved_slots >= 0
    assert figures.num_held_blocks <= limits.num_blocks
    if not figures.num_pinned_blocks and not driver.replica.batcher.in_flight:
        assert figures.allocated_slots == figures.num_held_blocks * limits.block_size


def check_reports(driver: ReplicaDriver, assigned: Counter[tuple[str, int]]) -> None:
    """Compare what a replica has reported with what was assigned and what can be matched."""
    reports = driver.reports
    assert [report.sequence for report in reports] == list(range(len(reports)))
    finished = Counter(name for report in reports for name in report.finished)
    if driver.replica.fenced is None:
        assert finished == assigned, "each request is reported finished once"
    else:
        assert finished <= assigned, "what a lost replica finished is reported once"
    known: set[BlockKey] = set()
    open_ones: Counter[tuple[str, int]] = Counter()
    for report in reports:
        open_ones.update(report.prefilled)
        assert all(open_ones[name] == 1 for name in report.prefilled)
        for name in report.finished:
            open_ones[name] = 0
        assert not known & set(report.published)
        known |= set(report.published)
        assert set(report.evicted) <= known
        known -= set(report.evicted)
    if driver.replica.fenced is None:
        assert not open_ones.total(), "what had its first token has ended"
        assert known == {key for key, _block_id in driver.replica.kv.index.items()}
