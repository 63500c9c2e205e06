"""Request bodies of Atropos' trajectory API, apart from `ScoredData`: those of `atroposlib.api.server` 0.4.0.

Unknown fields are ignored and types are converted, as Atropos does, so that its clients need no change.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from mlx_parallm.extras.atropos.scored_data import ScoredData

MAX_GROUPS = 1024
MAX_TOKEN_LENGTH = 2**31 - 1


class RegisterEnv(BaseModel):
    """An environment that will send groups."""

    max_token_length: Annotated[int, Field(ge=1, le=MAX_TOKEN_LENGTH)]
    desired_name: Annotated[str, Field(min_length=1, max_length=200)]
    weight: Annotated[float, Field(allow_inf_nan=False)]
    group_size: Annotated[int, Field(ge=1, le=4096)]
    min_batch_allocation: float | None = None


class EnvIdentifier(BaseModel):
    """The environment that asks."""

    env_id: int


class ScoredDataList(BaseModel):
    """The body of /scored_data_list, which is a list."""

    LIST: ClassVar[str] = "groups"
    """A body that is a list is the value of this field."""

    groups: Annotated[list[ScoredData], Field(max_length=MAX_GROUPS)]
