"""The frozen configuration. `resolve(flags, environ, file)` makes one; other packages take the section they need.

Its modules, each imported by those to its right: types → training, sections → sources → resolve → python
"""

from mlx_parallm.config.python import LoRAConfig, RLConfig, configure
from mlx_parallm.config.resolve import Resolved, render, resolve
from mlx_parallm.config.sections import (
    AdaptersConfig,
    CheckpointingConfig,
    Config,
    DebugConfig,
    Mode,
    ModelConfig,
    PriorityRatios,
    ServerConfig,
    TrafficClass,
)
from mlx_parallm.config.sources import API_KEY_VARIABLE, KEYS, Key, Setting
from mlx_parallm.config.training import (
    Algorithm,
    GateConfig,
    LearningRateSchedule,
    LossConfig,
    OldLogprobs,
    OptimizerConfig,
    ResolvedLoss,
    ResolvedTraining,
    RewardScale,
    RLTrainingConfig,
)
from mlx_parallm.config.types import human_bytes, is_loopback, parse_bytes

__all__ = [
    "API_KEY_VARIABLE",
    "KEYS",
    "AdaptersConfig",
    "Algorithm",
    "CheckpointingConfig",
    "Config",
    "DebugConfig",
    "GateConfig",
    "Key",
    "LearningRateSchedule",
    "LoRAConfig",
    "LossConfig",
    "Mode",
    "ModelConfig",
    "OldLogprobs",
    "OptimizerConfig",
    "PriorityRatios",
    "RLConfig",
    "RLTrainingConfig",
    "Resolved",
    "ResolvedLoss",
    "ResolvedTraining",
    "RewardScale",
    "ServerConfig",
    "Setting",
    "TrafficClass",
    "configure",
    "human_bytes",
    "is_loopback",
    "parse_bytes",
    "render",
    "resolve",
]
