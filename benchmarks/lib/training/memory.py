"""Measures MLX's memory in a server without adapters, with adapters, with training, and in a separate trainer.

All use one model directory, each in its own process, with the same rows and the same batch. The separate trainer uses
mlx-lm's LoRA. Both checkpoint their layers. Peaks count from the time when the model is loaded.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx_lm.utils import load_model

from benchmarks.lib.adapters.files import random_adapter
from benchmarks.lib.alone import alone
from benchmarks.lib.training.batch import samples, trajectories
from benchmarks.lib.training.lean_rig import answer, clients, config, lean_rig
from benchmarks.lib.training.plain import plain_trainer
from benchmarks.lib.training.rig import Rig
from mlx_parallm.adapters.weights import VersionInfo
from mlx_parallm.model.device import prepare_device

SERVING, ADAPTERS, TRAINING, TRAINER = (
    "inference only",
    "with adapters",
    "with training",
    "mlx-lm's LoRA trainer, alone",
)
NAMES = [f"random-{number}" for number in range(8)]
TURNS = 2
SHARE = 0.5
"""Training time share. A larger one reaches the same peak sooner."""


@dataclass(frozen=True, slots=True)
class Load:
    """The work of an engine: `rows` requests at once, repeated, and updates meanwhile."""

    rows: int
    tokens: int
    updates: int


@dataclass(frozen=True, slots=True)
class Held:
    """MLX's bytes, including the base model: `active` at the end, `peak` since the model was loaded.

    `kv`: the KV pool's part of `active`.
    """

    name: str
    active: int
    peak: int
    kv: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The measurements of one model with `weights` bytes of weights."""

    model: str
    weights: int
    held: dict[str, Held]

    @property
    def apart(self) -> int:
        """The sum of the peaks of the two separate processes that one server with training replaces."""
        return self.held[SERVING].peak + self.held[TRAINER].peak

    @property
    def ratio(self) -> float:
        return self.held[TRAINING].peak / self.apart


def measure(name: str, folder: Path, load: Load, kinds: tuple[str, ...]) -> Memory:
    """Measures each kind in a process of its own."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    held = {kind: _shown(alone(_measured, kind, folder, load)) for kind in kinds}
    return Memory(name, weights, held)


def _measured(kind: str, folder: Path, load: Load) -> Held:
    if kind == TRAINER:
        return _trainer(folder, load.updates)
    return asyncio.run(_engine(kind, folder, load))


def _trainer(folder: Path, updates: int) -> Held:
    prepare_device()
    trainer = plain_trainer(load_model(folder)[0])
    mx.reset_peak_memory()
    for number in range(updates):
        trainer.update(samples(number), checkpointed=True)
    return Held(TRAINER, _active(), mx.get_peak_memory())


async def _engine(kind: str, folder: Path, load: Load) -> Held:
    async with lean_rig(config(folder, SHARE), max_tokens=load.tokens) as made:
        if kind == TRAINING:
            await _train(made, load)
        else:
            await _serve(made, load, await _adapters(made) if kind == ADAPTERS else [None])
        return await made.on_device(lambda: Held(kind, _active(), made.trainer.peak_bytes, made.pool_bytes))


async def _serve(made: Rig, load: Load, selectors: Sequence[str | None]) -> None:
    """Serves the load. The rows use the selectors in turn."""
    for _ in range(TURNS):
        await asyncio.gather(*(answer(made, selectors[row % len(selectors)]) for row in range(load.rows)))


async def _adapters(made: Rig) -> Sequence[str]:
    layout = made.trainer.model.layout
    for seed, name in enumerate(NAMES):
        weights = random_adapter(layout, seed)
        info = VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes)
        await made.served.adapters.publish(name, weights, info)
    return NAMES


async def _train(made: Rig, load: Load) -> None:
    """Makes the updates while rows decode, until the last version is live."""
    await made.training.start_adapter("default")
    async with clients(made, [None] * load.rows):
        for number in range(load.updates):
            report = await made.training.update(None, trajectories(number))
            if report.status != "published":
                raise RuntimeError(f"an update was {report.status}: {report.reason}")


def _active() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def _shown(held: Held) -> Held:
    print(f"  {held.name:<28} active {held.active / 1e6:6.0f} MB, peak {held.peak / 1e6:6.0f} MB", flush=True)
    return held
