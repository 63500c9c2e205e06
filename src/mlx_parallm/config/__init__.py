"""The frozen configuration: sections, sources, and the way from one to the other.

`resolve(flags, environ, file)` is the one entry; rooms above take the section they need.
"""

from mlx_parallm.config.keys import KEYS, Key
from mlx_parallm.config.render import render
from mlx_parallm.config.resolve import Resolved, resolve
from mlx_parallm.config.sections import (
    AdaptersConfig,
    CheckpointingConfig,
    Config,
    ModelConfig,
    RLTrainingConfig,
)
from mlx_parallm.config.server import Mode, PriorityRatios, ServerConfig
from mlx_parallm.config.sizes import human_bytes, parse_bytes
from mlx_parallm.config.sources import API_KEY_VARIABLE, Setting
from mlx_parallm.config.types import is_loopback

__all__ = [
    "API_KEY_VARIABLE",
    "KEYS",
    "AdaptersConfig",
    "CheckpointingConfig",
    "Config",
    "Key",
    "Mode",
    "ModelConfig",
    "PriorityRatios",
    "RLTrainingConfig",
    "Resolved",
    "ServerConfig",
    "Setting",
    "human_bytes",
    "is_loopback",
    "parse_bytes",
    "render",
    "resolve",
]
