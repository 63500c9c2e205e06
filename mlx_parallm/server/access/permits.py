"""What a key may ask for in the body of a request for an answer, and how the engine's request says whose it is."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from mlx_parallm.core.requests import GenerationRequest
from mlx_parallm.server.access.keys import NamedKey
from mlx_parallm.server.access.roles import Role
from mlx_parallm.server.api.generation_fields import GenerationBody
from mlx_parallm.server.api.pooling.fields import PoolingBody
from mlx_parallm.server.errors import RoleError


def check_permitted(key: NamedKey, body: GenerationBody | PoolingBody) -> None:
    """Raises RoleError if the body asks for something that the key may not do: another priority than its own allows, or
    to be learnt from."""
    if body.priority < key.least_priority and key.role is not Role.ADMIN:
        what = f"A priority below {key.least_priority}"
        raise RoleError.needing(Role.ADMIN, key.role, what, "priority")
    if body.collect_trajectory and not key.role.allows(Role.TRAIN):
        raise RoleError.needing(Role.TRAIN, key.role, "collect_trajectory", "collect_trajectory")


def as_of(key: NamedKey, request: GenerationRequest) -> GenerationRequest:
    """The request as one of this key."""
    return replace(request, key=key.name, cache_salt=_salt(key, request.cache_salt))


def _salt(key: NamedKey, salt: str) -> str:
    """The salt of a key's requests. For a key with a prefix cache of its own, it is one that nobody can send who does
    not have the file of keys."""
    if not key.own_prefix_cache:
        return salt
    return hashlib.sha256(f"{key.sha256}:{salt}".encode("utf-8", "surrogatepass")).hexdigest()
