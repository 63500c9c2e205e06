"""A whole engine on a tiny model, trained by the requests that it serves: a hundred updates beside eight clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import save_tiny
from trainers import logprobs

from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, Version
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import LoRAConfig, RLConfig, configure
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
    WorkClass,
)
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import answered
from mlx_parallm.train.packing import pack, split_samples
from mlx_parallm.train.policy import PolicyState
from mlx_parallm.train.trainer import GRPOTrainer

CLIENTS, UPDATES = 8, 100
LORA = LoRAConfig(rank=4, alpha=8.0)
RL = RLConfig(algorithm="dapo", learning_rate=3e-3, batch_size=4, max_staleness=4)
SAME = 2e-5
"""Of logprobs: one version's, in decode beside other rows and in the trainer's packed forward."""


@dataclass
class Rig:
    """`weights`: what every version was made of. `drawn`: every trajectory that was collected."""

    engine: RunningEngine
    served: Served
    training: TrainingService
    weights: dict[AdapterRef, AdapterWeights | None] = field(default_factory=lambda: {BASE_ADAPTER: None})
    drawn: list[Trajectory] = field(default_factory=list)
    failed: list[Exception] = field(default_factory=list)

    @property
    def trainer(self) -> GRPOTrainer:
        return self.training.parts.learner.trainer

    async def complete(self, number: int, group: int = 2) -> None:
        """One collected request of whatever the route gives."""
        with self.served.adapters.lease(None) as adapter:
            request = GenerationRequest(
                request_id=f"r{number}",
                prompts=((5, 6, 7 + number % 5),),
                sampling=SamplingParams(seed=number, temperature=0.9),
                stopping=StopParams(4),
                n=group,
                adapter=adapter,
                work_class=WorkClass.INFERENCE,
                collection=CollectionSpec(),
            )
            events = self.served.engine.generate(request)
            async for event in self.training.trajectories.collect(request, events):
                if isinstance(event, RequestFailed):
                    self.failed.append(event.error)
                if isinstance(event, RequestFinished):
                    await self._reward(event.trajectory_ids)

    async def _reward(self, ids: Sequence[str]) -> None:
        for trajectory_id in ids:
            await self.training.trajectories.feedback(trajectory_id, random.Random(trajectory_id).random())

    async def on_device(self, call):
        return await self.engine.processor.run(call)


@asynccontextmanager
async def rig(path: Path, **keys: object) -> AsyncIterator[Rig]:
    save_tiny("llama", path / "model")
    config = configure(path / "model", LORA, RL, server__kv_cache_memory="16MB", debug__check_when_idle=True, **keys)
    engine = RunningEngine(config)
    served = await asyncio.to_thread(engine.start)
    assert served.training is not None
    made = Rig(engine, served, served.training)
    _watch(made)
    await made.training.start_adapter("default")
    try:
        yield made
    finally:
        await made.training.close()
        await asyncio.to_thread(engine.stop)


def _watch(made: Rig) -> None:
    """Keeps each version's weights as they were when it was staged, and every trajectory."""
    store, collector = made.served.adapters._store, made.training.trajectories
    stage, add_group = store.stage, collector._add_group

    def staged(version: Version, weights: AdapterWeights | None = None, **how: bool) -> Future[AdapterRef]:
        if weights is not None:
            made.weights[version.ref] = _copied(weights)
        return stage(version, weights, **how)

    async def kept(group: Sequence[Trajectory]) -> str:
        made.drawn.extend(group)
        return await add_group(group)

    store.stage, collector._add_group = staged, kept


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_hundred_updates_beside_eight_clients(tmp_path: Path) -> None:
    keys = {"rl_training__update_frequency": 2 * CLIENTS, "rl_training__divergence__reward__limit": None}
    async with rig(tmp_path, **keys) as made:  # random rewards fall by chance
        base = await made.on_device(lambda: _base(made))
        numbers = iter(range(10**6))

        async def client() -> None:
            """Asks no faster than the trainer learns, so that no answer is too old when its thumb comes."""
            while (status := made.training.status()).updates_total < UPDATES:
                if status.groups_ready < CLIENTS:
                    await made.complete(next(numbers))
                else:
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        status = made.training.status()
        assert made.failed == []
        assert status.updates_total >= UPDATES
        assert not set(status.skips) - {"no_signal"}
        assert status.trajectories_collected == len(made.drawn)
        versions = {trajectory.adapter for trajectory in made.drawn}
        assert versions <= made.weights.keys()
        assert len(versions) > UPDATES / 2, "requests are served by each new version"
        assert await made.on_device(lambda: _worst(made)) <= SAME
        after = await made.on_device(lambda: _base(made))
        assert after.keys() == base.keys()
        for name, (identity, bits) in base.items():
            assert after[name][0] == identity, f"{name} is another array"
            assert np.array_equal(after[name][1], bits), f"{name} has changed"


