"""What tests of beams on a replica share."""

from beam_oracle import toy_beams
from replica_driver import ReplicaDriver

from rayserve_paged.core.beam_group import BeamGroup
from rayserve_paged.core.request import Request
from rayserve_paged.sim.fingerprint_rank import oracle

ENDINGS: list[tuple[float, bool | str]] = [
    (1.0, False),
    (0.0, True),
    (2.0, "never"),
    (-1.0, False),
    (0.0, "never"),
]


def check_streams(driver: ReplicaDriver, *requests: Request) -> None:
    """Compare every stream with its oracle's, and see that all blocks came back."""
    for request in requests:
        reader = driver.reader(request.consumer_id)
        streams = [reader.stream(request, sibling) for sibling in range(request.params.n)]
        got = [(stream.token_ids, stream.finish) for stream in streams]
        if request.params.beam_width is None:
            assert got == [oracle(request, driver.limits, s) for s in range(request.params.n)]
        else:
            found, _num_steps = toy_beams(request, driver.limits)
            assert got == [(one.token_ids, one.finish) for one in found]
    assert driver.replica.kv.pool.num_held == 0
    assert driver.replica.batcher.num_reserved_rows == 0
    assert driver.replica.sequences == ()


def searches_of(driver: ReplicaDriver) -> list[BeamGroup]:
    return list({s.beam: None for s in driver.replica.sequences if s.beam is not None})
