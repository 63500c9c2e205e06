"""`mlx_parallm_train`: rollouts of an environment's tasks and updates in turns, with no client and no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from mlx_parallm.app.engine import Engine, Served
from mlx_parallm.app.training import Training
from mlx_parallm.cli.banner import where_kept
from mlx_parallm.cli.train_view import TrainOptions, TrainView
from mlx_parallm.config import Config
from mlx_parallm.core import BASE_ADAPTER, UpdateReport
from mlx_parallm.errors import ConfigError, EngineDeadError, InvalidRequestError, TrainingFailedError
from mlx_parallm.rl.environments import Task, environment
from mlx_parallm.rl.gathering import REFILLS
from mlx_parallm.rl.groups import Drop
from mlx_parallm.rl.rollouts import Drawn, Rollouts, RolloutSettings
from mlx_parallm.rl.scoring.catalogue import Catalogue

FINAL = "final"
"""Tag of the checkpoint that a run ends with."""

STEPS, TASKS = "run_steps", "run_tasks"
"""Of `Trainee.progress`: steps made, and tasks taken from the environment for them."""

_POLL_S = 0.05
_UNSCORED = "a task's answers could not be scored"
_SHOW_CURSOR = b"\x1b[?25h"
_FEWEST_TASKS = 4
"""Of which most have to fail until the run stops, however few a step has."""


def run(config: Config, options: TrainOptions, view: TrainView) -> int:
    """Makes the updates that `options.steps` has left; returns the process's exit code: 128 and the signal's number
    where SIGINT or SIGTERM stopped it. Whatever ends it, what was learnt is saved; a second signal ends it at once.

    Raises:
        ConfigError, ModelError: before anything is drawn.
        TrainingFailedError: most tasks failed.
        StorageError: what was learnt last could not be saved.
        EngineError: the device thread ended, or could not draw.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    environment(options.environment)  # an unknown name is told before the model is loaded
    engine = Engine(config)
    served = engine.start()
    assert served.training is not None  # the command's configuration trains
    try:
        return asyncio.run(_until_signal(_TrainingRun(config, options, view, engine, served, served.training).run()))
    finally:
        engine.stop()


async def _until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Cancels `work` at the first SIGINT or SIGTERM; the exit code. Main thread only."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        if received:
            _exit_now(128 + number)
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    return 128 + received[0] if received else 0


def _exit_now(code: int) -> NoReturn:
    """Nothing is half-written: checkpoints are written whole or not at all."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)
    os._exit(code)


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
        self._failures = deque[str](maxlen=max(options.prompts_per_step, _FEWEST_TASKS))  # of the last tasks; "": none

    async def run(self) -> None:
        """The steps that are left; the last one is tagged. What is learnt is saved whatever ends them."""
        options = self._options
        try:
            await self._training.start()
            await self._service.pause()  # updates are made when a step's trajectories are all there
            made, taken = self._made()
            rollouts = self._rollouts(await asyncio.to_thread(self._tasks, taken), taken)
            self._view.started(_facts(self._config, options, self._served), made)
            for step in range(made + 1, options.steps + 1):
                self._view.updated(await self._step(rollouts, step))
                self._refuse_failing()
        finally:
            await self._training.close()

    def _made(self) -> tuple[int, int]:
        """Steps made and tasks taken, by the checkpoint that the run goes on from."""
        progress = self._service.progress()
        return int(progress.get(STEPS, 0)), int(progress.get(TASKS, 0))

    def _tasks(self, taken: int) -> Iterator[Task]:
        """Those after the first `taken`. Raises ConfigError: they cannot be scored."""
        tasks = environment(self._options.environment).tasks(self._config.rl_training.seed)
        first = next(tasks)
        try:
            Catalogue().check(first.collection)
        except InvalidRequestError as error:
            raise ConfigError(f"environment: {error}") from error
        return itertools.islice(itertools.chain([first], tasks), taken, None)

    def _rollouts(self, tasks: Iterator[Task], taken: int) -> Rollouts:
        training, served = self._config.rl_training, self._served
        assert served.run is not None  # the command's configuration keeps checkpoints
        settings = RolloutSettings(
            self._options.group_size,
            training.max_completion_tokens,
            seed=training.seed,
            run=served.run.id,
            taken=taken,
        )
        return Rollouts(self._training.engine, served.adapters, served.tokenizer, tasks, settings, self._tell)

    async def _step(self, rollouts: Rollouts, step: int) -> UpdateReport:
        """One update; its report, with the speed of the whole step."""
        started, self._drawn, self._wanted = time.monotonic(), 0, 0
        tokens, drawing, failures = 0, 0.0, 0
        for _ in range(1 + self._refills):
            if missing := self._options.prompts_per_step - self._service.status().groups_ready:
                began = time.monotonic()
                drawn, unscored = await self._draw(rollouts, missing), self._unscored()
                drawing += time.monotonic() - began
                await self._scored()
                failures += self._count(missing, [*drawn.failures, *[_UNSCORED] * (self._unscored() - unscored)])
                tokens += drawn.tokens
        report = await self._service.update(progress={STEPS: step, TASKS: rollouts.taken})
        speed = {"tokens_per_second": tokens / drawing if drawing else 0.0, "seconds": time.monotonic() - started}
        report = replace(report, metrics={**report.metrics, **speed, "failed_tasks": float(failures)})
        return await self._tagged(report) if step == self._options.steps and report.step else report

    async def _tagged(self, report: UpdateReport) -> UpdateReport:
        card = await self._service.save(None, None, [FINAL], report.metrics)
        return replace(report, checkpoint=card.name)

    def _count(self, tasks: int, failures: list[str]) -> int:
        """Tells of the tasks that failed; how many they are."""
        for failure in failures:
            self._view.task_failed(failure)
        self._failures.extend([""] * (tasks - len(failures)) + failures)
        return len(failures)

    def _refuse_failing(self) -> None:
        """Raises TrainingFailedError: most of the last tasks failed."""
        failed = [failure for failure in self._failures if failure]
        if len(self._failures) == self._failures.maxlen and 2 * len(failed) > len(self._failures):
            raise TrainingFailedError(
                f"{len(failed)} of the last {len(self._failures)} tasks failed, the last of them with: {failed[-1]}; "
                "mend the environment and go on with --resume"
            )

    def _unscored(self) -> int:
        """Tasks whose answers could not be scored, since start."""
        return self._service.status().drops.get(Drop.SCORING_FAILED.value, 0) // self._options.group_size

    @property
    def _refills(self) -> int:
        """How often groups without a signal are made up for by others: dapo's dynamic sampling (arXiv 2503.14476)."""
        return REFILLS if self._config.rl_training.algorithm == "dapo" else 0

    async def _draw(self, rollouts: Rollouts, groups: int) -> Drawn:
        """Of the live version."""
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
        "checkpoints": where_kept(served.run),
    }