def _base(made: Rig) -> dict[str, tuple[int, np.ndarray]]:
    """The base's arrays: who they are and what they hold."""
    parameters = tree_flatten(made.trainer.model._head._owner.parameters()) + tree_flatten(
        made.trainer.model._trunk.embed_tokens.parameters()
    )
    layers = [layer._layer for layer in made.trainer.model._trunk.layers]
    for at, layer in enumerate(layers):
        parameters += [(f"{at}.{name}", leaf) for name, leaf in tree_flatten(layer.parameters())]
    return {name: (id(leaf), np.array(leaf)) for name, leaf in parameters}


def _worst(made: Rig) -> float:
    """Largest difference of a stored logprob from one recomputed under the version that drew it."""
    worst = 0.0
    for ref in {trajectory.adapter for trajectory in made.drawn}:
        mine = [trajectory for trajectory in made.drawn if trajectory.adapter == ref]
        worst = max(worst, _difference(made.trainer, made.weights[ref], mine))
    return worst


def _difference(trainer: GRPOTrainer, weights: AdapterWeights | None, drawn: Sequence[Trajectory]) -> float:
    samples = [answered(t.prompt_ids, t.completion_ids, t.sampling_logprobs, t.temperature) for t in drawn]
    (part,) = split_samples(samples, 10**9)
    batch = pack(part)
    params = None if weights is None else _params(weights)
    logp = logprobs(trainer, batch, params, LORA.alpha / LORA.rank)
    return float((mx.abs(batch.padded(logp) - batch.sampling_logprobs) * batch.weights).max().item())


def _copied(weights: AdapterWeights) -> AdapterWeights:
    """Numpy's."""
    pairs = weights.pairs.items()
    return AdapterWeights({path: LoRAPair(np.array(p.a), np.array(p.b), p.scale) for path, p in pairs})


def _params(weights: AdapterWeights) -> Params:
    return {path: {"a": mx.array(pair.a), "b": mx.array(pair.b)} for path, pair in weights.pairs.items()}


async def test_between_updates_training_holds_an_adapter_and_its_optimizer_state(tmp_path: Path) -> None:
    """Three times the adapter's float32 factors: themselves and AdamW's two moments. Gradients come and go. The best
    version is kept too if it is not the latest."""
    async with rig(tmp_path) as made:
        policy = made.training.parts.learner.trainer.policies["default"]

        def held() -> int:
            return sum(leaf.nbytes for _, leaf in tree_flatten([policy.params, policy.state.optimizer]))

        for number in range(8):
            await made.complete(number)
        while not made.training.status().updates_total:
            await asyncio.sleep(0.01)
        assert 3.0 <= await made.on_device(held) / (4 * policy.parameters) <= 3.01
        while made.training.status().state == "updating" or made.trainer.waits():
            await asyncio.sleep(0.01)
        best = made.training.loop().training.checkpoints.best
        states = {id(policy.state), *([id(best.policy)] if best and isinstance(best.policy, PolicyState) else [])}
        assert made.trainer.bytes_held == len(states) * policy.nbytes, "neither gradients nor activations"


async def test_an_adapter_beside_the_default_one_is_trained_with_a_state_of_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        await made.training.start("tone")
        given = [
            GivenTrajectory((5, 6, 7), (8 + at, 9), reward, group_id="g") for at, reward in enumerate((0.0, 1.0, 0.5))
        ]
        first = await made.training.update(None, given)
        assert (first.adapter, first.step) == (AdapterRef("default", 1), 1)
        second = await made.training.update("tone", given)
        assert (second.adapter, second.step) == (AdapterRef("tone", 2), 1)
        learner = made.training.parts.learner
        default, tone = [await learner.snapshot(learner.state(name)) for name in ("default", "tone")]
        for path, pair in default.weights.pairs.items():
            assert np.array_equal(pair.b, tone.weights.pairs[path].b), "the same start and data give the same update"
        await made.training.update("tone", given)
        assert learner.state("default").step == 1
        assert learner.state("tone").step == 2
