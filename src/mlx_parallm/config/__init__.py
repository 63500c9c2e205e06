"""The frozen configuration: sections, sources, and the way from one to the other.

`resolve(flags, environ, file)` is the one entry; rooms above take the section they need.
"""

from mlx_parallm.config.keys import KEYS, Key
from mlx_parallm.config.python import LoRAConfig, RLConfig, configure
from mlx_parallm.config.render import render
from mlx_parallm.config.resolve import Resolved, resolve
from mlx_parallm.config.sections import (
    AdaptersConfig,
    CheckpointingConfig,
    Config,
    ModelConfig,
)
from mlx_parallm.config.server import Mode, PriorityRatios, ServerConfig
from mlx_parallm.config.sizes import human_bytes, parse_bytes
from mlx_parallm.config.sources import API_KEY_VARIABLE, Setting
from mlx_parallm.config.training import GateConfig, LossConfig, OptimizerConfig, RLTrainingConfig
from mlx_parallm.config.types import is_loopback

__all__ = [
    "API_KEY_VARIABLE",
    "KEYS",
    "AdaptersConfig",
    "CheckpointingConfig",
    "Config",
    "GateConfig",
    "Key",
    "LoRAConfig",
    "LossConfig",
    "Mode",
    "ModelConfig",
    "OptimizerConfig",
    "PriorityRatios",
    "RLConfig",
    "RLTrainingConfig",
    "Resolved",
    "ServerConfig",
    "Setting",
    "configure",
    "human_bytes",
    "is_loopback",
    "parse_bytes",
    "render",
    "resolve",
]
