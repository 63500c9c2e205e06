"""run.json: what a run is, in a file for people and programs. It is replaced as a whole whenever it changes.

`list_runs` finds the runs below a folder, which `mlx_parallm runs` shows.
"""

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
from mlx_parallm.adapters.runs import JOURNAL, METRICS, RECORD, is_run, process_of, runs_in
from mlx_parallm.errors import MALFORMED, ConfigError, StorageError
from mlx_parallm.rl.runs.records import PolicyChange, Update
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.tracking import read_metrics

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
    except (OSError, *MALFORMED) as error:
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
            raise StorageError(f"the record of the run cannot be written: {atomic.reason_of(error)}") from error


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


# ---- the runs below a folder ---------------------------------------------------------------------

RUN_STEPS = "run_steps"
"""Key of an update's progress: the steps of `mlx_parallm_train` so far."""

RUN_TASKS = "run_tasks"
"""Key of an update's progress: the tasks taken from the environment so far."""

_NEWEST = 1000
"""Changes that are looked at for the newest update. Most of them may be updates that came to nothing."""

_METRICS_BYTES = 512 * 1024
"""The part of the end of metrics.jsonl that is read. It has some hundred updates."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run, for a table.

    Attributes:
        process: the id of the process that uses the folder now; None if none does.
        steps: steps of `mlx_parallm_train`, those without a new version too; or else optimizer steps of the adapter
            that was updated last.
        reward: mean reward of the last update; None if it has none.
        evaluation: mean reward on the held-out tasks, with the bounds of its 95 % interval; None if there was none.
        adapter: the one that was updated last.
        at: Unix time of the last update, or else of the last start or end; None if nothing says it.
        reason: why it ended; or why the folder cannot be read, and then all else is unknown.
    """

    path: Path
    state: RunState
    process: int | None = None
    steps: int = 0
    reward: float | None = None
    evaluation: tuple[float, float, float] | None = None
    adapter: str | None = None
    seed: int | None = None
    at: float | None = None
    reason: str = ""


def list_runs(folder: Path) -> tuple[RunSummary, ...]:
    """The run in this folder or, if it is none, the runs in its subfolders, oldest first."""
    folders = [folder] if is_run(folder) else runs_in(folder)
    return tuple(map(summarize, folders))


def summarize(folder: Path) -> RunSummary:
    """The run in this folder. Nothing is written, and a running process is not disturbed."""
    process = process_of(folder)
    try:
        record, update = read_record(folder), _newest_update(folder / JOURNAL)
    except (ConfigError, StorageError) as error:
        return RunSummary(
            folder, RunState.RUNNING if process is not None else RunState.FAILED, process, reason=str(error)
        )
    state, reason = _state(record, process)
    at = (record.ended or record.starts[-1].at) if record and record.starts else None
    seed = record.configuration.get("rl_training", {}).get("seed") if record else None
    found = RunSummary(folder, state, process, seed=seed, at=at, reason=reason)
    if update is not None and isinstance(body := update.body, Update):
        steps = int(body.progress.get(RUN_STEPS, body.step))
        reward = body.metrics.get("reward_mean")
        found = replace(found, steps=steps, reward=reward, adapter=update.adapter, at=update.at)
    made = read_metrics(folder / METRICS, _METRICS_BYTES)
    evaluations = [one for each in made if (one := each.report.evaluation) is not None]
    found = replace(found, evaluation=evaluations[-1] if evaluations else None)
    updates = [each for each in made if each.is_update]
    if record is None or not record.command or not updates or updates[-1].step < found.steps:
        return found
    last = updates[-1]  # of `mlx_parallm_train`; it need not have changed the policy
    return replace(found, steps=last.step, reward=last.report.metrics.get("reward_mean"), at=last.at)


def _state(record: RunRecord | None, process: int | None) -> tuple[RunState, str]:
    if process is not None:
        return RunState.RUNNING, f"process {process}"
    if record is None:
        return RunState.FINISHED, f"it has no {RECORD}: it kept checkpoints only"
    if record.state is RunState.RUNNING:
        return RunState.KILLED, "its process ended without a word: killed, or the machine stopped"
    return record.state, record.reason


def _newest_update(path: Path) -> PolicyChange | None:
    """The newest update that has changed the policy, of any adapter.

    Raises:
        ConfigError, StorageError: the journal cannot be read.
    """
    journal = JournalFile(path, read_only=True)
    try:
        changes = journal.newest_changes(_NEWEST)
    finally:
        journal.close()
    updates = (change for change in changes if isinstance(change.body, Update) and change.body.changed_policy)
    return next(updates, None)
