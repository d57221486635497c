"""Tenants: who they are, by which keys they are known, and what they may share and use."""

import dataclasses
import json
from collections import Counter
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import MAX_PRIORITY
from rayserve_paged.core.tenant_quota import MAX_PER_MINUTE, TenantQuota
from rayserve_paged.load_config import accepted_by
from rayserve_paged.serve.api_keys import ID_LENGTH, bearer_key, key_hash
from rayserve_paged.serve.http_errors import HttpError

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Limit = Annotated[int, Field(ge=1, le=MAX_PER_MINUTE)]
_SECRET: Final = ("key_hashes", "salt")
"""Fields whose values are not shown: a key may have been put there by mistake."""


class QuotaEntry(BaseModel):
    """Limits of a tenant in the keys file; see `TenantQuota`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_concurrent_requests: _Limit | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    block_share: Annotated[float, Field(gt=0, le=1)] | None = None


class TenantEntry(BaseModel):
    """One tenant of the keys file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    """Unique in the file."""
    key_hashes: tuple[_Hash, ...] = ()
    """SHA-256 of each of its keys, in hexadecimal digits."""
    salt: str = Field(default="", max_length=256)
    """Random text: a later tenant of the same name finds nothing of this one's."""
    prefix_group: _Name | None = None
    """Tenants of one group share cached prefixes; None to share with nobody."""
    quota: QuotaEntry = QuotaEntry()
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Of its most urgent requests; lower is served first."""
    is_admin: bool = False
    """Whether it sees the names of all tenants' requests on the dashboard."""


class KeysFile(BaseModel):
    """All of a keys file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: tuple[TenantEntry, ...] = ()

    @model_validator(mode="after")
    def _check_unique(self) -> "KeysFile":
        for name, times in Counter(tenant.name for tenant in self.tenants).items():
            if times > 1:
                raise ValueError(f"names that differ ({name!r} is there {times} times)")
        owners: dict[str, str] = {}
        for tenant in self.tenants:
            for one in tenant.key_hashes:
                if one in owners:
                    both = f"{owners[one]!r} and {tenant.name!r} have {one[:ID_LENGTH]}"
                    raise ValueError(f"each key once ({both})")
                owners[one] = tenant.name
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request.

    Args:
        name: Unique; "" where there are no keys, and everyone is this one tenant.
        salt: As in the keys file.
        prefix_group: With whom it shares cached prefixes.
        quota: What it may use; None for no limits.
        priority: Of its most urgent requests; None for any.
        is_admin: Whether it may see what is of other tenants.
    """

    name: str
    salt: str = ""
    prefix_group: str | None = None
    quota: TenantQuota | None = None
    priority: int | None = None
    is_admin: bool = False

    @property
    def charged(self) -> str | None:
        """The tenant to name in its requests; None where there are no keys."""
        return self.name or None

    def scope_salt(self, user_salt: str | None) -> str:
        """Return the salt of its requests, one for each of its user's own.

        Two of them are equal only where the tenants are, or both are of one group, and where the
        users' salts are, too; None is another one than "". What a user sends is only ever the last
        part, so no user comes to another tenant's.
        """
        if self.prefix_group is not None:
            parts: list[str | None] = ["group", self.prefix_group, user_salt]
        else:
            parts = ["tenant", self.name, self.salt, user_salt]
        # Escapes that join two surrogates to one character would make two texts one.
        return json.dumps(parts, ensure_ascii=False)

    def request_priority(self, asked: int) -> int:
        """Return the priority of a request: it may be less urgent than its tenant, not more."""
        if self.priority is None:
            return asked
        return min(self.priority + max(0, asked), MAX_PRIORITY)


ANONYMOUS: Final = Tenant("", is_admin=True)
"""Everyone, where there are no keys."""


class Tenants:
    """The tenants of one keys file, by their keys.

    Args:
        keys: What the file holds; None where there is none, and everyone is `ANONYMOUS`.
    """

    def __init__(self, keys: KeysFile | None) -> None:
        self._has_keys = keys is not None
        self._by_hash: dict[str, Tenant] = {}
        for entry in () if keys is None else keys.tenants:
            quota = TenantQuota(**entry.quota.model_dump())
            tenant = Tenant(
                entry.name,
                entry.salt,
                entry.prefix_group,
                None if quota == TenantQuota() else quota,
                entry.priority,
                entry.is_admin,
            )
            self._by_hash |= dict.fromkeys(entry.key_hashes, tenant)

    def authenticate(self, header: str | None) -> Tenant:
        """Return whose request it is.

        Args:
            header: `Authorization` of the request, "Bearer" and a key; None where it has none.

        Raises:
            HttpError: 401: there is no key, or it is nobody's.
        """
        if not self._has_keys:
            return ANONYMOUS
        key = bearer_key(header)
        if key is None:
            message = "no API key: send it in the header Authorization, after the word Bearer"
            raise HttpError(401, message, code="missing_api_key")
        tenant = self._by_hash.get(key_hash(key))
        if tenant is None:
            raise HttpError(401, "the API key is not known", code="invalid_api_key")
        return tenant


def parse_keys(content: object, where: str) -> KeysFile:
    """Check what a keys file holds.

    Args:
        content: As YAML or JSON gave it.
        where: The file, for errors.

    Raises:
        InvalidInputError: Naming the field and the file, but never a key.
    """
    try:
        return KeysFile.model_validate({} if content is None else content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "tenants"
        accepted = f"{accepted_by(first)} (set in {where})"
        raise InvalidInputError(field, _shown(first["loc"], first["input"]), accepted) from None


def _shown(at: tuple[int | str, ...], value: Any) -> object:  # noqa: ANN401
    if not any(part in _SECRET for part in at):
        # The parts of a file that do not fit together hold secrets, too.
        return value if isinstance(value, str | int | float | bool | None) else "..."
    return f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
