"""The only place that builds the parts and ties them together: config in, a running server out."""

from __future__ import annotations

import asyncio
import logging

from mlx_parallm.app.engine import Engine, Served, build_runner
from mlx_parallm.app.integrated import IntegratedServer, RLIntegratedServer
from mlx_parallm.config import Config
from mlx_parallm.server import request_log

__all__ = ["Engine", "IntegratedServer", "RLIntegratedServer", "Served", "build_runner", "run"]


def run(config: Config) -> int:
    """Loads the model, serves (and trains, if so configured) until told to stop; returns the process's exit code.

    Raises:
        ConfigError, ModelError: before anything is served.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    request_log.write_plain_lines()
    return asyncio.run(_run(config))


async def _run(config: Config) -> int:
    """What ends one of the two with an error ends both."""
    server = IntegratedServer(config)
    exit_code, _ = await asyncio.gather(server.run_inference(), server.run_training_loop())
    return exit_code
