"""API keys: made at random, shown once, and known by their hashes from then on.

A key is 32 random bytes, so nobody can guess one, and nobody who has a hash can try them all: one
fast hash is as good as a slow one, which is for what people choose themselves. The hash also makes
the check take no time that tells anything of a key. What is compared is the digest of what was
sent, and how far that agrees with a digest that is kept is no function of how far the keys agree:
with each character that is guessed right the digest is another one altogether.
"""

import hashlib
import re
import secrets
from typing import Final

KEY_PREFIX: Final = "rsp-"
ID_LENGTH: Final = 12
"""Characters of a hash by which people call a key."""
_NUM_BYTES: Final = 32
_MAX_KEY_LENGTH: Final = 512
_BEARER: Final = re.compile(r"\s*bearer\s+(\S+)\s*", re.IGNORECASE)


def new_key() -> str:
    """Draw a key."""
    return KEY_PREFIX + secrets.token_urlsafe(_NUM_BYTES)


def key_hash(key: str) -> str:
    """Return what is kept of a key: 64 hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def bearer_key(header: str | None) -> str | None:
    """Return the key of an Authorization header; None where there is none, or no header."""
    if header is None:
        return None
    found = _BEARER.fullmatch(header)
    return None if found is None or len(found[1]) > _MAX_KEY_LENGTH else found[1]
