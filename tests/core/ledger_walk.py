"""Walks further through the rules of the ledger machine than Hypothesis does, by a seed."""

import argparse
import random

from ledger_machine import LedgerMachine
from ledger_pins import PIN_IDS
from ledger_requests import ENDINGS, SCOPES, STORIES
from ledger_rules import LAYER_GROUPS, POLICIES

REPLAY = "replay it: python tests/core/ledger_walk.py --seed {seed} --operations {num_operations}"


def walk(seed: int, num_operations: int, *, with_pins: bool = True) -> LedgerMachine:
    """Walk further than Hypothesis does, by the same rules; raises where anything is broken."""
    draw = random.Random(seed)
    machine = LedgerMachine()
    machine.start(
        num_blocks=draw.choice([3, 5, 8, 12, 16, 24]),
        block_size=draw.choice([1, 2, 3, 4]),
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_num_batched_tokens=draw.choice([1, 2, 5, 16, 64]),
        pipeline_depth=draw.choice([1, 2]),
        max_decode_steps=draw.choice([1, 1, 4]),
        max_prefix_wait_steps=draw.choice([64, 2, 0]),
        partial_reuse=draw.random() < 0.5,
        layer_groups=draw.choice(LAYER_GROUPS),
        policy=draw.choice(POLICIES),
        max_pinned_blocks=draw.choice([0, 2, 4]) if with_pins else 0,
    )

    def submit() -> None:
        if len(machine.tracked) > 12:
            return
        machine.submit(
            draw.choice(STORIES),
            draw.randint(1, 16),
            draw.randint(1, 16),
            draw.choice(SCOPES),
            draw.choice([0, 0, -1, 2]),
            draw.choice([1, 1, 2, 3, 4]),
            draw.random() < 0.5,
            draw.choice([*[None] * 12, (0, 0), (1, 0), (2, 1), (0, 2)]),
        )

    def submit_a_search() -> None:
        if len(machine.tracked) <= 12:
            machine.submit_a_search(
                draw.choice(STORIES),
                draw.randint(1, 10),
                draw.randint(1, 8),
                draw.choice(SCOPES),
                draw.choice([0, 0, -1, 2]),
                draw.randint(1, 4),
                draw.choice(ENDINGS),
            )

    def commit() -> None:
        if machine.flights:
            machine.commit()

    def cancel() -> None:
        if machine.tracked:
            machine.cancel(draw.randint(0, 99), draw.random() < 0.4)

    def preempt() -> None:
        machine.preempt(draw.randint(0, 99))

    def evict() -> None:
        machine.evict(draw.randint(1, 24))

    def reset() -> None:
        machine.reset()

    def pin() -> None:
        machine.pin(
            draw.choice(PIN_IDS), draw.choice(STORIES), draw.randint(1, 16), draw.choice(SCOPES)
        )

    operations = [submit, submit_a_search, machine.plan, commit, cancel, preempt, evict, reset, pin]
    weights = [5, 1, 20, 20, 1, 2, 1, 0.3, 6 if with_pins else 0]
    num_done = 0
    while num_done < num_operations:
        draw.choices(operations, weights)[0]()
        if machine.operations.total() > num_done:
            machine.check()
            num_done = machine.operations.total()
    machine.drain()
    return machine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replay one walk.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--without-pins", action="store_true")
    options = parser.parse_args()
    done = walk(options.seed, options.operations, with_pins=not options.without_pins)
    print(f"nothing broke: {dict(done.operations)}, which brought {dict(done.events)}")
