"""A replica under any order of events gives every reader the stream of an oracle without blocks."""

import random

import pytest
from hypothesis import settings
from replica_machine import ReplicaMachine
from replica_rules import CONSUMERS, LAYER_GROUPS, LEASE_S, POLICIES
from replica_workload import CHOICES, ENDINGS, IDENTITIES, RETENTIONS, STORIES


def random_walk(seed: int, num_operations: int) -> ReplicaMachine:
    """Walk further than Hypothesis does, by the same rules."""
    draw = random.Random(seed)
    machine = ReplicaMachine()
    machine.start(
        num_blocks=draw.choice([4, 6, 8, 12, 20]),
        block_size=draw.choice([1, 2, 3, 4]),
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_num_batched_tokens=draw.choice([1, 2, 5, 16, 64]),
        pipeline_depth=draw.choice([1, 2]),
        max_decode_steps=draw.choice([1, 3, 8]),
        max_prefix_wait_steps=draw.choice([0, 1, 3, 64]),
        partial_reuse=draw.random() < 0.6,
        interruptions=draw.choice([0.0, 0.3]),
        policy=draw.choice(POLICIES),
        oldest_every=draw.choice([None, 1, 3]),
        layer_groups=draw.choice(LAYER_GROUPS),
        max_pinned_blocks=draw.choice([0, 0, 1, 2]),
    )

    def submit() -> None:
        machine.submit(
            draw.choice(STORIES),
            draw.randint(1, 12),
            draw.randint(1, 12),
            draw.choice(CONSUMERS),
            draw.choices([0, 0, -1, 2], k=draw.randint(1, 4)),
            draw.choice(["plain", "plain", *IDENTITIES]),
            draw.choice([1, 1, 2, 3, 4]),
            draw.choice([None, None, 0, 2]),
            draw.choice([*[None] * 10, (0, None), (2, None), (0, 2), (1, 0), (3, 1)]),
            draw.choice([None, None, None, 0.5, 5.0]),
            draw.choice([(None, 0), (None, 0), (1, 0), (2, 3), (3, 0), (4, 5), (7, 2), (99, 0)]),
            draw.choice([(), (), *RETENTIONS]),
        )

    def search() -> None:
        machine.submit_a_search(
            draw.choice(STORIES),
            draw.randint(1, 9),
            draw.randint(1, 9),
            draw.choice(CONSUMERS),
            draw.choice([0, 0, -1, 2]),
            draw.randint(1, 5),
            draw.randint(1, 5),
            draw.choice(ENDINGS),
            draw.choice([*[None] * 10, (0, None), (2, None), (4, None)]),
            draw.choice(["plain", "plain", *IDENTITIES]),
            draw.choice([None, None, 0, 1]),
            draw.choice([None, None, None, 0.5, 5.0]),
            draw.choice([(None, 0), (None, 0), (1, 0), (2, 3), (3, 0), (4, 5), (7, 2), (99, 0)]),
            draw.choice(CHOICES),
        )

    def submit_again() -> None:
        if machine.tracked:
            machine.submit_under_a_name_that_was_used(draw.randint(0, 999))

    def take_another_turn() -> None:
        if machine.tracked:
            more = draw.choices(range(31), k=draw.randint(1, 3))
            machine.take_another_turn(
                draw.randint(0, 999), draw.randint(1, 12), more, draw.randint(1, 6)
            )

    def touch_a_live_one() -> None:
        if machine.live():
            pick = draw.randint(0, 99)
            if draw.random() < 0.4:
                machine.cancel_one_sample(pick, draw.randint(0, 3))
            elif draw.random() < 0.5:
                machine.cancel(pick, draw.random() < 0.5)
            else:
                machine.assign_a_live_request_again(pick)

    def read() -> None:
        if machine.late and draw.random() < 0.5:
            machine.read_a_late_answer(draw.randint(0, 99))
        else:
            machine.poll(draw.choice(CONSUMERS), draw.choice(["read", "read", "late", "lost"]))

    def wait() -> None:
        long = [LEASE_S, 11 * LEASE_S] if draw.random() < 0.02 else []
        machine.let_time_pass(draw.choice([0.01, 0.1, 0.5, *long]))

    def step() -> None:
        machine.step(draw.choice(["read", "late", "lost"]), draw.randint(1, 6))

    for _ in range(num_operations):
        actions = [
            submit,
            search,
            submit_again,
            take_another_turn,
            touch_a_live_one,
            read,
            wait,
            step,
        ]
        draw.choices(actions, [6, 3, 2, 3, 3, 10, 6, 16])[0]()
        machine.every_stream_is_a_prefix_of_the_oracles()
        machine.work_is_never_left_without_a_step()
        machine.all_figures_add_up()
        if draw.random() < 0.03:
            machine.pin(
                draw.choice(STORIES),
                draw.randint(1, 12),
                draw.random() < 0.5,
                draw.choice(["plain", "plain", *IDENTITIES]),
                draw.choice([(None, 0), (None, 0), (2, 1), (3, 0), (7, 2)]),
            )
        if draw.random() < 0.03:
            machine.unpin(draw.random() < 0.5)
        if draw.random() < 0.004:
            machine.reset_the_cache(7)
        if draw.random() < 0.002:
            machine.end_the_incarnation(13, draw.random() < 0.5)
    machine.teardown()
    return machine


@pytest.mark.parametrize(
    "seed",
    [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(24)],
)
def test_a_long_random_walk_ends_with_every_stream_right(seed: int) -> None:
    random_walk(seed, num_operations=850)


ReplicaMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60)
TestReplicaMachine = ReplicaMachine.TestCase
