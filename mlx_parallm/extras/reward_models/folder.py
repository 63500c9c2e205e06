"""RewardModelFolder: the reward models among the subfolders of a folder, each written once and whole.

NAME/adapter_config.json, adapter_model.safetensors    an adapter and a head, as PEFT saves them
NAME/manifest.json                                     the base model, how it agreed with people, and checksums
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx_parallm
from mlx_parallm import atomic
from mlx_parallm.adapters.checkpoints import MAX_BYTES, Sealed, check_metrics, file_sum, file_sums
from mlx_parallm.adapters.files import Float32, is_spelled_so, read_as, read_config
from mlx_parallm.adapters.formats import (
    CONFIG_FILE,
    PEFT_WEIGHTS,
    SCORE,
    SCORE_WEIGHT,
    PeftFormat,
    described,
    is_scorer,
    problem,
    write_peft,
)
from mlx_parallm.adapters.runs import MANIFEST
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights
from mlx_parallm.core.adapters import check_name
from mlx_parallm.errors import AdapterFileError, ConflictError, InvalidRequestError, StorageError, shown


def no_reward_model(name: str) -> InvalidRequestError:
    """The error about a name that no reward model has. It lists no others, because a client may not know of them."""
    return InvalidRequestError(f"no reward model is called {shown(name)}: --adapter-dir has no such subfolder")


class RewardModelManifest(Sealed):
    """The content of a reward model's `manifest.json`."""

    reward_model: str
    head: Literal["score"] = "score"


class RewardModelFolder:
    """Finds, reads and writes reward models. Any thread may use it. It blocks on the disk, so call it neither on the
    event loop nor on the device thread.

    One that another program has saved with PEFT needs no manifest; then its files and base model are not checked
    against one.

    Args:
        folder: None: there are no reward models.
        fingerprint: of the base model that is served; None if it is not loaded.
    """

    def __init__(self, folder: Path | None, fingerprint: str | None = None) -> None:
        self._folder = folder
        self._fingerprint = fingerprint

    def check(self, name: str) -> None:
        """Checks all but the weights.

        Raises:
            InvalidRequestError: there is no reward model of this name, or it is not of the base model.
        """
        path = self._find(name)
        _form_of(read_config(path, None))
        self._manifest_of(path)

    def load(self, name: str, layout: AdapterLayout) -> RewardModelWeights:
        """Reads a reward model, after checking the checksums of its files.

        Raises:
            InvalidRequestError: as `check`; AdapterFileError: its files are damaged, or do not fit the layout.
        """
        path = self._find(name)
        if (manifest := self._manifest_of(path)) is not None:
            for file, expected in manifest.files.items():
                if not (path / file).is_file() or file_sum(path / file) != expected:
                    raise AdapterFileError(f"{name}/{file} is damaged or missing: train the reward model again")
        return read_reward_model(path, layout, max_rank=sys.maxsize)

    def check_new(self, name: str, param: str = "name") -> Path:
        """The path that a new reward model of this name will have.

        Raises:
            InvalidRequestError: there is no folder, or the name is not plain.
            ConflictError: the name is taken.
        """
        if self._folder is None:
            raise InvalidRequestError(
                f"{param}: there is no folder for reward models; start the server with --adapter-dir", param
            )
        path = self._folder / check_name(name, param)
        if os.path.lexists(path):
            raise ConflictError(f"{param}: {path} exists; choose another name, or remove that folder", param=param)
        return path

    def save(self, name: str, weights: RewardModelWeights, layout: AdapterLayout, metrics: Mapping[str, float]) -> Path:
        """Writes a new reward model and returns its folder.

        Raises:
            InvalidRequestError, ConflictError: as `check_new`.
            StorageError: the disk failed; nothing is left of it.
        """
        path = self.check_new(name)
        try:
            with atomic.new_folder(path) as aside:
                write_peft(aside, weights.adapter, layout, None, weights.head)
                manifest = RewardModelManifest(
                    reward_model=name,
                    base_fingerprint=self._fingerprint or "",
                    metrics=check_metrics(metrics),
                    created=int(time.time()),
                    mlx_parallm=mlx_parallm.__version__,
                    files=file_sums(aside),
                )
                atomic.write_file(aside / MANIFEST, manifest.render())
        except OSError as error:
            raise StorageError(f"the reward model {name} could not be written: {atomic.reason_of(error)}") from error
        return path

    def stamp(self, name: str) -> tuple[int, int]:
        """What changes when another reward model takes this name. Raises InvalidRequestError: there is none."""
        try:
            facts = (self._find(name) / CONFIG_FILE).stat()
        except OSError as error:
            raise InvalidRequestError(f"the reward model {name} is gone: {error.strerror}") from error
        return facts.st_ino, facts.st_mtime_ns

    def _find(self, name: str) -> Path:
        if self._folder is None:
            raise InvalidRequestError("there are no reward models here: name their folder with --adapter-dir")
        path = self._folder / check_name(name, "reward_model")
        if not (is_spelled_so(path) and (path / CONFIG_FILE).is_file() and is_reward_model(path)):
            raise no_reward_model(name)
        return path

    def _manifest_of(self, path: Path) -> RewardModelManifest | None:
        """None if it has none.

        Raises:
            AdapterFileError: it is damaged, or the reward model is of another base model.
        """
        try:
            with (path / MANIFEST).open("rb") as file:
                manifest = RewardModelManifest.parse(file.read(MAX_BYTES))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise AdapterFileError(f"{path.name}/{MANIFEST} is damaged: train the reward model again") from error
        if self._fingerprint is not None and manifest.base_fingerprint != self._fingerprint:
            raise AdapterFileError(f"the reward model {path.name} is of another base model than this one")
        return manifest


