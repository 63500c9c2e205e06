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
    """`weights`: numpy, float32. `optimizer`: its state's leaves by dotted path. `step`: optimizer steps made."""

    weights: AdapterWeights
    optimizer: Mapping[str, NDArray[np.generic]]
    step: int

    def save(self, folder: Path) -> None:
        """Writes what an adapter's own files do not hold, for `CheckpointManager.save_checkpoint`'s `extra`."""
        save_file(dict(self.optimizer), folder / _STATE)
        (folder / _FACTS).write_text(json.dumps({"step": self.step}) + "\n")

    @classmethod
    def load(cls, folder: Path, weights: AdapterWeights) -> PolicySnapshot:
        """Raises AdapterFileError: the checkpoint holds no state of a trainer, or a damaged one."""
        try:
            facts = json.loads((folder / _FACTS).read_text())
            return cls(weights, load_file(folder / _STATE), int(facts["step"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AdapterFileError(
                f"{folder.name} holds no usable state of a trainer: save it from a training run"
            ) from error
