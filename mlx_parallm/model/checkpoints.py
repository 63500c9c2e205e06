"""`CheckpointManager`: an adapter's checkpoints by name, for Python programs.

    checkpoints = CheckpointManager("path/to/model")
    checkpoints.save_checkpoint("checkpoint-1", weights)
    checkpoints.hot_swap(manager, "checkpoint-1")

The server and the trainer use the `CheckpointStore` beneath it, which knows several adapters and their versions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_parallm.adapters.checkpoints.manifest import step_of
from mlx_parallm.adapters.checkpoints.store import CheckpointStore
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import AdapterRef, CheckpointCard
from mlx_parallm.model.families import classify
from mlx_parallm.model.hooks import adapter_layout
from mlx_parallm.model.loading import load
from mlx_parallm.model.manager import SharedModelManager, as_weights


class CheckpointManager:
    """The checkpoints of one adapter in `folder`, which `--checkpoint-dir` can serve too.

    A checkpoint's name is `checkpoint-<step>`. Any other name is a tag, given to the checkpoint at the next free step.
    `latest` is the newest one.

    Args:
        base_model: the model for which the adapter is made: a directory, a hub id, a loaded model, or None for the
            bundled model. Only its layers are read.
        folder: where the checkpoints are kept.
        keep: how many of the newest checkpoints are kept. Those with a tag are kept too.
        adapter: the adapter's name.

    Raises:
        ConfigError: the folder cannot be made or read.
        ModelError: the base model cannot be loaded.
    """

    def __init__(
        self,
        base_model: SharedModelManager | Path | str | None = None,
        folder: Path | str = "checkpoints",
        keep: int = 10,
        adapter: str = "default",
    ) -> None:
        if isinstance(base_model, SharedModelManager):
            layout, fingerprint = base_model.adapter_layout, base_model.fingerprint
        else:
            base = load(None if base_model is None else str(base_model), dequantize=False)
            layout, fingerprint = adapter_layout(base.model, classify(base.model)), base.fingerprint
        self._layout = layout
        self._store = CheckpointStore(Path(folder), layout, fingerprint, max_rank=sys.maxsize, keep=keep)
        self._adapter = adapter

    def names(self) -> tuple[str, ...]:
        """The names of all checkpoints and their tags, oldest first."""
        return tuple(name for card in self._store.cards(self._adapter) for name in (card.name, *card.tags))

    def save_checkpoint(self, name: str, adapter: AdapterWeights | Path | str) -> CheckpointCard:
        """Writes an adapter, given as weights or as a folder in mlx-lm's or PEFT's format. The write is atomic.

        Raises:
            InvalidRequestError: the name cannot be used, or the adapter is not for the base model.
            ConflictError: that step has other weights.
            StorageError: the disk failed; other checkpoints are untouched.
        """
        weights = as_weights(adapter, self._layout)
        step = step_of(name)
        version = AdapterRef(self._adapter, self._store.newest_version(self._adapter) + 1)
        return self._store.save_checkpoint(version, weights, step, tags=() if step is not None else (name,))

    def load_checkpoint(self, name: str = "latest") -> AdapterWeights:
        """Reads the weights, after checking the checksums of all files and the base model.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: a file is damaged, or the checkpoint belongs to another base model.
        """
        return self._store.load_checkpoint(self._adapter, name).weights

    def hot_swap(self, manager: SharedModelManager, name: str = "latest") -> None:
        """Makes a loaded model use a checkpoint. If it cannot be loaded, the model keeps its adapter.

        Raises:
            UnknownModelError, AdapterFileError: see `load_checkpoint`.
        """
        manager.add_lora(name, self.load_checkpoint(name))
        manager.switch_lora(name)
