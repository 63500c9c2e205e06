"""`RLIntegratedServer`: one model in one process, served and trained at the same time."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm import logs
from mlx_parallm.app import banner
from mlx_parallm.app.all_adapters import AllAdapters
from mlx_parallm.app.build import (
    RunningEngine,
    Served,
    follow,
    inference_engine,
    metrics_file,
    ranks_of,
    start_tracking,
)
from mlx_parallm.app.checks import check_http
from mlx_parallm.app.models import BaseSet, build_base_set
from mlx_parallm.config import Config, LoRAConfig, RLConfig, configure
from mlx_parallm.extras_table import needed, offered
from mlx_parallm.rl.deletion import Deletion
from mlx_parallm.rl.environments import Environment
from mlx_parallm.rl.rollouts.server import ServerRollouts, environment_of
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.tracking import Tracking, recorded_events
from mlx_parallm.server import request_log
from mlx_parallm.server.api.conversation import read_templates
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.traces import Traces, open_traces
from mlx_parallm.tasks import release

if TYPE_CHECKING:  # the one is imported later, the other needs the extra `cluster`
    from fastapi import FastAPI

    from mlx_parallm.extras.cluster.node import Node
    from mlx_parallm.extras.ranks.joining import Ranks

_log = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Loads the model, then serves (and trains, if configured) until a signal; returns the process's exit code. One of
    several processes that `mlx.launch` has started serves, and the others compute with it.

    Raises:
        ConfigError, ModelError: before anything is served.
    """
    logs.set_up(config.server.log_level, config.server.log_format == "json")
    if config.server.log_format == "text":
        request_log.write_plain_lines()
    ranks = ranks_of(config)
    if ranks is not None and not ranks.leads:
        return follow(config, ranks)
    if config.cluster.wanted:
        config = needed("cluster", "cluster").prepared(config)
    return asyncio.run(_run(config, ranks))


@asynccontextmanager
async def _node_of(config: Config, served: Served) -> AsyncIterator[Node | None]:
    """This server as a node of a cluster, until the block ends; None if it is not a node."""
    if not config.cluster.wanted:
        yield None
        return
    async with needed("cluster.running.serving", "cluster").joined(config, served) as node:
        yield node


@asynccontextmanager
async def _supervised(config: Config, app: FastAPI) -> AsyncIterator[None]:
    """Lets the supervisor of this process, if it has one, see until the block ends that it lives."""
    if not config.server.supervise:
        yield
        return
    async with needed("supervise.child", "--supervise").supervised(app):
        yield


def _import_http() -> Callable[[FastAPI, Callable[[int], None]], Awaitable[int]]:
    """Imports what serves, in a second of processor time, while the model is loaded. Returns `server.run.serve`."""
    import mlx_parallm.server.app  # noqa: F401  # for `_create_app`
    from mlx_parallm.server.run import serve

    return serve


async def _run(config: Config, ranks: Ranks | None = None) -> int:
    """Runs the HTTP server and the training loop. An error in either ends both."""
    server = IntegratedServer(config, ranks)
    exit_code, _ = await asyncio.gather(server.run_inference(), server.run_training_loop())
    return exit_code


def _started(served: Served, config: Config, app: FastAPI, node: Node | None, port: int) -> None:
    """Shows the banner, has judges that are this server itself ask it on `port`, and tells the other nodes."""
    if node is not None:
        needed("cluster.running.serving", "cluster").begin_serving(node, config, app.state.services, port)
    if served.training is not None:
        key = config.server.api_key
        url = f"{banner.base_url(config.server, port)}/v1"
        served.training.parts.scorers.judge_by(url, key.get_secret_value() if key else "")
    # What is here now stays. Looking for garbage in all of it would stop every thread for 0.2 s, now and then.
    gc.freeze()
    banner.show(served, config, port)


