"""A process that trains and is killed, and the one after it: the same model, feedback and updates, to the bit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import save_tiny

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.app.build import Served
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    RequestFinished,
    SamplingParams,
    Signal,
    StopParams,
    WorkClass,
)
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.people.service import Edit
from mlx_parallm.rl.service import TrainingService

pytestmark = pytest.mark.ci

Found = dict[str, Any]
"""The digest of the weights, the live version, the number of updates, and what waits: [state, reward] by id."""


def given(number: int) -> list[GivenTrajectory]:
    if number % 2:
        tokens, advantages = (True, False, True), (0.0, 1 / 3)
        return [
            GivenTrajectory(
                (5, 6), (8 + number + each, 9, 2), None, "a", mask=tokens, advantages=(each - 1.5, *advantages)
            )
            for each in range(4)
        ]
    return [GivenTrajectory((5, 6), (8 + number + each, 2), float(each), "a") for each in range(4)]


async def digest(training: TrainingService) -> str:
    weights = (await training.parts.learner.snapshot(training.parts.learner.state("default"))).weights
    content = b"".join(
        np.ascontiguousarray(leaf).tobytes()
        for name in sorted(weights.pairs)
        for leaf in (weights.pairs[name].a, weights.pairs[name].b)
    )
    return hashlib.sha256(content).hexdigest()


async def drawn(served: Served, name: str, adapter: AdapterRef, seed: int) -> tuple[str, ...]:
    """The ids of two trajectories that are collected."""
    request = GenerationRequest(
        name,
        ((5, 6),),
        SamplingParams(seed=seed),
        StopParams(4),
        n=2,
        adapter=adapter,
        work_class=WorkClass.TRAINING,
        collection=CollectionSpec(),
    )
    (end,) = [event async for event in served.generate(request) if isinstance(event, RequestFinished)]
    return end.trajectory_ids


async def rounds(path: Path, count: int) -> AsyncIterator[Found]:
    """What there is at the start, and after each round of updates, feedback and an edit."""
    server = RLIntegratedServer(
        path / "model",
        LoRAConfig(rank=4, alpha=8.0),
        RLConfig(learning_rate=1e-3, batch_size=1000),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=path / "run",
        checkpointing__interval=4,
    )
    async with server.session() as served:
        assert served.training is not None
        service = served.training
        waiting: dict[str, list[object]] = {
            each.trajectory_id: [member.state, member.reward]
            for each, member in service.trajectories.buffer.newest(100)
        }

        async def found() -> Found:
            status = service.status()
            weights = await digest(served.training)
            return {"digest": weights, "current": str(status.current), "step": status.step, "waiting": dict(waiting)}

        yield await found()
        for number in range(count):
            # the edit of the round before, which the first round of a later process has from the journal
            await service.update(signal=Signal.PREFERENCES if number % 2 else Signal.CORRECTIONS, publish=False)
            report = await service.update(given=given(number))
            first, second = await drawn(served, f"r{report.step}", report.adapter, number)
            await service.trajectories.feedback(first, number / 4, "ann")
            edit = await served.training.extras["people"].edit(
                Edit("default", (5, 6), (9 + number, 2), () if number % 2 else (7, 2))
            )
            answers = ["chosen"] if number % 2 else ["chosen", "rejected"]
            waiting = {one: of for one, of in waiting.items() if one.startswith("traj-")}
            waiting |= {f"{edit.edit_id}-{which}": ["scored", float(which == "chosen")] for which in answers}
            waiting |= {first: ["scored", number / 4], second: ["waiting", None]}
            yield await found()


async def be_killed(path: Path, count: int) -> None:
    """Prints what each round finds, and kills this process after the last."""
    async with aclosing(rounds(path, count)) as every:
        async for found in every:
            print(json.dumps(found), flush=True)
            if (count := count - 1) < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def killed(path: Path, count: int) -> list[Found]:
    """What a process of its own prints."""
    code = "import asyncio, sys; from pathlib import Path; from app.test_killed import be_killed; "
    code += "asyncio.run(be_killed(Path(sys.argv[1]), int(sys.argv[2])))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(path), str(count)]
    done = subprocess.run(command, env=environment, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def resumed(path: Path) -> Found:
    """What a process that goes on finds; this one, which ends it as it should end."""
    (found,) = [found async for found in rounds(path, 0)]
    return json.loads(json.dumps(found))


@pytest.mark.timeout(240)
async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    *_, before = await asyncio.to_thread(killed, tmp_path, 2)
    wal = tmp_path / "run" / f"{JOURNAL}-wal"
    kept = wal.read_bytes()
    wal.unlink()
    with pytest.raises(ConfigError, match=r"run\.commits beside it says"):
        await resumed(tmp_path)
    wal.write_bytes(kept)
    first, *_, last = await asyncio.to_thread(killed, tmp_path, 2)
    assert first == before, "made again from nothing, as there was no checkpoint"
    assert (last["step"], last["current"]) == (7, "default@4")
    again = await resumed(tmp_path)
    stale = {one for one in last["waiting"] if one in ("traj-r1-0", "traj-r1-1", "traj-r3-0", "traj-r3-1")}
    late = {"late-traj-r1-0": ["scored", -1.0], "late-traj-r3-0": ["scored", 1.0]}
    waiting = {one: of for one, of in last["waiting"].items() if one not in stale}
    assert again == {**last, "waiting": waiting | late}, "opinions of answers that are too old count as late ones"
    assert await resumed(tmp_path) == again, "and a process that ends by itself leaves the same"
