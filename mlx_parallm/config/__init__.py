"""The frozen configuration. `resolve(flags, environ, file)` makes it for a command, `configure(...)` for a program.

Other packages import what they need from here. Each module imports only from those to its left:
types → cluster, divergence, inference, loss, server → training → sections → sources → resolve
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.config.cluster import ClusterConfig
from mlx_parallm.config.divergence import Action, DivergenceConfig
from mlx_parallm.config.inference import EngineKind, InferenceConfig
from mlx_parallm.config.loss import Algorithm, LossConfig, LossKind, OldLogprobs, ResolvedLoss, RewardScale
from mlx_parallm.config.resolve import Resolved, render, resolve
from mlx_parallm.config.sections import (
    AdaptersConfig,
    CheckpointingConfig,
    Config,
    DebugConfig,
    ModelConfig,
)
from mlx_parallm.config.server import (
    Attention,
    GenerationConfig,
    LogprobsMode,
    Mode,
    ServerConfig,
    Speculation,
    TrafficClass,
)
from mlx_parallm.config.sources import API_KEY_VARIABLE, CLUSTER_TOKEN_VARIABLE, KEYS, SECTIONS, Key, Setting, suggest
from mlx_parallm.config.training import (
    CompetitionConfig,
    CurriculumConfig,
    LearningRateSchedule,
    OptimizerConfig,
    PeopleConfig,
    PlateauConfig,
    ResolvedTraining,
    RLTrainingConfig,
    TinkerConfig,
    TrackerName,
)
from mlx_parallm.config.types import SERVE, TRAIN, Program, human_bytes, is_loopback, parse_bytes
from mlx_parallm.errors import ConfigError

# -- the configuration as a Python program writes it ---------------------------------------------

_MODEL, _TRAINING = ModelConfig(), RLTrainingConfig()


@dataclass(frozen=True)
class LoRAConfig:
    """The adapters that training makes, scaled by `alpha / rank`, or by `alpha / √rank` with `rslora`. `target_modules`
    are the linears that they change.
    """

    rank: int = _MODEL.lora_rank
    alpha: float = _MODEL.lora_alpha
    target_modules: tuple[str, ...] = _MODEL.lora_target_modules
    rslora: bool = _MODEL.lora_rslora


@dataclass(frozen=True)
class RLConfig:
    """How adapters are trained. server_config.yaml describes each field, under `rl_training`.

    `batch_size` is the number of trajectories of one update (`rl_training.update_frequency`). None means the
    algorithm's own value.
    """

    algorithm: str = _TRAINING.algorithm
    learning_rate: float = _TRAINING.optimizer.learning_rate
    batch_size: int = _TRAINING.update_frequency
    max_staleness: int = _TRAINING.max_staleness
    clip_low: float | None = _TRAINING.loss.clip_low
    clip_high: float | None = _TRAINING.loss.clip_high
    scale_rewards: str | None = _TRAINING.loss.scale_rewards
    kl_coef: float = _TRAINING.loss.kl_coef
    entropy_coef: float = _TRAINING.loss.entropy_coef
    seed: int = _TRAINING.seed


_PATHS = {
    "rank": "model.lora_rank",
    "alpha": "model.lora_alpha",
    "target_modules": "model.lora_target_modules",
    "rslora": "model.lora_rslora",
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
    """The configuration of a server that trains. Environment variables and server_config.yaml are not read.

    Args:
        base_model: a model directory or a hub id. None means the bundled model.
        keys: any other key of server_config.yaml, with two underscores for the dots of its path: `server__port=8001`.
            They take precedence over the other arguments.

    Raises:
        ConfigError: one line per problem.
    """
    settings = {"rl_training.enabled": Setting(True, "training in Python")}
    for source, part in (("lora_config", lora_config or LoRAConfig()), ("rl_config", rl_config or RLConfig())):
        settings |= {_PATHS[name]: Setting(value, f"{source}.{name}") for name, value in vars(part).items()}
    if base_model is not None:
        settings["model.base_model_path"] = Setting(str(base_model), "base_model")
    return resolve(settings | {_path(name): Setting(value, name) for name, value in keys.items()}).config


def _path(name: str) -> str:
    path = name.replace("__", ".")
    if path not in KEYS:
        known = suggest(path, tuple(KEYS))
        hint = f"; did you mean {known.replace('.', '__')}?" if known else ""
        raise ConfigError(f"{name}: unknown keyword{hint}")
    return path
