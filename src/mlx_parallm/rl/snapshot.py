"""A policy off the device: what restores it to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.errors import AdapterFileError

_STATE = "optimizer.safetensors"
_FACTS = "trainer.json"


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """`weights`: numpy, float32. `optimizer`: its state's leaves by dotted path. `step`: optimizer steps made.

    `micro_batch_size`: how the next update is split, which decides about its last bits; None: not decided yet.
    """

    weights: AdapterWeights
    optimizer: Mapping[str, NDArray[np.generic]]
    step: int
    micro_batch_size: int | None = None

    def save(self, folder: Path) -> None:
        """Writes what an adapter's own files do not hold, for `CheckpointManager.save_checkpoint`'s `extra`."""
        save_file(dict(self.optimizer), folder / _STATE)
        facts = {"step": self.step, "micro_batch_size": self.micro_batch_size}
        (folder / _FACTS).write_text(json.dumps(facts) + "\n")

    @classmethod
    def load(cls, folder: Path, weights: AdapterWeights) -> PolicySnapshot:
        """Raises AdapterFileError: the checkpoint holds no state of a trainer, or a damaged one."""
        try:
            facts = json.loads((folder / _FACTS).read_text())
            size = facts.get("micro_batch_size")  # checkpoints of earlier versions have none
            return cls(weights, load_file(folder / _STATE), int(facts["step"]), None if size is None else int(size))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterFileError(
                f"{folder.name} holds no usable state of a trainer: save it from a training run"
            ) from error
