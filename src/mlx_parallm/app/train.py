"""`mlx_parallm_train`: rollouts of an environment's tasks and updates in turns, with no client and no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mlx_parallm.app.engine import Engine, Served
from mlx_parallm.app.training import Training
from mlx_parallm.cli.train_view import TrainOptions, TrainView
from mlx_parallm.config import Config
from mlx_parallm.core import BASE_ADAPTER, UpdateReport
from mlx_parallm.errors import ConfigError, EngineDeadError, InvalidRequestError
from mlx_parallm.rl.environments import Task, environment
from mlx_parallm.rl.gathering import REFILLS
from mlx_parallm.rl.rollouts import Rollouts, RolloutSettings
from mlx_parallm.rl.scoring.catalogue import Catalogue

FINAL = "final"
"""Tag of the checkpoint that a run ends with."""

_POLL_S = 0.05


def run(config: Config, options: TrainOptions, view: TrainView) -> int:
    """Makes `options.steps` updates; returns the process's exit code.

    Raises:
        ConfigError, ModelError: before anything is drawn.
        EngineError: the device thread ended, or could not draw.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    environment(options.environment)  # an unknown name is told before the model is loaded
    engine = Engine(config)
    served = engine.start()
    assert served.training is not None  # the command's configuration trains
    try:
        asyncio.run(_TrainingRun(config, options, view, engine, served, served.training).run())
    finally:
        engine.processor.stop()
    return 0


class _TrainingRun:
    """Draws, waits for the rewards, updates; over and over."""

    def __init__(
        self,
        config: Config,
        options: TrainOptions,
        view: TrainView,
        engine: Engine,
        served: Served,
        training: Training,
    ) -> None:
        self._config = config
        self._options = options
        self._view = view
        self._engine = engine
        self._served = served
        self._training = training
        self._service = training.service
        self._drawn = self._wanted = 0

    async def run(self) -> None:
        """All steps; the last one is saved, where checkpoints are kept."""
        options = self._options
        try:
            rollouts = self._rollouts(await asyncio.to_thread(self._tasks))
            await self._training.start()
            await self._service.pause()  # updates are made when a step's trajectories are all there
            self._view.started(_facts(self._config, options, self._served))
            for step in range(1, options.steps + 1):
                last = step == options.steps and self._config.checkpointing.checkpoint_dir is not None
                self._view.updated(await self._step(rollouts, FINAL if last else None))
        finally:
            await self._training.close()

    def _tasks(self) -> Iterator[Task]:
        """Endless. Raises ConfigError: they cannot be scored."""
        tasks = environment(self._options.environment).tasks(self._config.rl_training.seed)
        first = next(tasks)
        try:
            Catalogue().check(first.collection)
        except InvalidRequestError as error:
            raise ConfigError(f"environment: {error}") from error
        return itertools.chain([first], tasks)

    def _rollouts(self, tasks: Iterator[Task]) -> Rollouts:
        training = self._config.rl_training
        settings = RolloutSettings(self._options.group_size, training.max_completion_tokens, seed=training.seed)
        served = self._served
        return Rollouts(self._training.engine, served.adapters, served.tokenizer, tasks, settings, self._tell)

    async def _step(self, rollouts: Rollouts, tag: str | None) -> UpdateReport:
        """One update; its report, with the speed of the whole step."""
        started, self._drawn, self._wanted = time.monotonic(), 0, 0
        tokens, drawing = 0, 0.0
        for _ in range(1 + self._refills):
            if missing := self._options.prompts_per_step - self._service.status().groups_ready:
                began = time.monotonic()
                tokens += await self._draw(rollouts, missing)
                drawing += time.monotonic() - began
                await self._scored()
        report = await self._service.update(checkpoint_name=tag)
        speed = {"tokens_per_second": tokens / drawing if drawing else 0.0, "seconds": time.monotonic() - started}
        return replace(report, metrics={**report.metrics, **speed})

    @property
    def _refills(self) -> int:
        """How often groups without a signal are made up for by others: dapo's dynamic sampling (arXiv 2503.14476)."""
        return REFILLS if self._config.rl_training.algorithm == "dapo" else 0

    async def _draw(self, rollouts: Rollouts, groups: int) -> int:
        """Of the live version; how many tokens were drawn."""
        self._wanted += groups * self._options.group_size
        self._tell(0)
        return await rollouts.draw(groups, str(self._service.status().current or BASE_ADAPTER.name))

    async def _scored(self) -> None:
        """Waits until no trajectory waits for its reward.

        Raises:
            EngineDeadError: the device thread has stopped.
        """
        while self._service.status().trajectories_waiting:
            if not self._engine.processor.stats().alive:
                raise EngineDeadError("the device thread has stopped")
            await asyncio.sleep(_POLL_S)

    def _tell(self, ended: int) -> None:
        self._drawn += ended
        self._view.rollout(self._drawn, self._wanted)


def _facts(config: Config, options: TrainOptions, served: Served) -> Mapping[str, str]:
    training, model = config.rl_training, config.model
    return {
        "model": f"{served.card.name}, {served.card.parameters / 1e6:,.0f}M parameters",
        "environment": options.environment,
        "adapter": f"{config.adapters.default_adapter}, rank {model.lora_rank}, alpha {model.lora_alpha:g}, "
        f"{', '.join(model.lora_target_modules)}",
        "update": f"{training.algorithm}, {options.prompts_per_step} prompts x {options.group_size} samples, "
        f"learning rate {training.optimizer.learning_rate:g}",
        "checkpoints": str(config.checkpointing.checkpoint_dir or "none"),
    }
