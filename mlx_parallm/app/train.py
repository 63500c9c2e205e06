"""`mlx_parallm_train`: trains an adapter without HTTP, on the tasks of an environment, on groups from Atropos, or on
what the clients of a cluster send."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import asdict
from typing import Any, NoReturn

from mlx_parallm import logs
from mlx_parallm.app.build import RunningEngine, follow, ranks_of, start_tracking
from mlx_parallm.app.training_run import EnvironmentRun, TrainingRun, TrainOptions, TrainView
from mlx_parallm.config import Config
from mlx_parallm.engine.machine_watch import MachineWatch
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras_table import needed
from mlx_parallm.rl import divergence
from mlx_parallm.rl.configured_reward import check_scorable
from mlx_parallm.rl.environments import Environment, environment
from mlx_parallm.rl.rollouts.environment import check_inference
from mlx_parallm.rl.runs.record import RunState
from mlx_parallm.rl.updates import plateau, reports

_SHOWN = (reports.__name__, divergence.__name__, plateau.__name__)
"""Loggers of what the view shows too."""

_SHOW_CURSOR = b"\x1b[?25h"


def run(config: Config, options: TrainOptions, view: TrainView, make: Callable[..., TrainingRun] | None = None) -> int:
    """Makes the updates that are left of `options.steps`. One of several processes that `mlx.launch` has started does
    so, and the others compute with it.

    Args:
        make: makes the run of the parts of `TrainingRun`; None: the configuration says where it learns from.

    The updates are saved however the run ends, unless a second signal ends the process at once.

    Returns:
        The process's exit code: 0, or 128 plus the signal's number if SIGINT or SIGTERM stopped it.

    Raises:
        ConfigError, ModelError: before anything is sampled.
        TrainingFailedError: most tasks failed, or another process trains the adapter in the cluster.
        StorageError: the last updates could not be saved.
        EngineError: the device thread ended, or could not sample.
    """
    logs.set_up(config.server.log_level, config.server.log_format == "json", _SHOWN)
    ranks = ranks_of(config)
    if ranks is not None and not ranks.leads:
        return follow(config, ranks)
    if config.model.other_base_models:
        raise ConfigError("model.other_base_models: a run trains one base model; give --model-path one value")
    training = config.rl_training
    source = None
    if make is None and training.atropos_url is None and not _learns_from_clients(config):
        source = environment(options.environment, training.reward is not None)
        check_scorable(config, source)
        check_inference(config)
    if config.cluster.wanted:
        config = needed("cluster", "cluster").prepared(config, trains=True)
    engine = RunningEngine(config, {name: value for name, value in asdict(options).items() if name != "log"}, ranks)
    served = engine.start()
    assert served.training is not None  # the command's configuration trains
    assert served.run is not None
    try:
        with closing(start_tracking(config, served.run, options.log)) as tracking, engine.failures_recorded():
            parts = (config, options, view, served, served.training, tracking)
            steps = make(*parts) if make is not None else _run_of(source, *parts)
            exit_code = asyncio.run(_until_signal(_work(engine.watch, config, steps)))
        if exit_code:
            engine.ends(RunState.INTERRUPTED, f"it was stopped by {signal.Signals(exit_code - 128).name}")
        return exit_code
    finally:
        engine.stop()


def _learns_from_clients(config: Config) -> bool:
    """Whether the run learns from what the clients of a cluster send."""
    training = config.rl_training
    return config.cluster.wanted and training.environment is None and training.atropos_url is None


def _run_of(source: Environment | None, *parts: Any) -> TrainingRun:
    """The run on an environment, on what the clients of a cluster send, or on Atropos' groups. `parts`: those of
    `TrainingRun`."""
    if source is not None:
        return EnvironmentRun(*parts, source=source)
    kind: type[TrainingRun]
    if _learns_from_clients(parts[0]):
        kind = needed("cluster.running.run", "cluster").ClusterRun
    else:
        kind = needed("atropos.run", "rl_training.atropos_url").AtroposRun
    return kind(*parts)


async def _work(watch: MachineWatch, config: Config, steps: TrainingRun) -> None:
    """All steps of the run, while the machine is watched."""
    async with watch.running():
        if config.cluster.wanted:
            await needed("cluster.running.run", "cluster").run_in_cluster(config, steps)
        else:
            await steps.run()


async def _until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Runs `work` and returns the exit code. SIGINT and SIGTERM cancel it. Main thread only."""
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
    """Ends the process at once. Checkpoints are written whole or not at all, so nothing is left half-written."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)
    os._exit(code)
