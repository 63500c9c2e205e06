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
from mlx_parallm.rl.rollouts import Rollouts, RolloutSettings

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
    tasks = _tasks(config, options)
    engine = Engine(config)
    served = engine.start()
    assert served.training is not None  # the command's configuration trains
    try:
        asyncio.run(_train(config, options, view, engine, served, served.training, tasks))
    finally:
        engine.processor.stop()
    return 0


def _tasks(config: Config, options: TrainOptions) -> Iterator[Task]:
    return environment(options.environment).tasks(config.rl_training.seed)


async def _train(
    config: Config,
    options: TrainOptions,
    view: TrainView,
    engine: Engine,
    served: Served,
    training: Training,
    tasks: Iterator[Task],
) -> None:
    try:
        tasks = await asyncio.to_thread(_checked, tasks, training)
        await training.start()
        await training.service.pause()  # updates are made when a step's trajectories are all there
        view.started(_facts(config, options, served))
        driver = _Driver(config, options, view, engine, served, training, tasks)
        for step in range(1, options.steps + 1):
            last = step == options.steps and config.checkpointing.checkpoint_dir is not None
            view.updated(await driver.step(FINAL if last else None))
    finally:
        await training.close()


def _checked(tasks: Iterator[Task], training: Training) -> Iterator[Task]:
    """The same tasks. Raises ConfigError: they cannot be scored."""
    first = next(tasks)
    try:
        training.scorers.check(first.collection)
    except InvalidRequestError as error:
        raise ConfigError(f"environment: {error}") from error
    return itertools.chain([first], tasks)


class _Driver:
    """Draws, waits for the rewards, updates."""

    def __init__(
        self,
        config: Config,
        options: TrainOptions,
        view: TrainView,
        engine: Engine,
        served: Served,
        training: Training,
        tasks: Iterator[Task],
    ) -> None:
        self._options = options
        self._view = view
        self._engine = engine
        self._service = training.service
        self._name = config.adapters.default_adapter
        self._drawn = 0
        settings = RolloutSettings(
            options.group_size, config.rl_training.max_completion_tokens, seed=config.rl_training.seed
        )
        self._rollouts = Rollouts(training.engine, served.adapters, served.tokenizer, tasks, settings, self._tell)

    async def step(self, tag: str | None) -> UpdateReport:
        """One update; its report, with the speed of the whole step."""
        started, self._drawn = time.monotonic(), 0
        self._tell(0)
        live = self._service.status().current
        tokens = await self._rollouts.draw(self._options.prompts_per_step, str(live or BASE_ADAPTER.name))
        drawing = time.monotonic() - started
        await self._scored()
        report = await self._service.update(checkpoint_name=tag)
        speed = {"tokens_per_second": tokens / drawing, "seconds": time.monotonic() - started}
        return replace(report, metrics={**report.metrics, **speed})

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
        self._view.rollout(self._drawn, self._options.prompts_per_step * self._options.group_size)


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
