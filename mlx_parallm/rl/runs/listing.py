"""The runs below a folder: what `mlx_parallm runs` shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mlx_parallm.adapters.runs import JOURNAL, METRICS, RECORD, is_run, process_of, runs_in
from mlx_parallm.errors import ConfigError, StorageError
from mlx_parallm.rl.runs.metrics import read_metrics
from mlx_parallm.rl.runs.record import RunRecord, RunState, read_record
from mlx_parallm.rl.runs.records import PolicyChange, Update
from mlx_parallm.rl.runs.store import JournalFile

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
