"""A run that three keys teach, and the process that forgets some of it.

    python -m benchmarks.lib.forgetting.taught MODEL RUN     continues the run, and forgets the key bob unless it has

It prints `ready` when it has begun, and then the digest of the policy.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec
from mlx_parallm.extras.forgetting.service import Forgetting
from mlx_parallm.rl.service import TrainingService

KEYS = ("ann", "bob", "eve")
BOB = "bob"
GROUP, PROMPT, ANSWER = 4, 24, 12
"""Answers of a group; tokens of a prompt, and of an answer."""

LeftOut = Callable[[Trajectory], bool]


def nothing(_: Trajectory) -> bool:
    return False


@asynccontextmanager
async def process(model: Path, run: Path) -> AsyncIterator[TrainingService]:
    """A process that trains in the folder `run`."""
    server = RLIntegratedServer(
        model,
        LoRAConfig(rank=4, alpha=8.0),
        RLConfig(learning_rate=1e-3, batch_size=1000),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=run,
    )
    async with server.session() as served:
        assert served.training is not None
        yield served.training


def group(training: TrainingService, update: int, key: str) -> list[Trajectory]:
    """The answers of a key for an update: random tokens, the same in every run, of the live version."""
    random = np.random.default_rng([update, KEYS.index(key)])
    prompt = tuple(random.integers(3, 60, PROMPT).tolist())
    return [
        Trajectory(
            f"traj-{update}-{key}-{number}",
            f"group-{update}-{key}",
            GROUP,
            training.loop().training.live or BASE_ADAPTER,
            prompt,
            tuple(random.integers(3, 60, ANSWER).tolist()),
            tuple(random.uniform(-10.5, -9.5, ANSWER).tolist()),
            1.0,
            "",
            FinishReason.STOP,
            CollectionSpec("exact", episode_id=f"{update}-{key}-{number}"),
            float(update),
            owner=key,
        )
        for number in range(GROUP)
    ]


async def teach(training: TrainingService, updates: Collection[int], is_left_out: LeftOut = nothing) -> float:
    """Makes updates of a group of each key. Returns the seconds that they took."""
    seconds = 0.0
    for update in updates:
        for key in KEYS:
            random, sent = np.random.default_rng([update, KEYS.index(key), 7]), group(training, update, key)
            rewards = {each.collection.episode_id: float(random.uniform()) for each in sent}
            kept = [each for each in sent if not is_left_out(each)]
            if kept:
                left = {each.collection.episode_id: rewards[each.collection.episode_id] for each in kept}
                await training.trajectories.collect_episodes(kept, left)
        began = time.monotonic()
        await training.update()
        seconds += time.monotonic() - began
    return seconds


async def digest(training: TrainingService) -> str:
    """Of the policy's factors and of its optimizer's state: equal digests are equal bits."""
    learner = training.parts.learner
    kept = await learner.snapshot(learner.state(training.default_adapter))
    pairs = (kept.weights.pairs[name] for name in sorted(kept.weights.pairs))
    leaves = [leaf for pair in pairs for leaf in (pair.a, pair.b)]
    leaves += [kept.optimizer[name] for name in sorted(kept.optimizer)]
    return hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)).hexdigest()


@dataclass(frozen=True, slots=True)
class Forgot:
    """What was forgotten. `again`: updates that were made again; `first_s`: seconds that they had taken at first;
    `seconds`: from the request to its end."""

    again: int
    first_s: float
    seconds: float


async def forget(training: TrainingService, spec: ForgetSpec) -> Forgot:
    """Forgets something, and returns when all of it is removed."""
    forgetting: Forgetting = training.extras["forgetting"]
    parts = (await forgetting.plan(spec)).adapters
    began = time.monotonic()
    await forgetting.begin(spec)
    await ended(forgetting)
    seconds = time.monotonic() - began
    return Forgot(sum(part.again for part in parts), sum(part.seconds for part in parts), seconds)


async def ended(forgetting: Forgetting) -> None:
    while forgetting.card.state in ("rebuilding", "removing"):
        await asyncio.sleep(0.005)
    if forgetting.card.state in ("held", "failed"):
        raise SystemExit(f"it was not forgotten: {forgetting.card.reason}")


async def main(model: Path, run: Path) -> None:
    async with process(model, run) as training:
        forgetting: Forgetting = training.extras["forgetting"]
        if forgetting.card.state == "none" and (await forgetting.plan(ForgetSpec(key=BOB))).adapters:
            await forgetting.begin(ForgetSpec(key=BOB))
        print("ready", flush=True)
        await ended(forgetting)
        print(await digest(training), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
