"""SpillFile: trajectories and their fate, appended to a JSONL file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_parallm.rl.groups import Group, Member

_MOST_PENDING = 1000
"""Groups that wait for a slow disk; beyond them groups are left out, and counted."""

_log = logging.getLogger(__name__)


class SpillFile:
    """One line a trajectory, a group's lines in one write: a reader sees whole lines only.

    A failing disk is logged once and counted in `failures`, in groups, and costs nothing else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trajectory-log")
        self._given = self._left_out = 0  # the caller's thread
        self._written = self._failed = 0  # the worker's

    @property
    def failures(self) -> int:
        return self._failed + self._left_out

    def append(self, group: Group) -> None:
        """Soon, in the worker thread. The group's fate is known: it does not change any more."""
        if self._given - self._written - self._failed >= _MOST_PENDING:
            self._left_out += 1
            return
        self._given += 1
        self._worker.submit(self._append, [_record(group, member) for member in group.members])

    async def close(self) -> None:
        """Waits until all is written."""
        await asyncio.to_thread(self._worker.shutdown)

    def _append(self, records: Sequence[dict[str, Any]]) -> None:
        try:
            lines = [json.dumps(record, ensure_ascii=False, allow_nan=False, default=str) for record in records]
            _write(self._path, "".join(line + "\n" for line in lines).encode(errors="backslashreplace"))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            if not self._failed:
                _log.error("the trajectory log takes no more trajectories, or not all: %s", error)
            self._failed += 1
        else:
            self._written += 1


def _write(path: Path, data: bytes) -> None:
    """All of `data` at the file's end, or nothing. A last line that a crash cut off is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError("the disk is full")
    finally:
        os.close(descriptor)


def _record(group: Group, member: Member) -> dict[str, Any]:
    drawn = member.trajectory
    return {
        "trajectory_id": drawn.trajectory_id,
        "group_id": drawn.group_id,
        "adapter": str(drawn.adapter),
        "trainee": group.trainee,
        "fate": member.state.value,
        "reason": member.reason or "",
        "reward": member.reward,
        "scoring_function": drawn.collection.scorer,
        "metadata": dict(drawn.collection.metadata),
        "prompt_token_ids": drawn.prompt_ids,
        "completion_token_ids": drawn.completion_ids,
        "sampling_logprobs": drawn.sampling_logprobs,
        "temperature": drawn.temperature,
        "text": drawn.text,
        "finish_reason": drawn.finish_reason.value,
        "created": drawn.created,
    }
