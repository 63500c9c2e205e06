"""The flags of the settings: each names the configuration key that it sets, and takes its help from there."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.config import KEYS, Key, Setting


@dataclass(frozen=True, slots=True)
class Flag:
    """`metavar` is what the help calls the value; a flag without one takes none and has a --no- form."""

    name: str
    path: str
    metavar: str = ""

    @property
    def key(self) -> Key:
        return KEYS[self.path]


TRAIN_ONLY = frozenset({"rl_training.environment", "rl_training.max_completion_tokens"})
"""Keys whose flags a server has no use for."""

FLAGS = (
    Flag("--model-path", "model.base_model_path", "DIR_OR_HUB_ID"),
    Flag("--served-model-name", "server.served_model_name", "NAME"),
    Flag("--host", "server.host", "ADDRESS"),
    Flag("--port", "server.port", "PORT"),
    Flag("--mode", "server.mode", "MODE"),
    Flag("--max-batch-size", "server.max_batch_size", "ROWS"),
    Flag("--max-batched-tokens", "server.max_batched_tokens", "TOKENS"),
    Flag("--max-queued", "server.max_queued", "SEQUENCES"),
    Flag("--kv-cache-memory", "server.kv_cache_memory", "SIZE"),
    Flag("--mlx-memory-limit", "server.mlx_memory_limit", "SIZE"),
    Flag("--mlx-cache-limit", "server.mlx_cache_limit", "SIZE"),
    Flag("--max-decode-stall-ms", "server.max_decode_stall_ms", "MILLISECONDS"),
    Flag("--max-model-len", "model.max_model_len", "TOKENS"),
    Flag("--adapter-dir", "adapters.adapter_dir", "DIR"),
    Flag("--allowed-adapter-roots", "adapters.allowed_adapter_roots", "DIR,DIR"),
    Flag("--max-loras", "adapters.max_loras", "VERSIONS"),
    Flag("--max-cpu-loras", "adapters.max_cpu_loras", "VERSIONS"),
    Flag("--max-lora-rank", "adapters.max_lora_rank", "RANK"),
    Flag("--default-adapter", "adapters.default_adapter", "NAME"),
    Flag("--serve-adapter", "adapters.serve", "NAME_OR_CHECKPOINT"),
    Flag("--checkpoint-dir", "checkpointing.checkpoint_dir", "DIR"),
    Flag("--checkpoint-interval", "checkpointing.interval", "UPDATES"),
    Flag("--checkpoint-minutes", "checkpointing.minutes", "MINUTES"),
    Flag("--resume", "checkpointing.resume"),
    Flag("--keep-n-checkpoints", "checkpointing.keep_n_checkpoints", "CHECKPOINTS"),
    Flag("--enable-rl-training", "rl_training.enabled"),
    Flag("--rl-algorithm", "rl_training.algorithm", "NAME"),
    Flag("--lora-rank", "model.lora_rank", "RANK"),
    Flag("--lora-alpha", "model.lora_alpha", "NUMBER"),
    Flag("--lora-target-modules", "model.lora_target_modules", "NAME,NAME"),
    Flag("--learning-rate", "rl_training.optimizer.learning_rate", "NUMBER"),
    Flag("--kl-coef", "rl_training.loss.kl_coef", "NUMBER"),
    Flag("--update-frequency", "rl_training.update_frequency", "TRAJECTORIES"),
    Flag("--max-staleness", "rl_training.max_staleness", "VERSIONS"),
    Flag("--training-time-share", "rl_training.training_time_share", "SHARE"),
    Flag("--micro-batch-tokens", "rl_training.micro_batch_tokens", "TOKENS"),
    Flag("--trajectory-buffer-size", "rl_training.trajectory_buffer_size", "TRAJECTORIES"),
    Flag("--trajectory-log", "rl_training.trajectory_log", "FILE"),
    Flag("--environment", "rl_training.environment", "NAME"),
    Flag("--max-tokens", "rl_training.max_completion_tokens", "TOKENS"),
    Flag("--seed", "rl_training.seed", "SEED"),
    Flag("--api-key", "server.api_key", "KEY"),
    Flag("--strict-fields", "server.strict_fields"),
    Flag("--allowed-hosts", "server.allowed_hosts", "NAME,NAME"),
    Flag("--cors-origins", "server.cors_origins", "ORIGIN,ORIGIN"),
    Flag("--trust-remote-code", "model.trust_remote_code"),
    Flag("--allow-special-tokens", "model.allow_special_tokens"),
    Flag("--shutdown-timeout", "server.shutdown_timeout", "SECONDS"),
    Flag("--log-level", "server.log_level", "LEVEL"),
    Flag("--access-log", "server.access_log", "BOOL"),
    Flag("--debug", "server.debug"),
)


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds --config, --print-config and every flag of the table whose key is not in `without`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="A yaml file of settings, as server_config.yaml.")
    parser.add_argument(
        "--print-config", action="store_true", help="Print the resolved configuration, secrets masked, and exit."
    )
    group = parser.add_argument_group("settings", "A flag wins over its environment variable, and that over --config.")
    for flag in FLAGS:
        if flag.path not in without:
            group.add_argument(flag.name, dest=flag.path, default=None, help=_help(flag.key), **_takes(flag))


def settings(args: argparse.Namespace) -> dict[str, Setting]:
    """What the flags given set, by key path; values stay text until the configuration checks them."""
    given = vars(args)
    return {flag.path: Setting(value, flag.name) for flag in FLAGS if (value := given.get(flag.path)) is not None}


def _takes(flag: Flag) -> dict[str, Any]:
    if not flag.metavar:
        return {"action": argparse.BooleanOptionalAction}
    return {"metavar": flag.metavar}


def _help(key: Key) -> str:
    return f"{key.description} Default: {key.default_text}. [{key.env_name}]".replace("%", "%%")
