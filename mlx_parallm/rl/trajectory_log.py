"""TrajectoryLog: appends every trajectory to a JSONL file, with its reward and whether it was trained on or dropped.
Lines of such files are counted and removed here too."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_parallm import atomic
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.trajectories import GroupMember, TrajectoryGroup

_MAX_PENDING = 1000
"""Groups that may wait for a slow disk. Further groups are not written, and counted as failures."""

Wanted = Callable[[dict[str, Any]], bool]

_log = logging.getLogger(__name__)


class TrajectoryLog:
    """Writes one line per trajectory. The lines of a group are written at once, so readers see only whole lines.

    Failures of the disk are counted in `failures`, and the first one is logged; training continues.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trajectory-log")
        self._submitted = self._left_out = 0  # written by the caller's thread
        self._written = self._failed = 0  # written by the worker thread

    @property
    def failures(self) -> int:
        """Groups that are not in the file."""
        return self._failed + self._left_out

    def append(self, group: TrajectoryGroup) -> None:
        """Writes the group in a worker thread. Its members must be trained or dropped, so that they do not change."""
        if self._submitted - self._written - self._failed >= _MAX_PENDING:
            self._left_out += 1
            return
        self._submitted += 1
        self._worker.submit(
            self._append, [_record(group, member, turn) for member in group.members for turn in member.turns]
        )

    async def forget(self, unwanted: Wanted) -> None:
        """Removes lines. Raises OSError."""
        await asyncio.wrap_future(self._worker.submit(remove_lines, self._path, unwanted))

    async def close(self) -> None:
        """Returns when everything is written."""
        await asyncio.to_thread(self._worker.shutdown)

    def _append(self, records: Sequence[dict[str, Any]]) -> None:
        try:
            lines = [json.dumps(record, ensure_ascii=False, allow_nan=False, default=str) for record in records]
            data = "".join(line + "\n" for line in lines).encode(errors="backslashreplace")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic.append_lines(self._path, data, mode=0o600)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            if not self._failed:
                _log.error("trajectories cannot be written to the trajectory log: %s", error)
            self._failed += 1
        else:
            self._written += 1


def of_trainee(adapter: str) -> Wanted:
    """Whether a line is a trajectory that has trained an adapter."""
    return lambda record: record.get("trainee") == adapter


def _record(group: TrajectoryGroup, member: GroupMember, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "episode_id": trajectory.collection.episode_id or None,
        "turn": trajectory.collection.turn,
        "adapter": None if trajectory.adapter is None else str(trajectory.adapter),
        "trainee": group.adapter,
        "fate": member.state.value,
        "reason": member.reason or "",
        "reward": member.reward,
        "scoring_function": trajectory.collection.scorer,
        "metadata": dict(trajectory.collection.metadata),
        "prompt_token_ids": trajectory.prompt_ids,
        "completion_token_ids": trajectory.completion_ids,
        "sampling_logprobs": trajectory.sampling_logprobs,
        "temperature": trajectory.temperature,
        "text": trajectory.text,
        "finish_reason": trajectory.finish_reason and trajectory.finish_reason.value,
        "created": trajectory.created,
    }


# -- lines of any JSONL file ---------------------------------------------------------------------


def count_lines(path: Path, wanted: Wanted) -> int:
    """How many lines of a file are wanted; 0 if there is no file. Raises OSError."""
    return sum(found for _, found in _lines(path, wanted)) if path.is_file() else 0


def remove_lines(path: Path, unwanted: Wanted) -> None:
    """Removes lines of a file. Lines that another process appends meanwhile may be lost. Raises OSError."""
    if not count_lines(path, unwanted):
        return
    aside = path.with_name(f".tmp-{path.name}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, path.stat().st_mode & 0o777)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(line for line, found in _lines(path, unwanted) if not found)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _lines(path: Path, wanted: Wanted) -> Iterator[tuple[bytes, bool]]:
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # cut off by a crash, or damaged
                record = None
            yield line, isinstance(record, dict) and wanted(record)
