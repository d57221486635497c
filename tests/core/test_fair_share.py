from rayserve_paged.core.fair_share import MAX_TENANTS_AHEAD, FairShare


def test_a_tenant_is_charged_over_its_weight_and_gets_back_what_it_did_not_take() -> None:
    share = FairShare({"gold": 4.0})
    for tenant in ("gold", "tin"):
        share.come_back(tenant, [], None)
        share.charge(tenant, 100)
    assert (share.served("gold"), share.served("tin")) == (25.0, 100.0)
    share.refund("gold", 60)
    share.refund("nobody", 60)
    assert (share.served("gold"), share.served("tin")) == (10.0, 100.0)


def test_who_comes_back_starts_with_the_least_served_of_those_that_wait() -> None:
    share = FairShare({})
    share.come_back("a", [], None)
    share.charge("a", 100)
    share.come_back("b", ["a"], 100.0)
    assert share.served("b") == 100.0
    share.charge("b", 10)
    # Who is ahead stays there, whatever the others had.
    share.come_back("b", ["a"], 50.0)
    assert share.served("b") == 110.0


def test_where_nobody_waits_the_level_is_that_of_the_last_to_start() -> None:
    share = FairShare({})
    share.come_back("a", [], None)
    for _ in range(3):
        share.charge("a", 100)
    share.come_back("b", [], None)
    assert (share.served("a"), share.served("b")) == (300.0, 200.0)


def test_tenants_that_went_are_forgotten_the_least_ahead_first() -> None:
    share = FairShare({})
    share.come_back("greedy", [], None)
    share.charge("greedy", 1_000_000)
    share.come_back("waits", [], 5.0)
    for i in range(5000):
        share.come_back(f"t{i}", ["waits"], 5.0)
        share.charge(f"t{i}", 10)
    assert len(share) <= 4 * MAX_TENANTS_AHEAD + 4
    assert (share.served("greedy"), share.served("waits")) == (1_000_000.0, 5.0)