_OF_THE_HEAD = frozenset({"task_type", "modules_to_save"})
_HEADS = (SCORE, "classifier")
"""Heads that PEFT lists in `modules_to_save` of every reward model. A model has one of them."""


@dataclass(frozen=True, slots=True)
class RewardModelWeights:
    """The weights of a reward model: its adapter, and its head [hidden], which gives the reward head · hidden state."""

    adapter: AdapterWeights
    head: Float32


def read_reward_model(folder: Path, layout: AdapterLayout, max_rank: int) -> RewardModelWeights:
    """Reads and checks the reward model in `folder`. Blocks on the disk, so call it neither on the event loop nor on
    the device thread.

    Raises:
        AdapterFileError: the files are malformed, of another model, or not those of a reward model.
    """
    form = _form_of(read_config(folder, None))
    file, tensors = read_as(form, folder, layout, max_rank, others=[SCORE_WEIGHT])
    if SCORE_WEIGHT not in tensors:
        raise problem(f"{PEFT_WEIGHTS} has no {SCORE_WEIGHT}: a reward model has a head")
    head, wanted = tensors[SCORE_WEIGHT], (1, layout.hidden)
    if head.shape != wanted:
        raise problem(
            f"{SCORE_WEIGHT} is {list(head.shape)}, but a head that gives one number for this model is {list(wanted)}: "
            "is it of another base model, or a classifier?"
        )
    return RewardModelWeights(file.weights, head[0])


def is_reward_model(folder: Path) -> bool:
    """Whether the config in a folder says that it is a reward model. Raises AdapterFileError: it cannot be read."""
    return is_scorer(read_config(folder, None))


def _form_of(config: Mapping[str, Any]) -> PeftFormat:
    if not is_scorer(config):
        raise problem(
            f"{CONFIG_FILE} is not that of a reward model: its task_type is {described(config.get('task_type'))}"
        )
    heads = config.get("modules_to_save")
    if not isinstance(heads, list) or SCORE not in heads or any(head not in _HEADS for head in heads):
        raise problem(f"{CONFIG_FILE}: modules_to_save of a reward model must name its head, {SCORE!r}, and no more")
    return PeftFormat({key: value for key, value in config.items() if key not in _OF_THE_HEAD})
