"""The configuration as Python programs write it: two small classes, and any other key as a keyword."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from mlx_parallm.config.keys import KEYS, suggest
from mlx_parallm.config.resolve import resolve
from mlx_parallm.config.sections import AdaptersConfig, Config, ModelConfig
from mlx_parallm.config.sources import Setting
from mlx_parallm.errors import ConfigError

_MODEL = ModelConfig()


@dataclass(frozen=True)
class LoRAConfig:
    """The adapters that training makes: their rank, their alpha (they are scaled by alpha / rank), and the last
    names of the linear layers that they change."""

    rank: int = _MODEL.lora_rank
    alpha: float = _MODEL.lora_alpha
    target_modules: tuple[str, ...] = _MODEL.lora_target_modules


@dataclass(frozen=True)
class RLConfig:
    """How they are trained; each field is a key of `rl_training`, described in server_config.yaml.

    `batch_size`: trajectories between two updates, `rl_training.update_frequency`. None: the algorithm's own value.
    """

    algorithm: str = "grpo"
    learning_rate: float = 1e-5
    batch_size: int = 100
    max_staleness: int = 1
    clip_low: float | None = None
    clip_high: float | None = None
    scale_rewards: str | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    seed: int = 0


_PATHS = {
    "rank": "model.lora_rank",
    "alpha": "model.lora_alpha",
    "target_modules": "model.lora_target_modules",
    "algorithm": "rl_training.algorithm",
    "learning_rate": "rl_training.optimizer.learning_rate",
    "batch_size": "rl_training.update_frequency",
    "max_staleness": "rl_training.max_staleness",
    "clip_low": "rl_training.loss.clip_low",
    "clip_high": "rl_training.loss.clip_high",
    "scale_rewards": "rl_training.loss.scale_rewards",
    "kl_coef": "rl_training.loss.kl_coef",
    "entropy_coef": "rl_training.loss.entropy_coef",
    "seed": "rl_training.seed",
}


def configure(
    base_model: str | Path | None = None,
    lora_config: LoRAConfig | None = None,
    rl_config: RLConfig | None = None,
    **keys: object,
) -> Config:
    """The configuration of a server that trains. The environment and server_config.yaml are not read.

    Args:
        base_model: a model directory or a hub id; None: the bundled model.
        keys: any other key of server_config.yaml, its path joined by two underscores: `server__port=8001`.
            One that is given here wins; slots of the adapter bank have room for `lora_config.rank` by themselves.

    Raises:
        ConfigError: one line per problem.
    """
    lora, rl = lora_config or LoRAConfig(), rl_config or RLConfig()
    settings = {
        "rl_training.enabled": Setting(True, "training in Python"),
        "adapters.max_lora_rank": Setting(max(AdaptersConfig().max_lora_rank, lora.rank), "lora_config.rank"),
        **dict(_settings(lora, "lora_config")),
        **dict(_settings(rl, "rl_config")),
    }
    if base_model is not None:
        settings["model.base_model_path"] = Setting(str(base_model), "base_model")
    return resolve(settings | {_path(name): Setting(value, name) for name, value in keys.items()}).config


def _settings(part: LoRAConfig | RLConfig, name: str) -> Iterator[tuple[str, Setting]]:
    for field in fields(part):
        yield _PATHS[field.name], Setting(getattr(part, field.name), f"{name}.{field.name}")


def _path(name: str) -> str:
    path = name.replace("__", ".")
    if path not in KEYS:
        known = suggest(path, tuple(KEYS))
        hint = f"; did you mean {known.replace('.', '__')}?" if known else ""
        raise ConfigError(f"{name}: unknown keyword{hint}")
    return path
