"""The trajectory log: each trajectory is one line, whatever happens to the disk."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rl.fakes import groups_of, trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup
from mlx_parallm.rl.trajectory_log import TrajectoryLog

NAME = "math"


def added(buffer: TrajectoryBuffer, name: str, n: int = 2) -> TrajectoryGroup:
    group = TrajectoryGroup(NAME, trajectories(name, AdapterRef(NAME, 1), n))
    buffer.add(group)
    return group


def logged(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_trajectory_is_one_line_once_its_fate_is_known(tmp_path: Path) -> None:
    file = TrajectoryLog(tmp_path / "log" / "t.jsonl")
    buffer = TrajectoryBuffer(10, file.append)
    group = TrajectoryGroup(NAME, trajectories("g", AdapterRef(NAME, 4), 3, metadata={"answer": "4\n", "tag": "é"}))
    buffer.add(group)
    for index in (0, 2):
        groups_of(buffer).apply(Feedback(f"g-{index}", index / 2))
    groups_of(buffer).expire("g")
    buffer.take(NAME)
    buffer.finish(group)
    added(buffer, "open")
    buffer.drop(added(buffer, "h", 1), DropReason.STALE)
    await file.close()
    lines = logged(tmp_path / "log" / "t.jsonl")
    assert [(line["trajectory_id"], line["fate"], line["reason"], line["reward"]) for line in lines] == [
        ("g-0", "trained", "", 0.0), ("g-1", "dropped", "timeout", None), ("g-2", "trained", "", 1.0),
        ("h-0", "dropped", "stale", None)]  # fmt: skip
    assert lines[0]["metadata"] == {"answer": "4\n", "tag": "é"}
    assert lines[0]["sampling_logprobs"] == [-0.5, -1.0]
    assert lines[0]["completion_token_ids"] == [3, 4]
    assert (lines[0]["adapter"], lines[0]["scoring_function"]) == ("math@4", "exact")
    assert file.failures == 0
    assert (tmp_path / "log" / "t.jsonl").stat().st_mode & 0o077 == 0, "prompts and answers are in it"


async def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"trajectory_id": "whole"}\n{"trajec')
    file = TrajectoryLog(path)
    TrajectoryBuffer(1, file.append).add(TrajectoryGroup(NAME, trajectories("g", AdapterRef(NAME, 1), 2)))
    await file.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"trajectory_id": "whole"}', '{"trajec']
    assert [json.loads(line)["trajectory_id"] for line in lines[2:]] == ["g-0", "g-1"]


def fails(*_: object) -> int:
    raise OSError(28, "No space left on device")


def half(real: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    return lambda descriptor, data: real(descriptor, data[: len(data) // 2])


@pytest.mark.parametrize("broken", [fails, half(os.write)])
async def test_a_failing_disk_costs_whole_groups_and_nothing_else(
    tmp_path: Path, broken: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    file = TrajectoryLog(path)
    buffer = TrajectoryBuffer(4, file.append)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", broken)
        buffer.drop(added(buffer, "a"), DropReason.STALE)
        await _failed(file)
    buffer.drop(added(buffer, "c"), DropReason.STALE)
    await file.close()
    assert [line["trajectory_id"] for line in logged(path)] == ["c-0", "c-1"]
    assert file.failures == 1
    buffer.check_integrity()


async def _failed(file: TrajectoryLog) -> None:
    """Returns once the worker has tried."""
    while not file.failures:
        await asyncio.sleep(0.001)
