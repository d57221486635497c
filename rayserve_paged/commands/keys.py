"""`rayserve-paged keys`: the tenants of an endpoint, and their API keys."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rayserve_paged.core.errors import InvalidInputError

keys = typer.Typer(help="Add, list and revoke API keys.", no_args_is_help=True)

_File = Annotated[Path, typer.Option(help="The keys file, YAML or (ending in .json) JSON.")]
_Limit = Annotated[int | None, typer.Option(help="Limit of the tenant's quota.")]


@keys.command()
def add(
    file: _File,
    tenant: Annotated[str, typer.Option(help="Whose key; made where there is none yet.")],
    max_concurrent_requests: _Limit = None,
    requests_per_minute: _Limit = None,
    tokens_per_minute: _Limit = None,
    block_share: Annotated[
        float | None, typer.Option(help="Share of all blocks, above 0 and up to 1.")
    ] = None,
    prefix_group: Annotated[
        str | None, typer.Option(help="Tenants of one group share cached prefixes.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Of its most urgent requests; lower is served first.")
    ] = None,
    admin: Annotated[
        bool | None, typer.Option(help="Whether it sees all tenants' requests.")
    ] = None,
) -> None:
    """Make a key and print it, this once: the file has its hash. Options that are not given leave
    what the tenant has.
    """
    import secrets

    from rayserve_paged.serve import api_keys, keys_file
    from rayserve_paged.serve.tenants import parse_keys

    key = api_keys.new_key()
    quota = {
        "max_concurrent_requests": max_concurrent_requests,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "block_share": block_share,
    }
    fields = {"prefix_group": prefix_group, "priority": priority, "is_admin": admin}
    with keys_file.locked(file):
        before = keys_file.read_keys(file) if file.exists() else parse_keys(None, str(file))
        content = before.model_dump(mode="json")
        entry = next((one for one in content["tenants"] if one["name"] == tenant), None)
        if entry is None:
            entry = {"name": tenant, "salt": secrets.token_hex(16), "key_hashes": [], "quota": {}}
            content["tenants"].append(entry)
        entry["key_hashes"].append(api_keys.key_hash(key))
        entry["quota"] |= {name: value for name, value in quota.items() if value is not None}
        entry |= {name: value for name, value in fields.items() if value is not None}
        keys_file.write_keys(file, parse_keys(content, "an option"))
    print(key)
    print("keep it: it is shown this once, and the file has its hash alone", file=sys.stderr)


@keys.command(name="list")
def list_keys(file: _File) -> None:
    """Print each tenant with its limits and the ids of its keys."""
    from rayserve_paged.serve import keys_file
    from rayserve_paged.serve.api_keys import ID_LENGTH

    for tenant in keys_file.read_keys(file).tenants:
        limits = tenant.quota.model_dump(exclude_none=True)
        shown = [f"{name}={value}" for name, value in limits.items()]
        if tenant.prefix_group is not None:
            shown.append(f"prefix_group={tenant.prefix_group}")
        if tenant.priority:
            shown.append(f"priority={tenant.priority}")
        if tenant.is_admin:
            shown.append("admin")
        print(" ".join([tenant.name, *shown]))
        for one in tenant.key_hashes:
            print(f"  {one[:ID_LENGTH]}")


@keys.command()
def revoke(
    file: _File,
    key: Annotated[str, typer.Argument(help="A key, or its id as `keys list` prints it.")],
) -> None:
    """Take a key out of the file. Endpoints refuse it from about a second later."""
    from rayserve_paged.serve import keys_file
    from rayserve_paged.serve.api_keys import ID_LENGTH, KEY_PREFIX, key_hash

    wanted = key_hash(key) if key.startswith(KEY_PREFIX) else key
    with keys_file.locked(file):
        before = keys_file.read_keys(file)
        found = [
            one
            for tenant in before.tenants
            for one in tenant.key_hashes
            if len(wanted) >= ID_LENGTH and one.startswith(wanted)
        ]
        if len(found) != 1:
            # A key that was given whole is not shown, not even where it is in no file.
            shown = key if not key.startswith(KEY_PREFIX) else wanted[:ID_LENGTH]
            accepted = f"a key of {file}, or its id of {ID_LENGTH} digits"
            raise InvalidInputError("key", shown, accepted)
        tenants = tuple(
            tenant.model_copy(
                update={"key_hashes": tuple(h for h in tenant.key_hashes if h != found[0])}
            )
            for tenant in before.tenants
        )
        keys_file.write_keys(file, before.model_copy(update={"tenants": tenants}))
    print(f"revoked {found[0][:ID_LENGTH]}")
