"""RLIntegratedServer: one model in one process, served and trained at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mlx_parallm import BLAS
from mlx_parallm.app.engine import Engine, Served
from mlx_parallm.cli import banner
from mlx_parallm.config import Config, LoRAConfig, Mode, RLConfig, configure
from mlx_parallm.server.app import create_app
from mlx_parallm.server.no_training import NoTraining
from mlx_parallm.server.run import serve
from mlx_parallm.server.settings import LOOPBACK_HOSTS, ServerSettings


class IntegratedServer:
    """A model that is served and, if `config` says so, trained. Its two coroutines share the model, and are meant for
    one `asyncio.gather`, in any order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine = Engine(config)
        self._served: Served | None = None
        self._loading = asyncio.Lock()
        self._trains = False  # `run_training_loop` was begun
        self._started = asyncio.Event()  # training has started, or failed to
        self._ended = asyncio.Event()
        self._closing = asyncio.Lock()
        self._training_closed = False

    async def run_inference(self, host: str | None = None, port: int | None = None) -> int:
        """Serves until SIGTERM or SIGINT, and returns the process's exit code; `run_training_loop` ends with it.

        Args:
            host, port: in place of those configured.

        Raises:
            ConfigError, ModelError: before anything is served.
            StorageError: what was learnt last could not be saved.
        """
        settings = self._config.server
        host, port = host or settings.host, settings.port if port is None else port
        try:
            served = await self._load()
            app = create_app(
                served.engine,
                served.adapters,
                served.training.service if served.training else NoTraining(),
                served.tokenizer,
                served.card,
                _server_settings(self._config, host),
            )

            def announce(bound: int) -> None:
                banner.show(self._banner(served, host, bound))

            if self._trains:  # a request that is to be collected finds the adapter in training
                await self._started.wait()
            return await serve(app, host, port, settings.shutdown_timeout, announce)
        finally:
            self._ended.set()
            await self._stop()

    async def run_training_loop(self) -> None:
        """Trains on what is collected until `run_inference` has ended, or for ever where it was not begun. Returns at
        once where training is off.

        Raises:
            InvalidRequestError, ConflictError: the adapter that is live cannot be trained with this configuration.
            ConfigError, ModelError: the model cannot be loaded.
            StorageError: what was learnt last could not be saved.
        """
        self._trains = True
        try:
            served = await self._load()
            if served.training is None:
                return
            await served.training.start()
            self._started.set()
            await self._ended.wait()
        finally:
            self._started.set()
            await self._close_training()

    async def _load(self) -> Served:
        async with self._loading:
            if self._served is None:
                self._served = await asyncio.to_thread(self._engine.start)
            return self._served

    async def _stop(self) -> None:
        """Training first: what it has learnt is saved by way of the device thread."""
        try:
            await self._close_training()
        finally:
            await asyncio.to_thread(self._engine.stop)

    async def _close_training(self) -> None:
        """Whichever of the two coroutines ends first does it; the other one waits for it."""
        async with self._closing:
            if self._served is None or self._served.training is None or self._training_closed:
                return
            self._training_closed = True
            await self._served.training.close()

    def _banner(self, served: Served, host: str, port: int) -> banner.BannerInfo:
        config = self._config
        return banner.BannerInfo(
            model=served.card,
            adapters=tuple(card.ref.name for card in served.adapters.cards() if card.live),
            adapter_slots=config.adapters.max_loras,
            adapter_rank=config.adapters.max_lora_rank,
            run=served.run,
            kv_bytes=self._engine.processor.stats().kv_bytes_budget,
            mlx_bytes=served.limits.memory,
            mlx_cache_bytes=served.limits.cache,
            mlx_wired_bytes=served.limits.wired,
            device=served.device,
            blas=BLAS.name,
            host=host,
            port=port,
            authenticated=config.server.api_key is not None,
            warnings=() if BLAS.fast else (BLAS.problem,),
        )


class RLIntegratedServer(IntegratedServer):
    """The same, by the keys that a Python program has in hand; it trains.

        server = RLIntegratedServer(lora_config=LoRAConfig(rank=16), rl_config=RLConfig(batch_size=32))
        await asyncio.gather(server.run_inference(port=8000), server.run_training_loop())

    Args:
        base_model: a model directory or a hub id; None: the bundled model.
        keys: any other key of server_config.yaml, its path joined by two underscores: `adapters__max_loras=4`.

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


def _server_settings(config: Config, host: str) -> ServerSettings:
    server = config.server
    return ServerSettings(
        api_key=server.api_key.get_secret_value() if server.api_key else None,
        allowed_hosts=(*LOOPBACK_HOSTS, host, *server.allowed_hosts),
        cors_origins=server.cors_origins,
        max_batch_size=server.max_batch_size,
        max_queued=server.max_queued,
        max_body_bytes=server.max_body_bytes,
        max_connections=server.max_connections,
        header_timeout_s=server.header_timeout,
        body_timeout_s=server.body_timeout,
        write_timeout_s=server.write_timeout,
        inference=server.mode is not Mode.TRAINING_ONLY,
        strict_fields=server.strict_fields,
        access_log=server.access_log,
    )
