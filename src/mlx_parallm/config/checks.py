"""Rules across sections, and across sources: whether the server trains, and whether it can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from mlx_parallm.config.keys import KEYS, yaml_text
from mlx_parallm.config.sections import Config
from mlx_parallm.config.server import Mode
from mlx_parallm.config.sources import Setting
from mlx_parallm.errors import ConfigError

_MODE, _ENABLED = "server.mode", "rl_training.enabled"
_SMALLEST_BANK = 2
"""The live version, and the next one beside it."""

# What nothing in this version does: the key, and what it would turn on. Each may hold its default only.
_UNAVAILABLE = {"rl_training.atropos_url": "rewards from Atropos"}


def settle_training(config: Config, layers: Sequence[Mapping[str, Setting]]) -> tuple[Config, dict[str, Setting]]:
    """Makes the mode and `rl_training.enabled` agree: what the stronger source says counts.

    Within a file, which may list every key, the one that turns training on counts.

    Args:
        layers: settings of flags, of the environment and of the file.

    Returns:
        The configuration, and the setting that changed the other key, by that key.

    Raises:
        ConfigError: two flags, or two variables, contradict each other.
    """
    by_mode, by_switch = config.server.mode is not Mode.INFERENCE_ONLY, config.rl_training.enabled
    if by_mode == by_switch:
        return config, {}
    (mode_rank, mode), (switch_rank, switch) = _source(_MODE, layers), _source(_ENABLED, layers)
    if mode_rank == switch_rank < len(layers) - 1:
        raise ConfigError(
            f"{_MODE}: {config.server.mode} contradicts {_ENABLED} {yaml_text(by_switch)}; keep one of them "
            f"(from {mode.source} and {switch.source})"
        )
    mode_wins = by_mode if mode_rank == switch_rank else mode_rank < switch_rank
    if mode_wins:
        return _with(config, config.server.mode, by_mode), {_ENABLED: mode}
    return _with(config, Mode.INFERENCE_AND_TRAINING if by_switch else Mode.INFERENCE_ONLY, by_switch), {_MODE: switch}


def refuse_impossible(config: Config, settings: Mapping[str, Setting]) -> None:
    """Raises ConfigError: keys that fit their sections do not fit each other, or nothing does what they ask."""
    if problems := [*_unavailable(config, settings), *_training(config, settings)]:
        raise ConfigError("\n".join(problems))


def _unavailable(config: Config, settings: Mapping[str, Setting]) -> Iterator[str]:
    for path, feature in _UNAVAILABLE.items():
        if attrgetter(path)(config) != KEYS[path].field.default:
            yield (
                f"{path}: not available in this version: {feature}; leave it at {KEYS[path].default_text} "
                f"{_origin(settings, path)}"
            )


def _training(config: Config, settings: Mapping[str, Setting]) -> Iterator[str]:
    if not config.rl_training.enabled:
        return
    rank, room = config.model.lora_rank, config.adapters.max_lora_rank
    if rank > room:
        origin = _origin(settings, "model.lora_rank", "adapters.max_lora_rank")
        yield (
            f"model.lora_rank: {rank} is above adapters.max_lora_rank {room}; "
            f"raise --max-lora-rank or lower --lora-rank {origin}"
        )
    if config.adapters.max_loras < _SMALLEST_BANK:
        need = f"training needs {_SMALLEST_BANK} at least, for the live version and the next; raise --max-loras"
        yield f"adapters.max_loras: {need} {_origin(settings, 'adapters.max_loras')}"


def _origin(settings: Mapping[str, Setting], *paths: str) -> str:
    return f"(from {' and '.join(settings[path].source for path in paths if path in settings)})"


def _source(path: str, layers: Sequence[Mapping[str, Setting]]) -> tuple[int, Setting]:
    """The strongest layer that sets `path`, 0 first, and its setting there; else one more than there are."""
    found = ((rank, layer[path]) for rank, layer in enumerate(layers) if path in layer)
    return next(found, (len(layers), Setting(None, "default")))


def _with(config: Config, mode: Mode, enabled: bool) -> Config:
    server = config.server.model_copy(update={"mode": mode})
    return config.model_copy(
        update={"server": server, "rl_training": config.rl_training.model_copy(update={"enabled": enabled})}
    )