class IntegratedServer:
    """A model that is served and, if `config` says so, trained.

    With HTTP: `run_inference` and `run_training_loop` share the model. Run them in one `asyncio.gather`, in any order.
    Without HTTP: `session`.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        self._config = config
        self._engine = RunningEngine(config, ranks=ranks)
        self._served: Served | None = None
        self._loading = asyncio.Lock()
        self._trains = False  # `run_training_loop` was called
        self._training_started = asyncio.Event()  # or has failed to start
        self._inference_ended = asyncio.Event()
        self._closing = asyncio.Lock()
        self._training_closed = False
        self._tracking: Tracking | None = None
        self._environment: Environment | None = None

    async def run_inference(self, host: str | None = None, port: int | None = None) -> int:
        """Serves HTTP until SIGTERM or SIGINT, and returns the process's exit code. `run_training_loop` ends with it.

        Args:
            host: replaces that of the configuration.
            port: the same.

        Raises:
            ConfigError, ModelError: before anything is served.
            StorageError: the last updates could not be saved.
        """
        server = self._config.server
        server = server.model_copy(update={"host": host or server.host, "port": server.port if port is None else port})
        config = self._config.model_copy(update={"server": server})
        check_http(server)
        templates = read_templates(server.chat_template_dir)
        traces = open_traces(server.otlp_traces_endpoint)
        try:
            served, serve = await asyncio.gather(self._load(), asyncio.to_thread(_import_http))
            run, training = served.run.path if served.run else None, served.training
            deletion = Deletion(config, run, training)
            models, adapters = await asyncio.to_thread(build_base_set, self._engine, templates, deletion)
            if traces is not None and training is not None:
                training.add_sink(traces.training.on_event)
            async with _node_of(config, served) as node:
                app = self._create_app(served, config, models, adapters, traces, node)
                if self._trains:  # requests can only be collected once the adapter is trained
                    await self._training_started.wait()
                if training is not None:
                    training.is_asleep = lambda: app.state.services.lifecycle.asleep
                with self._engine.failures_recorded():
                    async with models.kept_up(), self._engine.watch.running(), _supervised(config, app):
                        return await serve(app, partial(_started, served, config, app, node))
        finally:
            self._inference_ended.set()
            try:
                await self._stop()
            finally:
                if traces is not None:
                    await asyncio.to_thread(traces.close)

    def _create_app(
        self,
        served: Served,
        config: Config,
        models: BaseSet,
        adapters: AllAdapters,
        traces: Traces | None,
        node: Node | None,
    ) -> FastAPI:
        from mlx_parallm.server.app import create_app

        backend = Backend(served.engine, adapters, models, config.server, served.training)
        if node is not None:
            backend = needed("cluster.running.serving", "cluster").backend_of(
                node, backend, config.adapters.default_adapter
            )
        return create_app(backend, traces)

    async def run_training_loop(self) -> None:
        """Trains on collected trajectories until `run_inference` ends, or until it is cancelled.

        Returns at once if training is off.

        Raises:
            InvalidRequestError, ConflictError: the live adapter cannot be trained with this configuration.
            ConfigError, ModelError: the model cannot be loaded.
            StorageError: the last updates could not be saved.
        """
        self._trains = True
        try:
            served = await self._load()
            if served.training is None:
                return
            with self._engine.failures_recorded():
                await self._start_training(served.training, served)
            self._training_started.set()
            await self._inference_ended.wait()
        finally:
            self._training_started.set()
            await self._close_training()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Served]:
        """The loaded model, for a Python program that needs no HTTP. It is trained if the configuration says so.

        Raises:
            InvalidRequestError, ConflictError: the live adapter cannot be trained with this configuration.
            ConfigError, ModelError: the model cannot be loaded.
            StorageError: the last updates could not be saved.
        """
        try:
            served = await self._load()
            with self._engine.failures_recorded():
                if served.training is not None:
                    await self._start_training(served.training, served)
                async with self._engine.watch.running():
                    yield served
        finally:
            await self._stop()

    async def _load(self) -> Served:
        async with self._loading:
            if self._served is None:
                # What cannot be imported is refused before the model is loaded.
                self._environment = await asyncio.to_thread(environment_of, self._config)
                self._served = await asyncio.to_thread(self._engine.start)
                if (training := self._served.training) is not None:
                    training.extras |= offered("serve", self._config, self._served, training)
            return self._served

    async def _stop(self) -> None:
        """Ends training first, because saving the last updates needs the device thread."""
        try:
            with self._engine.failures_recorded():
                await self._close_training()
        finally:
            await release(self._engine.stop)

    async def _start_training(self, training: TrainingService, served: Served) -> None:
        await training.start_adapter(training.default_adapter)
        await training.start_again()
        assert served.run is not None  # a server that trains keeps checkpoints
        earlier = await asyncio.to_thread(recorded_events, metrics_file(served.run))
        training.past.restore(earlier)
        self._tracking = start_tracking(self._config, served.run)
        training.track(self._tracking)
        self._engine.watch.attach(training.hold)
        for started in training.hooks.started:
            await started()
        if self._environment is not None:
            engine, tokenizer, run = served.engine, served.tokenizer, served.run.id
            rollouts = ServerRollouts(self._config, training, engine, tokenizer, run, self._environment)
            training.hooks.ending.append(rollouts.close)
            await rollouts.open(inference_engine(self._config, served))
            training.own_rollouts = rollouts.status
            training.loop().own_progress = rollouts.progress
            rollouts.start()

    async def _close_training(self) -> None:
        """Closes training once. A second caller waits until it is closed."""
        async with self._closing:
            training = None if self._served is None else self._served.training
            if training is None or self._training_closed:
                return
            self._training_closed = True
            try:
                await training.close()
            finally:
                if self._tracking is not None:
                    await release(self._tracking.close)


class RLIntegratedServer(IntegratedServer):
    """An IntegratedServer that trains, configured by a Python program.

        server = RLIntegratedServer(lora_config=LoRAConfig(rank=16), rl_config=RLConfig(batch_size=32))
        await asyncio.gather(server.run_inference(port=8000), server.run_training_loop())

    Args:
        base_model: a model directory or a hub id. None means the bundled model.
        keys: any other key of server_config.yaml, with two underscores for the dots of its path:
            `adapters__max_loras=4`.

    Raises:
        ConfigError: one line per problem.
    """

    def __init__(
        self,
        base_model: str | Path | None = None,
        lora_config: LoRAConfig | None = None,
        rl_config: RLConfig | None = None,
        **keys: object,
    ) -> None:
        super().__init__(configure(base_model, lora_config, rl_config, **keys))
