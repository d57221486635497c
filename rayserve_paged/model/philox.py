"""Philox4x32-10, the counter-based generator of the samplers: no state, so no order of draws.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11.
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

UInt64Array = npt.NDArray[np.uint64]


def philox4x32(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Four random words for each counter and key.

    Args:
        counters: uint64 [n, 4], each word below 2**32.
        keys: uint64 [n, 2], each word below 2**32.

    Returns:
        uint64 [n, 4], each word below 2**32.
    """
    c0, c1, c2, c3 = counters.T
    k0, k1 = keys.T
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform_draws(
    seeds: UInt64Array, siblings: UInt64Array, positions: UInt64Array
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, sibling, position), of 53 random bits.

    Args:
        seeds: uint64 [n].
        siblings: uint64 [n], below 2**32: which of the parallel samples of a request.
        positions: uint64 [n], below 2**32: index of the output token.

    Returns:
        float64 [n].
    """
    zeros = np.zeros_like(seeds)
    counters = np.stack((positions, siblings, zeros, zeros), axis=1)
    keys = np.stack((seeds & _LOW, seeds >> _HALF), axis=1)
    words = philox4x32(counters, keys)
    bits = ((words[:, 0] << _HALF) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
