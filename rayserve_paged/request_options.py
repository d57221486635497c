"""How one request is served: a value for each, from keyword arguments for one or for many."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, Final, TypedDict, TypeVar, cast

from rayserve_paged.core.attention_window import AttentionWindow
from rayserve_paged.core.block_identity import Adapter, RequestScope
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.request import check_terms
from rayserve_paged.core.retention import RetentionRange
from rayserve_paged.core.tenant_quota import TenantQuota

_T = TypeVar("_T")

Retention = tuple[RetentionRange, ...]
"""Ranges of one request, in the order of its tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How one request is served; `SamplingParams` say how its tokens are chosen.

    Args:
        request_id: Unique among the live requests of one `LLM`; None to draw one.
        priority: Lower is served first.
        tenant: Who is charged under the policy "weighted-fair", and by the quota; None for the
            salt, or nobody.
        quota: What the tenant may use of the deployment; the latest request brings the one that is
            in force. None for no limits.
        tenant_salt: Whose KV it is: requests share cached prefixes only where their salts are
            equal. None is a tenant of its own.
        adapter: Weights laid over the model's own; None for none. Requests of different adapters
            share no cached prefixes.
        window: A token attends to itself and the window - 1 positions before it, and blocks that
            fall behind are given back; None for all positions. Requests of different windows
            share no cached prefixes.
        num_sink_tokens: First positions that every token attends to besides its window.
        retention: Which ranges of its tokens are to stay cached for longer or shorter than others
            once it has ended.
        deadline_s: Seconds from its submission after which it is given up; its output then has
            the tokens until then, and the finish reason "deadline". None for no limit.

    Raises:
        InvalidInputError: A field is of another type or range. Whether it suits the prompt and
            the model is checked with these.
    """

    request_id: str | None = None
    priority: int = 0
    tenant: str | None = None
    quota: TenantQuota | None = None
    tenant_salt: str | None = None
    adapter: Adapter | None = None
    window: int | None = None
    num_sink_tokens: int = 0
    retention: Retention = ()
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        """Check what depends neither on the prompt nor on the model."""
        if self.request_id is not None:
            name: object = self.request_id
            if not isinstance(name, str) or not name:
                raise InvalidInputError("request_id", name, "a non-empty string, or None")
        check_terms(self.priority, self.scope, self.tenant, self.deadline_s, self.quota)

    @property
    def scope(self) -> RequestScope:
        """What it adds to the identity of its KV."""
        limited = (self.window, self.num_sink_tokens) != (None, 0)
        window = AttentionWindow(self.window, self.num_sink_tokens) if limited else None
        return RequestScope(self.tenant_salt, self.adapter, window)


NO_OPTIONS: Final = RequestOptions()


class OptionFields(TypedDict, total=False):
    """Fields of one request's options as keyword arguments.

    `scope` stands for salt, adapter and window together; the others are named as in
    `RequestOptions`.
    """

    request_id: str | None
    priority: int
    tenant: str | None
    quota: TenantQuota | None
    tenant_salt: str | None
    adapter: Adapter | None
    scope: RequestScope | None
    window: int | None
    num_sink_tokens: int
    retention: Retention
    deadline_s: float | None


class OptionLists(TypedDict, total=False):
    """The same for several requests: one value for all of them, or a list with one for each."""

    request_ids: str | Sequence[str] | None
    priorities: int | Sequence[int]
    tenants: str | Sequence[str | None] | None
    scopes: RequestScope | Sequence[RequestScope] | None
    windows: int | Sequence[int | None] | None
    num_sink_tokens: int | Sequence[int]
    retention: Retention | list[Retention]
    deadline_s: float | Sequence[float | None] | None


_LISTS: Final[dict[str, tuple[str, tuple[type, ...]]]] = {
    "request_ids": ("request_id", (str,)),
    "priorities": ("priority", (int,)),
    "tenants": ("tenant", (str, NoneType)),
    "scopes": ("scope", (RequestScope,)),
    "windows": ("window", (int, NoneType)),
    "num_sink_tokens": ("num_sink_tokens", (int,)),
    "retention": ("retention", (tuple,)),
    "deadline_s": ("deadline_s", (int, float, NoneType)),
}
"""Of each list, the field that it has values of, and their types."""


def with_fields(options: RequestOptions | None, fields: OptionFields) -> RequestOptions:
    """Return options in which the fields that are given replace those that were there.

    Raises:
        InvalidInputError: What should be options or a scope is something else.
        TypeError: There is no such field.
    """
    options = NO_OPTIONS if options is None else options
    _check_type("options", options, RequestOptions, "RequestOptions, or None")
    if not fields:
        return options
    changes = cast("dict[str, Any]", fields.copy())
    scope = changes.pop("scope", None)
    if scope is not None:
        _check_type("scope", scope, RequestScope, "a RequestScope, or None")
        changes |= {"tenant_salt": scope.tenant_salt, "adapter": scope.adapter}
        if scope.window is not None:
            _check_type(
                "scope.window", scope.window, AttentionWindow, "an AttentionWindow, or None"
            )
            if changes.get("window") is not None or changes.get("num_sink_tokens"):
                window = changes.get("window")
                raise InvalidInputError("window", window, "None where the scope has a window")
            changes["window"] = scope.window.size
            changes["num_sink_tokens"] = scope.window.num_sink_tokens
    return dataclasses.replace(options, **changes)


def options_for_each(
    num_prompts: int,
    options: RequestOptions | Sequence[RequestOptions] | None,
    lists: OptionLists,
) -> list[RequestOptions]:
    """Return the options of each of several requests.

    Args:
        num_prompts: How many they are.
        options: For all, or one for each.
        lists: What replaces single fields of these, for all or one for each.

    Raises:
        InvalidInputError: A list has another length, or holds something else.
        TypeError: There is no such list.
    """
    options = NO_OPTIONS if options is None else options
    for_all = for_each("options", options, RequestOptions, num_prompts)
    changes: list[dict[str, Any]] = [{} for _ in for_all]
    for name, values in lists.items():
        if name not in _LISTS:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        if values is None:
            continue
        field, kinds = _LISTS[name]
        new: list[object] = for_each(name, values, kinds, num_prompts)
        for own, value in zip(changes, new, strict=True):
            own[field] = value
    changed = []
    for index, (each, own) in enumerate(zip(for_all, changes, strict=True)):
        with of_prompt(index, num_prompts):
            changed.append(with_fields(each, cast("OptionFields", own)))
    return changed


@contextlib.contextmanager
def of_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Note on an InvalidInputError which of several prompts it is about."""
    try:
        yield
    except InvalidInputError as error:
        if num_prompts > 1:
            error.add_note(f"in prompts[{index}]")
        raise


def for_each(
    field: str, values: object, kind: type[_T] | tuple[type[_T], ...], num_prompts: int
) -> list[_T]:
    """Repeat one value for all prompts, or check that there is one for each.

    Raises:
        InvalidInputError: It is neither.
    """
    kinds: tuple[type[_T], ...] = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join("None" if one is NoneType else one.__name__ for one in kinds)
    accepted = f"one {names}, or a list of {num_prompts}, one for each prompt"
    if isinstance(values, kinds):
        repeated: list[Any] = [values] * num_prompts
        return repeated
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != num_prompts:
        raise InvalidInputError(field, values, accepted)
    if not all(isinstance(value, kinds) for value in values):
        raise InvalidInputError(field, values, accepted)
    return list(values)


def _check_type(field: str, value: object, kind: type, accepted: str) -> None:
    if not isinstance(value, kind):
        raise InvalidInputError(field, value, accepted)
