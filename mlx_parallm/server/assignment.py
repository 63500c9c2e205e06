"""Which requests belong together, so that one version of an adapter answers them while two are compared."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_parallm.server.api.generation_fields import GenerationBody
from mlx_parallm.server.api.pooling.fields import PoolingBody

SESSION_HEADER = "x-session-id"


def assignment_key(scope: Scope, body: GenerationBody | PoolingBody) -> str:
    """The group or episode of a request, since one version must draw all of it; else its session (the header
    X-Session-Id) or user. A request that names none of them is drawn by itself."""
    named = (
        body.group_id,
        body.episode_id,
        Headers(scope=scope).get(SESSION_HEADER),
        body.user,
        body.safety_identifier,
    )
    return next(filter(None, named), None) or secrets.token_hex(8)
