"""run.json: what a run is, in a file for people and programs. It is replaced as a whole whenever it changes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mlx_parallm import __version__, atomic
from mlx_parallm.adapters.runs import RECORD
from mlx_parallm.errors import ConfigError, StorageError

_FORMAT = 1
_COMPARED = ("model", "rl_training", "inference")
"""Sections of the configuration whose changes are logged when a run is resumed."""
_MAX_STARTS = 100
"""Starts that are kept, the newest ones."""


class RunState(StrEnum):
    """How a run ended, or that it has not. KILLED is not in the file: it says RUNNING there, and no process runs."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class RunStart:
    """One process of a run. `at`: Unix time. `versions`: of packages, by name. `lineage`: by adapter, the version that
    it started with and the folder that this came from. `blas_threads`: those that its matrix products used on a CPU;
    0: not known."""

    at: float
    process: int
    versions: Mapping[str, str] = field(default_factory=dict)
    lineage: Mapping[str, str] = field(default_factory=dict)
    blas_threads: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of run.json.

    Attributes:
        configuration: every setting of the newest process, without secrets.
        command: what is trained on, for how many steps and so on, if the run is one of `mlx_parallm_train`.
        starts: the processes of the run, oldest first.
        reason: why it ended, for people.
    """

    id: str
    created: float
    state: RunState
    configuration: Mapping[str, Any] = field(default_factory=dict)
    command: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[RunStart, ...] = ()
    ended: float | None = None
    reason: str = ""
    format: int = _FORMAT


_RECORD = TypeAdapter(RunRecord)


def read_record(folder: Path) -> RunRecord | None:
    """The record of the run in this folder; None if it has none.

    Raises:
        ConfigError: it cannot be read, or a newer version has written it.
    """
    path = folder / RECORD
    try:
        stored = json.loads(path.read_bytes())
        newer = isinstance(stored, dict) and stored.get("format", 0) > _FORMAT
        if not newer:
            return _RECORD.validate_python(stored)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({_first_line(error)}): restore it, or remove it") from error
    raise ConfigError(f"{path} was written by a newer version of MLX ParaLLM: use that version, or another run folder")


class RunFile:
    """The run.json of a run that this process makes.

    Attributes:
        changes: what the run's last process was configured otherwise, for people.

    Args:
        lineage: the version that each adapter starts with, and where it comes from.

    Raises:
        ConfigError: the run's earlier record cannot be read, or the new one cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        configuration: Mapping[str, Any],
        command: Mapping[str, Any],
        lineage: Mapping[str, str],
        blas_threads: int = 0,
    ) -> None:
        self._folder = folder
        start = RunStart(time.time(), os.getpid(), _versions(), dict(lineage), blas_threads)
        earlier = read_record(folder) or RunRecord(run, start.at, RunState.RUNNING)
        self._record = replace(
            earlier,
            id=run,
            state=RunState.RUNNING,
            configuration=dict(configuration),
            command=dict(command),
            starts=(*earlier.starts, start)[-_MAX_STARTS:],
            ended=None,
            reason="",
        )
        self.changes = _changes(earlier, self._record) if earlier.starts else ()
        try:
            self._write()
        except StorageError as error:
            raise ConfigError(f"{folder / RECORD} cannot be written: {error}") from error

    def end(self, state: RunState, reason: str = "") -> None:
        """Writes how the run has ended. Raises StorageError."""
        self._record = replace(self._record, state=state, ended=time.time(), reason=reason)
        self._write()

    def _write(self) -> None:
        text = json.dumps(asdict(self._record), indent=2, ensure_ascii=False, default=str)
        try:
            atomic.replace_file(self._folder / RECORD, text.encode(errors="replace") + b"\n")
        except OSError as error:
            raise StorageError(f"the record of the run cannot be written: {error.strerror}") from error


def _changes(before: RunRecord, now: RunRecord) -> tuple[str, ...]:
    """`rl_training.seed 0 -> 1`, for each setting of the model and of training that has changed."""
    old, new = _settings(before), _settings(now)
    return tuple(f"{name} {old[name]} -> {value}" for name, value in new.items() if name in old and old[name] != value)


def _settings(record: RunRecord) -> dict[str, Any]:
    chosen = {name: record.configuration.get(name, {}) for name in _COMPARED}
    return dict(_leaves(chosen, "")) | {name: value for name, value in record.command.items() if name != "steps"}


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _versions() -> dict[str, str]:
    return {"mlx_parallm": __version__, "mlx": metadata.version("mlx"), "mlx-lm": metadata.version("mlx-lm")}


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
