"""Deletion: what the server keeps of an adapter outside the memory of its base model, and the end of it.

<run>/<adapter>/     checkpoints, copies of versions, numbers     <adapter dir>/<adapter>/   its files
journal.sqlite       trajectories, changes of its training        lesson.json                the last lesson
metrics.jsonl        updates and evaluations                      the trajectory log
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlx_parallm import atomic
from mlx_parallm.adapters.cards import KeptPart
from mlx_parallm.adapters.runs import JOURNAL, METRICS
from mlx_parallm.adapters.runs import VERSIONS_FILE as VERSIONS
from mlx_parallm.adapters.service import has_adapter
from mlx_parallm.config import Config
from mlx_parallm.errors import StorageError
from mlx_parallm.extras_table import find, hooks
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.trajectory_log import Wanted, count_lines, of_trainee, remove_lines


class Deletion:
    """Event loop's thread only.

    Args:
        run: the folder of the run; None: there is none.
        training: the service that trains; None: the server does not train.
    """

    def __init__(self, config: Config, run: Path | None, training: TrainingService | None) -> None:
        self._run, self._training = run, training
        self._adapter_dir = config.adapters.adapter_dir
        self._log = config.rl_training.trajectory_log

    async def parts(self, adapter: str) -> tuple[KeptPart, ...]:
        """What is kept of an adapter. Raises StorageError."""
        return await asyncio.to_thread(self._parts, adapter)

    def _parts(self, adapter: str) -> tuple[KeptPart, ...]:
        try:
            return tuple(part for part in self._found(adapter) if part.count)
        except OSError as error:
            raise StorageError(f"what is kept of {adapter} cannot be read: {error.strerror}") from error

    def _found(self, adapter: str) -> Iterator[KeptPart]:
        for folder in self._folders(adapter):
            files = [path for path in folder.rglob("*") if path.is_file()]
            what = "files of checkpoints and versions" if folder.parent == self._run else "files of the adapter"
            yield KeptPart(what, str(folder), len(files), sum(path.stat().st_size for path in files))
        if self._log is not None:
            yield KeptPart("lines of the trajectory log", str(self._log), count_lines(self._log, of_trainee(adapter)))
        if self._run is None:
            return
        journal = JournalFile(self._run / JOURNAL, read_only=True)
        try:
            trajectories, changes = journal.count(adapter)
        finally:
            journal.close()
        yield KeptPart("collected trajectories", str(self._run / JOURNAL), trajectories)
        yield KeptPart("updates and other changes of its training", str(self._run / JOURNAL), changes)
        for _, kept in hooks("kept"):
            yield from kept(self._run, adapter)
        metrics = self._run / METRICS
        yield KeptPart("lines of metrics", str(metrics), count_lines(metrics, _of(adapter)))

    def _folders(self, adapter: str) -> list[Path]:
        """The adapter's folder in the run, and its subfolder of the adapter folder."""
        of_run = [self._run / adapter] if self._run is not None else []
        in_run = [folder for folder in of_run if (folder / VERSIONS).is_file() or any(folder.glob("checkpoint-*"))]
        served = [self._adapter_dir / adapter] if self._adapter_dir is not None else []
        is_adapter = [folder for folder in served if has_adapter(folder) and not _is_reward_model(folder)]
        return [folder for folder in (*in_run, *is_adapter) if folder.is_dir()]

    async def remove(self, adapter: str) -> None:
        """Removes all of it. Raises StorageError: some of it remains."""
        try:
            if self._training is not None:
                await self._training.forget(adapter)
            await asyncio.to_thread(self._remove, adapter)
        except OSError as error:
            raise StorageError(
                f"not all that is kept of {adapter} was removed ({error.strerror}): do it again"
            ) from error

    def _remove(self, adapter: str) -> None:
        for folder in self._folders(adapter):
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(atomic.hide(folder))
        if self._training is None and self._log is not None:
            remove_lines(self._log, of_trainee(adapter))
        if self._run is None:
            return
        if self._training is None:
            journal = JournalFile(self._run / JOURNAL)
            try:
                journal.forget(adapter)
            finally:
                journal.close()
        for _, forget in hooks("forget"):
            forget(self._run, adapter)
        remove_lines(self._run / METRICS, _of(adapter))


def _is_reward_model(folder: Path) -> bool:
    models = find("reward_models.folder")
    return models is not None and models.is_reward_model(folder)


def _of(adapter: str) -> Wanted:
    return lambda record: record.get("adapter") == adapter
