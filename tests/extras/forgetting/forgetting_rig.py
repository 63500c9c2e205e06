"""A run that three keys teach, on a tiny model with the real engine, trainer, journal and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tiny import save_tiny

from mlx_parallm.app.build import Served
from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import LoRAConfig, RLConfig, configure
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.extras.forgetting.cards import ForgetCard
from mlx_parallm.extras.forgetting.service import Forgetting
from mlx_parallm.rl.service import TrainingService

KEYS = ("ann", "bob", "eve")
GROUP = 4
"""Answers of a group."""
LeftOut = Callable[[Trajectory], bool]
ENDED = ("done", "held", "failed")


@asynccontextmanager
async def run(folder: Path, name: str = "run", **keys: object) -> AsyncIterator[Served]:
    """A process that continues the run of this name; it ends as on SIGTERM."""
    if not (folder / "model").exists():
        save_tiny("llama", folder / "model")
    config = configure(
        folder / "model",
        LoRAConfig(rank=4, alpha=8.0),
        RLConfig(learning_rate=1e-3, batch_size=1000),
        server__kv_cache_memory="16MB",
        checkpointing__checkpoint_dir=folder / name,
        **keys,
    )
    async with IntegratedServer(config).session() as served:
        yield served


def training_of(served: Served) -> TrainingService:
    assert served.training is not None
    return served.training


def forgetting_of(served: Served) -> Forgetting:
    return training_of(served).extras["forgetting"]


def trajectories(served: Served, update: int, key: str) -> list[Trajectory]:
    """The answers of one group: the same in every run, apart from the version that sampled them."""
    random = np.random.default_rng([update, KEYS.index(key)])
    live = training_of(served).loop().training.live or BASE_ADAPTER
    prompt = tuple(random.integers(3, 200, 6).tolist())
    return [
        Trajectory(
            f"traj-{update}-{key}-{number}",
            f"group-{update}-{key}",
            GROUP,
            live,
            prompt,
            tuple(random.integers(3, 200, 5).tolist()),
            tuple(random.uniform(-6, -4, 5).tolist()),
            1.0,
            f"answer {number}",
            FinishReason.STOP,
            CollectionSpec("exact", episode_id=f"episode-{update}-{key}-{number}"),
            1000.0 + update,
            owner=key,
        )
        for number in range(GROUP)
    ]


async def give(served: Served, update: int, key: str, is_left_out: LeftOut = lambda trajectory: False) -> None:
    """A group of this key for an update, with its rewards."""
    random = np.random.default_rng([update, KEYS.index(key), 7])
    rewards = {each.collection.episode_id: random.uniform() for each in trajectories(served, update, key)}
    group = [each for each in trajectories(served, update, key) if not is_left_out(each)]
    if group:
        left = {each.collection.episode_id: rewards[each.collection.episode_id] for each in group}
        assert await training_of(served).trajectories.collect_episodes(group, left) == ""


async def teach(served: Served, updates: Collection[int], is_left_out: LeftOut = lambda trajectory: False) -> None:
    """Makes updates, each from a group of every key."""
    for update in updates:
        for key in KEYS:
            await give(served, update, key, is_left_out)
        report = await training_of(served).update()
        assert report.status in ("published", "skipped"), report


async def policy(served: Served) -> dict[str, Any]:
    """The factors and the optimizer's state in training."""
    learner = training_of(served).parts.learner
    kept = await learner.snapshot(learner.state("default"))
    pairs = {f"{path}.{side}": getattr(pair, side) for path, pair in kept.weights.pairs.items() for side in ("a", "b")}
    return {**pairs, **kept.optimizer}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two policies are the same to the bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


async def ended(forgetting: Forgetting) -> ForgetCard:
    while forgetting.card.state not in ENDED:
        await asyncio.sleep(0.01)
    return forgetting.card
