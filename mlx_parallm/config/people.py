"""The section `rl_training.people`: updates from what people say. The string below a field is its description."""

from __future__ import annotations

from pydantic import Field

from mlx_parallm.config.types import Integer, Section


class PeopleConfig(Section):
    """Preferences, corrections and late feedback, each of which has updates and a loss of its own."""

    update_frequency: Integer = Field(default=16, ge=1)
    """Number of preferences, of corrections or of answers with late feedback in one update. Feedback that comes before
    its answer was dropped counts towards rl_training.update_frequency.
    """
