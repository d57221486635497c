"""Kills of ranks and controllers under load, one after the other, break nothing."""

import pytest

from rayserve_paged.experiments.live_chaos import LiveChaosConfig, LiveVerdict, run_live_chaos

pytestmark = pytest.mark.ray


def run(config: LiveChaosConfig) -> LiveVerdict:
    verdict = run_live_chaos(config)
    for number, kill in enumerate(verdict.kills, 1):
        print(f"{number}. {kill}")
    assert verdict.problems == ()
    assert len(verdict.kills) == config.num_kills
    assert all(kill.detect_s is not None for kill in verdict.kills)
    assert all(kill.restart_s is not None for kill in verdict.kills)
    return verdict


@pytest.mark.slow
def test_six_kills_of_ranks_and_controllers_cost_no_token() -> None:
    verdict = run(LiveChaosConfig(num_kills=6, kill_controller_every=3, seed=1))
    assert verdict.num_recovered > 0
    assert verdict.num_tokens > 0


@pytest.mark.prove
@pytest.mark.parametrize("model", ["fingerprint", "smollm2"])
def test_twenty_kills_of_ranks_cost_no_token(model: str) -> None:
    assert run(LiveChaosConfig(model=model, num_kills=20)).num_recovered >= 20


@pytest.mark.prove
def test_twenty_kills_of_which_five_are_of_controllers_cost_no_token() -> None:
    run(LiveChaosConfig(num_kills=20, kill_controller_every=4, seed=2))
