"""What a process needs is checked before it loads a model: first what is cheap.

    check_http        what a server needs for HTTP
    check             what any process needs: files, folders, packages, functions

What training reads is read before, too: see `training.TrainingInputs`.
"""

from __future__ import annotations

import os
from pathlib import Path

from mlx_parallm.app.adapters import no_such_adapter
from mlx_parallm.app.base_paths import base_paths
from mlx_parallm.config import Config, ServerConfig
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.models import GENERIC_NAME
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras_table import needed
from mlx_parallm.rl.configured_reward import check_reward


def check_http(server: ServerConfig) -> None:
    """Raises ConfigError: a file cannot be used, or the address is in use."""
    from mlx_parallm.server.access import read_keys  # a run without HTTP imports none of this
    from mlx_parallm.server.address import bind, check_certificate

    check_certificate(server)
    if server.keys_file is not None:
        read_keys(server.keys_file)
    if server.audit_log is not None:
        _check_writable("server.audit_log", server.audit_log)
    bind(server.host, server.port).close()


def check(config: Config) -> None:
    """The reward's functions are loaded once, in a child process, which takes seconds.

    Raises:
        ConfigError: something is missing, or cannot be used.
    """
    training, adapters = config.rl_training, config.adapters
    if adapters.adapter_dir is not None and not adapters.adapter_dir.is_dir():
        raise ConfigError(
            f"adapters.adapter_dir: {adapters.adapter_dir} is no folder; make it, or correct --adapter-dir"
        )
    _check_served(config)
    if config.server.prefix_cache_dir is not None:
        _check_writable("server.prefix_cache_dir", config.server.prefix_cache_dir)
    if config.debug.trace is not None:
        _check_writable("debug.trace", config.debug.trace)
    if training.enabled and training.trajectory_log is not None:
        _check_writable("rl_training.trajectory_log", training.trajectory_log)
    if training.trackers:
        needed("trackers", "rl_training.trackers").check_installed(training.trackers)
    check_reward(config)


def _check_served(config: Config) -> None:
    """Raises ConfigError: nothing can be called what `adapters.serve` says. A run's folder may have anything."""
    adapters, selector, run = config.adapters, config.adapters.serve, config.checkpointing
    models = {BASE_ADAPTER.name, GENERIC_NAME, *(base.name for base in base_paths(config))}
    if selector is None or selector in models or run.resume or (run.checkpoint_dir and run.checkpoint_dir.is_dir()):
        return
    if adapters.adapter_dir is None or not (adapters.adapter_dir / selector.partition("@")[0]).is_dir():
        raise no_such_adapter(selector)


def _check_writable(setting: str, path: Path) -> None:
    """Raises ConfigError: a file or a folder cannot be written, or cannot be made."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not os.access(there, os.W_OK) or (there != path.absolute() and not there.is_dir()):
        raise ConfigError(f"{setting}: {path} cannot be written: name another place, or let this user write there")
