"""The only place that builds the parts and ties them together: config in, a running server out."""

from __future__ import annotations

import logging

from mlx_parallm import BLAS
from mlx_parallm.app.engine import Engine, Served, build_runner
from mlx_parallm.cli import banner
from mlx_parallm.config import Config
from mlx_parallm.server.app import create_app
from mlx_parallm.server.run import serve
from mlx_parallm.server.settings import LOOPBACK_HOSTS, ServerSettings

__all__ = ["Engine", "Served", "build_runner", "run"]


def run(config: Config) -> int:
    """Loads the model, serves until told to stop, and returns the process's exit code.

    Raises:
        ConfigError, ModelError: before anything is served.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    engine = Engine(config)
    served = engine.start()
    app = create_app(engine.processor, served.adapters, served.tokenizer, served.card, _server_settings(config))

    def announce(port: int) -> None:
        banner.show(_banner(config, served, engine.processor.stats().kv_bytes_budget, port))

    try:
        return serve(app, config.server.host, config.server.port, config.server.shutdown_timeout, announce)
    finally:
        engine.processor.stop()


def _server_settings(config: Config) -> ServerSettings:
    server = config.server
    return ServerSettings(
        api_key=server.api_key.get_secret_value() if server.api_key else None,
        allowed_hosts=(*LOOPBACK_HOSTS, server.host, *server.allowed_hosts),
        cors_origins=server.cors_origins,
        max_batch_size=server.max_batch_size,
        max_queued=server.max_queued,
        max_body_bytes=server.max_body_bytes,
    )


def _banner(config: Config, served: Served, kv_bytes: int, port: int) -> banner.BannerInfo:
    return banner.BannerInfo(
        model=served.card,
        adapters=tuple(card.ref.name for card in served.adapters.cards() if card.live),
        adapter_slots=config.adapters.max_loras,
        adapter_rank=config.adapters.max_lora_rank,
        kv_bytes=kv_bytes,
        device=served.device,
        blas=BLAS.name,
        host=config.server.host,
        port=port,
        authenticated=config.server.api_key is not None,
        warnings=() if BLAS.fast else (BLAS.problem,),
    )
