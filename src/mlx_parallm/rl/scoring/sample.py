"""What a scorer sees of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.core import Trajectory

Metadata = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion. It crosses to the child as JSON, so `metadata` holds what JSON can: tuples become lists.

    `text`: without the end-of-sequence token. `completion_tokens` counts that token. `finish_reason`: "stop" or
    "length".
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    metadata: Metadata

    @property
    def ended(self) -> bool:
        """Whether the sequence ended by itself; a text that was cut off is no answer."""
        return self.finish_reason == "stop"

    @classmethod
    def of(cls, trajectory: Trajectory) -> Sample:
        return cls(
            trajectory.text,
            len(trajectory.prompt_ids),
            len(trajectory.completion_ids),
            trajectory.finish_reason.value,
            trajectory.collection.metadata,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "metadata": dict(self.metadata),
        }


Scorer = Callable[[Sample], float]
"""A finite reward. One of a package may say in `requires: tuple[str, ...]` which keys of `metadata` it reads."""
