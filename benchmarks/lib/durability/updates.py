"""Kills a process that makes updates, some of which are held, skipped or fail, at random moments.

    python -m benchmarks.lib.durability.updates MODEL RUN LAST     continues the run, until change LAST

What the process does next depends only on how many changes its journal has: one update that comes to nothing, then one
that changes the policy and the baselines of rewards. After each change it prints the policy's digest and the baselines.
So every process that was killed, and what the next one makes again, can be compared to the bit with one that was not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import numpy as np

from benchmarks.lib.durability.processes import small_model
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import StepFailedError
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import Divergence
from mlx_parallm.train import accumulation

LONGEST_S = 5.0
"""Longest time from the first line of a process to its end."""
WHILE_STARTING = 0.2
"""Part of the kills that may hit a process before its first line."""
STATUSES = {"held": "held", "skipped": "skipped", "failed": ""}

_trouble = ""
"""What becomes of the next update: a key of STATUSES, or nothing unusual."""


# -- the process that is killed --------------------------------------------------------------------


async def states(model: Path, run: Path, last: int) -> AsyncIterator[dict[str, Any]]:
    """The state at the start, and after each change until the last."""
    global _trouble
    server = RLIntegratedServer(
        model,
        LoRAConfig(rank=4, alpha=8.0),
        RLConfig(learning_rate=1e-3, batch_size=1000),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=run,
        checkpointing__interval=4,
        rl_training__max_skips=10**6,
    )
    async with server.session() as served:
        runtime = served.training
        assert runtime is not None
        training, service = runtime.loop().training, runtime
        judge = training.watch.judge

        def judge_or_hold(*arguments: Any) -> tuple[Divergence, ...]:
            found = (Divergence("kl_step", 9.0, 1.0, "hold", "wanted by the benchmark", 0.0),)
            return found if _trouble == "held" else judge(*arguments)

        training.watch.judge = judge_or_hold  # type: ignore[method-assign]
        yield await state(runtime)
        while training.change < last:
            number, _trouble = training.change, ""
            if number % 2:  # such an update is a change too, because its rewards count in their trend
                _trouble = [*STATUSES][number % 3]
                with suppress(StepFailedError):
                    report = await service.update(given=given(number + 7))
                    assert report.status == STATUSES[_trouble], report
            else:
                await service.update(given=given(number), publish=number % 8 != 6)
            yield await state(runtime)


def clip_grad_norm(gradients: Any, most: float) -> tuple[Any, mx.array]:
    if _trouble == "failed":
        raise RuntimeError("wanted by the benchmark")
    clipped, norm = _clip_grad_norm(gradients, most)
    return clipped, mx.array(float("nan")) if _trouble == "skipped" else norm


_clip_grad_norm = accumulation.clip_grad_norm


def given(number: int) -> list[GivenTrajectory]:
    """A group, and answers without one, whose rewards are compared with earlier ones."""
    group = [GivenTrajectory((5, 6), (8 + number % 50 + at, 2), float(at), "a") for at in range(3)]
    single = [GivenTrajectory((5, 7 + at), (9, 2), (number * (at + 3) % 8) / 7, f"s{at}") for at in range(2)]
    return [*group, *single]


async def state(runtime: TrainingService) -> dict[str, Any]:
    training = runtime.loop().training
    weights = (await runtime.parts.learner.snapshot(runtime.parts.learner.state("default"))).weights
    leaves = (leaf for name in sorted(weights.pairs) for leaf in (weights.pairs[name].a, weights.pairs[name].b))
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    return {"change": training.change, "weights": digest, "baselines": training.rewards.baselines()}


async def print_states(model: Path, run: Path, last: int) -> None:
    accumulation.clip_grad_norm = clip_grad_norm
    async for found in states(model, run, last):
        print(json.dumps(found), flush=True)


# -- the process that kills ------------------------------------------------------------------------


def kill_updates(kills: int, dice: random.Random, folder: Path) -> dict[str, Any]:
    """Kills so many processes on one run. Returns the record: `different` counts states that are not as in the run that
    was not killed, and `made_again` the changes that a process had before its first line and no checkpoint."""
    model, found = small_model(folder / "small"), list[dict[str, Any]]()
    command = [sys.executable, "-m", "benchmarks.lib.durability.updates"]
    usual_s = 5.0
    for _ in range(kills):
        began = time.monotonic()
        at_start = dice.random() < WHILE_STARTING
        with subprocess.Popen([*command, str(model), str(folder / "killed"), "1000000"], **_pipes(folder)) as process:
            if at_start:
                time.sleep(dice.uniform(0.0, usual_s))
            elif line := process.stdout.readline():  # type: ignore[union-attr]
                usual_s = time.monotonic() - began
                found.append(json.loads(line))
                time.sleep(dice.uniform(0.0, LONGEST_S))
            process.send_signal(signal.SIGKILL)
            found += _states(process)
            if process.wait() != -signal.SIGKILL:
                raise SystemExit(f"the process ended by itself; see {folder / 'updates.txt'}")
        print(f"updates SIGKILL  {'while starting' if at_start else ''}  change {found[-1]['change'] if found else 0}")
    last = max((each["change"] for each in found), default=0)
    with subprocess.Popen([*command, str(model), str(folder / "not_killed"), str(last)], **_pipes(folder)) as process:
        expected = {each["change"]: each for each in _states(process)}
    different = [each["change"] for each in found if each != expected[each["change"]]]
    return {"kills": kills, "changes": last, "compared": len(found), "different": len(different)}


def _pipes(folder: Path) -> dict[str, Any]:
    errors = (folder / "updates.txt").open("a")
    return {"stdout": subprocess.PIPE, "stderr": errors, "text": True, "env": os.environ}


def _states(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What it prints until it ends. The last line may be cut off."""
    assert process.stdout is not None
    return (json.loads(line) for line in process.stdout if line.endswith("\n"))


if __name__ == "__main__":
    asyncio.run(print_states(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
