"""An engine that trains, without HTTP: clients whose answers are trained on, and checks of what must hold meanwhile."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.lib.prompts import short_prompts
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, Version
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import Config
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
)
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import TrainingStatus
from mlx_parallm.train.context import LoraSpan, Params
from mlx_parallm.train.data import Datum, answered
from mlx_parallm.train.packing import pack, split_samples
from mlx_parallm.train.trainer import GRPOTrainer

T = TypeVar("T")
PROMPTS = 16
AT_ONCE = 1024
"""Tokens whose logprobs are recomputed together."""


@dataclass
class Rig:
    """The engine, and what it made. `weights`: each version's weights when it was staged, None for the base.
    `drawn`: all collected trajectories."""

    engine: RunningEngine
    served: Served
    training: TrainingService
    group: int
    max_tokens: int
    prompts: Sequence[tuple[int, ...]]
    weights: dict[AdapterRef, AdapterWeights | None] = field(default_factory=lambda: {BASE_ADAPTER: None})
    drawn: list[Trajectory] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    requests: Iterator[int] = field(default_factory=count)

    @property
    def trainer(self) -> GRPOTrainer:
        return self.training.parts.learner.trainer

    def status(self) -> TrainingStatus:
        return self.training.status()

    async def on_device(self, call: Callable[[], T]) -> T:
        """Runs a call on the device thread between two units of device work."""
        answer: T = await self.engine.processor.run(call)
        return answer

    async def load(self, clients: int, until: Callable[[], bool]) -> None:
        """Runs `clients` clients, each with one collected request after the other, until `until()` is true."""

        async def client() -> None:
            while not until():
                await self.complete()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def complete(self, collect: bool = True) -> None:
        """Samples one group from the live version, and gives it random rewards if it is collected."""
        number = next(self.requests)
        with self.served.adapters.lease(None) as adapter:
            request = GenerationRequest(
                request_id=f"r{number}",
                prompts=(self.prompts[number % len(self.prompts)],),
                sampling=SamplingParams(seed=self.group * number),
                stopping=StopParams(self.max_tokens),
                n=self.group,
                adapter=adapter,
                collection=CollectionSpec() if collect else None,
            )
            events = self.served.engine.generate(request)
            if collect:
                events = self.training.trajectories.collect(request, events)
            async for event in events:
                if isinstance(event, RequestFailed):
                    self.failed.append(f"{type(event.error).__name__}: {event.error}")
                if isinstance(event, RequestFinished):
                    for trajectory_id in event.trajectory_ids:
                        score = random.Random(trajectory_id).random()
                        await self.training.trajectories.feedback(trajectory_id, score)

    # -- what must hold --------------------------------------------------------------------------

    def base_arrays(self) -> dict[str, tuple[int, int]]:
        """The base model's parameters in the trainer: the identity of each array, and a digest of its bits."""
        model = self.trainer.model
        parts = {"head": model._head._owner, "embedding": model._trunk.embed_tokens}
        parts |= {f"layers.{at}": layer._layer for at, layer in enumerate(model._trunk.layers)}
        leaves = [
            (f"{at}.{name}", leaf) for at, part in parts.items() for name, leaf in tree_flatten(part.parameters())
        ]
        return {name: (id(leaf), hash(np.array(leaf).tobytes())) for name, leaf in leaves}

    def worst_logprob(self) -> float:
        """Largest difference between a stored logprob and one recomputed with the version that sampled it."""
        return max(self._difference(ref) for ref in {trajectory.adapter for trajectory in self.drawn})

    def _difference(self, ref: AdapterRef) -> float:
        mine = [_sample(t) for t in self.drawn if t.adapter == ref]
        weights, worst = self.weights[ref], 0.0
        params = None if weights is None else _params(weights)
        scale = 0.0 if weights is None else next(iter(weights.pairs.values())).scale
        for part in split_samples(mine, AT_ONCE):
            batch = pack(part)
            spans = None if params is None else [LoraSpan(batch.tokens.size, params, scale)]
            ((logp, _),) = self.trainer._forwards.scores([batch], spans).scores
            apart = mx.abs(batch.padded(logp) - batch.sampling_logprobs) * batch.weights
            worst = max(worst, float(apart.max().item()))
        return worst

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool: those of rows, of cached prefixes and of free blocks. Device thread only."""
        (engine,) = self.engine.processor._engines.values()
        return engine._cache.bytes_used + engine._cache.bytes_cached + engine._cache.bytes_free


@asynccontextmanager
async def rig(config: Config, group: int, max_tokens: int) -> AsyncIterator[Rig]:
    """A rig that serves the bundled model. Training has not begun."""
    engine = RunningEngine(config)
    served = await asyncio.to_thread(engine.start)
    assert served.training is not None
    prompts = [tuple(served.tokenizer.encode(text)) for text in short_prompts(PROMPTS, "training")]
    made = Rig(engine, served, served.training, group, max_tokens, prompts)
    _watch(made)
    try:
        yield made
    finally:
        await made.training.close()
        await asyncio.to_thread(engine.stop)


def _watch(made: Rig) -> None:
    """Keeps a copy of each version's weights when it is staged, and every trajectory."""
    store, collector = made.served.adapters._store, made.training.trajectories
    stage, add_group = store.stage, collector._add_group

    def staged(version: Version, weights: AdapterWeights | None = None, **how: bool) -> Future[AdapterRef]:
        if weights is not None:
            made.weights[version.ref] = _copied(weights)
        return stage(version, weights, **how)

    async def kept(group: Sequence[Trajectory]) -> str:
        made.drawn.extend(group)
        return await add_group(group)

    store.stage, collector._add_group = staged, kept  # type: ignore[method-assign]


def _copied(weights: AdapterWeights) -> AdapterWeights:
    """A copy of the weights as numpy arrays."""
    pairs = weights.pairs.items()
    return AdapterWeights({path: LoRAPair(np.array(p.a), np.array(p.b), p.scale) for path, p in pairs})


def _sample(sampled: Trajectory) -> Datum:
    return answered(sampled.prompt_ids, sampled.completion_ids, sampled.sampling_logprobs, sampled.temperature)


def _params(weights: AdapterWeights) -> Params:
    return {path: {"a": mx.array(pair.a), "b": mx.array(pair.b)} for path, pair in weights.pairs.items()}
