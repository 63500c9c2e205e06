"""`/v1/usage`: what each key has used."""

from __future__ import annotations

from typing import Literal

from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.limits import Account
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

router = Router()


class KeyUsage(WireOutput):
    """What one key has used, and its limits."""

    key: str
    """The key's name; `api-key` for the one of `--api-key`, `anyone` if the server requires none."""
    role: str
    """`inference`, `train` or `admin`."""
    requests: int
    """Requests for answers that began."""
    running: int
    """Those under way."""
    refused: int
    """Requests that a limit of the key refused."""
    prompt_tokens: int
    """Tokens of prompts."""
    cached_tokens: int
    """Those of them that were taken from the prefix cache."""
    completion_tokens: int
    """Tokens of answers."""
    requests_per_minute: int | None
    """Most requests in a minute; null: no limit."""
    tokens_per_minute: int | None
    """Most tokens of prompts and answers in a minute; null: no limit."""
    max_concurrent: int | None
    """Most requests under way at a time; null: no limit."""


class UsageList(WireOutput):
    """The usage since the server started."""

    object: Literal["list"]
    since: int
    """When the server started, in Unix time."""
    data: list[KeyUsage]
    """The keys that have been used, by name."""


@router.get("/v1/usage", role=Role.INFERENCE)
async def usage(services: ServicesDep) -> UsageList:
    """What the key of this request has used since the server started; with an admin key, what every key has used."""
    accounts, key = services.accounts, services.key
    shown = accounts.all() if key.role is Role.ADMIN else [accounts.of(key)]
    return UsageList(object="list", since=services.started_at, data=list(map(_usage, shown)))


def _usage(account: Account) -> KeyUsage:
    key = account.key
    return KeyUsage(
        key=key.name,
        role=key.role,
        requests=account.requests,
        running=account.running,
        refused=account.refused,
        prompt_tokens=account.prompt_tokens,
        cached_tokens=account.cached_tokens,
        completion_tokens=account.completion_tokens,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_concurrent=key.max_concurrent,
    )
