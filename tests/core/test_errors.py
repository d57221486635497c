import pickle

import pytest

from rayserve_paged.core import errors
from rayserve_paged.core.errors import (
    CapacityError,
    ControllerAwayError,
    DeploymentError,
    DuplicateRequestError,
    InvalidInputError,
    LedgerError,
    NoReplicaError,
    OverloadedError,
    PagedError,
    PinLimitError,
    PoisonedRequestError,
    QuotaExceededError,
    ReplicaLostError,
    RequestFailedError,
)

EXAMPLES = [
    (PagedError("plain"), "plain"),
    (
        InvalidInputError("top_p", 1.5, "a number above 0 and at most 1"),
        "top_p=1.5 is not accepted: expected a number above 0 and at most 1",
    ),
    (
        CapacityError(1500, 200, 107, 100, 16),
        "a prompt of 1500 tokens with max_tokens=200 needs 107 blocks of 16 slots, and the pool "
        "has 100 (1600 slots): shorten the prompt, lower max_tokens or give the cache more blocks",
    ),
    (
        CapacityError(30, 10, 10, 8, 4, max_pinned_blocks=8),
        "a prompt of 30 tokens with max_tokens=10 needs 10 blocks of 4 slots, and the pool has 8 "
        "(32 slots) beside the 8 that pins may hold: shorten the prompt, lower max_tokens or give "
        "the cache more blocks",
    ),
    (
        DuplicateRequestError("q1"),
        "request_id='q1' is in use by a request that has not finished",
    ),
    (
        PinLimitError("system", 9, 4, 12),
        "pin 'system' needs 9 blocks, and of the 12 that pins may hold 4 are pinned: unpin others, "
        "shorten the prefix or raise max_pinned_share",
    ),
    (NoReplicaError("none has registered"), "no replica can take the request: none has registered"),
    (
        OverloadedError(8, 8, 900, None, 0.25),
        "overloaded: on the least busy replica 8 sequences wait and 8 may; try again in about "
        "0.25 s",
    ),
    (
        OverloadedError(8, 9, 900, 1000, None),
        "overloaded: on the least busy replica 8 sequences wait and 9 may, and 900 tokens are "
        "pending and 1000 may be; try again later",
    ),
    (
        QuotaExceededError("a", "tokens_per_minute", 1000, 980, 100, 4.8),
        "tenant 'a' is at its quota: tokens_per_minute=1000, 980 are used and 100 more are needed; "
        "try again in 4.8 s",
    ),
    (
        QuotaExceededError("a", "block_share", 50, 48, 3, None),
        "tenant 'a' is at its quota: block_share comes to 50 blocks, 48 are used and 3 more are "
        "needed; try again once others of its requests have ended",
    ),
    (ReplicaLostError("r0", 3, "a rank died"), "replica r0 (incarnation 3) is lost: a rank died"),
    (RequestFailedError("q1", "NaN logits"), "request q1 failed: NaN logits"),
    (
        PoisonedRequestError("q1", ("r0: killed", "r1: killed")),
        "request q1 failed: 2 replicas in a row died with it, the last of them before it had a new "
        "token, with no other suspect: r0: killed; r1: killed",
    ),
    (DeploymentError("main", "not found"), "deployment 'main': not found"),
    (ControllerAwayError("main", "no answer"), "deployment 'main': no answer"),
    (LedgerError("block 3 has count 1 and 2 holders", 3), "block 3 has count 1 and 2 holders"),
]


@pytest.mark.parametrize(("error", "message"), EXAMPLES)
def test_an_error_survives_pickling_with_its_fields_and_its_message(
    error: PagedError, message: str
) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert copy.args == error.args
    assert str(copy) == str(error) == message


def test_every_error_is_in_the_examples_and_under_the_root() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert kinds == {type(error) for error, _message in EXAMPLES}
    assert all(issubclass(kind, PagedError) for kind in kinds)


def test_a_capacity_error_is_bad_input_and_carries_its_numbers() -> None:
    error = CapacityError(1500, 200, 107, 100, 16)
    assert isinstance(error, InvalidInputError)
    assert (error.field, error.value) == ("max_tokens", 200)
    assert error.accepted == "at most 100 blocks of 16 slots in all"
    assert (error.num_blocks_needed, error.num_blocks, error.block_size) == (107, 100, 16)


def test_a_long_refused_value_is_cut() -> None:
    message = str(InvalidInputError("stop", "x" * 5000, "something short"))
    assert len(message) < 300
    assert "(5002 characters)" in message
