"""The section `rl_training.curriculum`: which tasks rollouts take. The string below a field is its description."""

from __future__ import annotations

from pydantic import Field

from mlx_parallm.config.types import Integer, Number, Section


class CurriculumConfig(Section):
    """Tasks are drawn by what the last tasks of their level taught, so that those too easy or too hard are rare."""

    enabled: bool = False
    """Draw the tasks of rl_training.environment by how often their levels teach something. A task's level is the column
    `level` of its row in a file, or what its environment gives it. Tasks without levels come in the environment's
    order.
    """
    floor: Number = Field(default=0.2, ge=0, le=1)
    """Share of the tasks that is drawn from all levels as often as the environment has them, whatever they teach. 1
    draws all tasks so.
    """
    memory: Integer = Field(default=10, ge=1)
    """Number of the last tasks of a level that count. Older ones are forgotten exponentially."""
