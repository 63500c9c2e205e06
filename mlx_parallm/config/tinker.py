"""The section `rl_training.tinker`: limits of the Tinker API. The string below a field is its description."""

from __future__ import annotations

from pydantic import Field

from mlx_parallm.config.types import Integer, Number, Section


class TinkerConfig(Section):
    """The Tinker API (/api/v1), with which clients train adapters of their own. A server that trains has it."""

    max_models: Integer = Field(default=4, ge=0)
    """Largest number of models that Tinker clients may train at the same time. Each needs memory for its weights, its
    gradients and its optimizer's state. 0 lets clients sample only. One of several keys may have at most four for each
    that stays free.
    """
    max_sessions: Integer = Field(default=64, ge=1)
    """Largest number of Tinker sessions at the same time. One of several keys may have at most four for each that stays
    free.
    """
    session_timeout_s: Number = Field(default=300.0, gt=0)
    """Time in seconds after which a session whose client has fallen silent is ended, with its models. Clients say every
    10 s that they are there.
    """
