"""Merges the settings of all sources into one checked, frozen Config, and prints a Config as commented yaml.

flags > environment > yaml file > defaults
    → sections check their fields (`server.py`, `sections.py`, `training.py`)
    → `server.mode` and `rl_training.enabled` are made to agree
    → the adapter bank gets room for the rank of training
    → a node of a cluster listens on all addresses
    → keys of different sections are checked against each other
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlx_parallm.config.sections import LARGEST_RANK, Config
from mlx_parallm.config.server import Mode, Speculation
from mlx_parallm.config.sources import KEYS, Setting, from_environment, from_yaml, section_of, yaml_text
from mlx_parallm.config.types import Section
from mlx_parallm.errors import ConfigError

_MODE, _ENABLED = "server.mode", "rl_training.enabled"
_RANK, _BANK_RANK = "model.lora_rank", "adapters.max_lora_rank"
_HOST, _ALL_ADDRESSES = "server.host", "0.0.0.0"
_CLUSTER = ("cluster.share_model", "cluster.connect_to")
_SMALLEST_BANK = 2
"""Slots that training needs: one for the live version and one for the next version."""

_ATROPOS_URL, _ATROPOS_API = "rl_training.atropos_url", "server.atropos_api"
_UPDATES_AHEAD = 4
"""Updates whose trajectories the buffer must hold: Atropos' environments make three ahead of the one in training."""

_YAML_HEADER = """\
# Configuration of MLX ParaLLM: mlx_parallm_serve --config server_config.yaml
#
# Flags take precedence over environment variables, environment variables over this file, and this file over the
# defaults. Every key has a flag, such as --server.port, and an environment variable, such as MLX_PARALLM_SERVER__PORT.
# Lists are written a,b,c there. Unknown keys are refused. Sizes are written 4GB (4 x 10^9 bytes) or 4GiB (4 x 2^30
# bytes).
"""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked configuration, and the source of each key that a source has set: {key path: source}."""

    config: Config
    sources: Mapping[str, str]


def resolve(
    flags: Mapping[str, Setting],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, Setting] = MappingProxyType({}),
) -> Resolved:
    """Merges flags > environment > yaml file > defaults, and checks the result. `defaults`: in place of those that the
    sections declare.

    Raises:
        ConfigError: one line per problem, which names the key, the value, its source and the remedy.
    """
    layers = (dict(flags), from_environment(environ or {}), from_yaml(file) if file else {})
    settings = {**defaults, **layers[2], **layers[1], **layers[0]}
    try:
        config = Config.model_validate(_nest(settings))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, settings) for detail in error.errors())) from None
    config, adjusted = _agree_on_training(config, layers)
    settings |= adjusted
    config, adjusted = _make_room_for_rank(config, layers)
    settings |= adjusted
    config, adjusted = _listen_to_other_nodes(config, layers)
    settings |= adjusted
    checks = (_unread, _speculation, _atropos, _training_problems)
    if problems := [problem for check in checks for problem in check(config, settings)]:
        raise ConfigError("\n".join(problems))
    return Resolved(config, {path: setting.source for path, setting in settings.items()})


def _nest(settings: Mapping[str, Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, setting in settings.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = setting.value
    return tree


def _explain(detail: ErrorDetails, settings: Mapping[str, Setting]) -> str:
    path = ".".join(str(part) for part in detail["loc"] if isinstance(part, str))
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    setting = settings.get(path)
    if setting is None:  # a check of several keys of one section
        return f"{path}: {message}"
    got = "" if KEYS[path].secret else f", got {detail['input']!r}"
    return f"{path}: {message}{got} (from {setting.source})"


# -- keys that follow others ---------------------------------------------------------------------


def _agree_on_training(config: Config, layers: Sequence[Mapping[str, Setting]]) -> tuple[Config, dict[str, Setting]]:
    """Makes `server.mode` and `rl_training.enabled` agree: the one from the stronger source decides.

    A file may list every key at its default, so within a file the key that turns training on decides.

    Args:
        layers: the settings of flags, of the environment and of the file, strongest first.

    Returns:
        The configuration, and for the key that was changed the setting that changed it.

    Raises:
        ConfigError: two flags, or two environment variables, contradict each other.
    """
    by_mode, by_switch = config.server.mode is not Mode.INFERENCE_ONLY, config.rl_training.enabled
    if by_mode == by_switch:
        return config, {}
    (mode_rank, mode), (switch_rank, switch) = _strongest(_MODE, layers), _strongest(_ENABLED, layers)
    if mode_rank == switch_rank < len(layers) - 1:
        raise ConfigError(
            f"{_MODE}: {config.server.mode} contradicts {_ENABLED} {yaml_text(by_switch)}; keep one of them "
            f"(from {mode.source} and {switch.source})"
        )
    mode_decides = by_mode if mode_rank == switch_rank else mode_rank < switch_rank
    if mode_decides:
        return _with(config, config.server.mode, by_mode), {_ENABLED: mode}
    return _with(config, Mode.INFERENCE_AND_TRAINING if by_switch else Mode.INFERENCE_ONLY, by_switch), {_MODE: switch}


def _make_room_for_rank(config: Config, layers: Sequence[Mapping[str, Setting]]) -> tuple[Config, dict[str, Setting]]:
    """Raises `adapters.max_lora_rank` to `model.lora_rank`, unless an equally strong or stronger source sets it.

    Returns:
        The configuration, and for a key that was changed the setting that changed it.
    """
    rank, adapters = config.model.lora_rank, config.adapters
    (strength, setting), (bank_strength, _) = _strongest(_RANK, layers), _strongest(_BANK_RANK, layers)
    if not config.rl_training.enabled or rank <= adapters.max_lora_rank or strength >= bank_strength:
        return config, {}
    adapters = adapters.model_copy(update={"max_lora_rank": min(rank, LARGEST_RANK)})
    return config.model_copy(update={"adapters": adapters}), {_BANK_RANK: setting}


def _listen_to_other_nodes(
    config: Config, layers: Sequence[Mapping[str, Setting]]
) -> tuple[Config, dict[str, Setting]]:
    """Lets a node of a cluster listen on all addresses, unless a source says where it listens."""
    strength, _ = _strongest(_HOST, layers)
    if not config.cluster.wanted or strength < len(layers):
        return config, {}
    _, setting = min((_strongest(path, layers) for path in _CLUSTER), key=lambda found: found[0])
    server = config.server.model_copy(update={"host": _ALL_ADDRESSES})
    return config.model_copy(update={"server": server}), {_HOST: setting}


def _strongest(path: str, layers: Sequence[Mapping[str, Setting]]) -> tuple[int, Setting]:
    """The index of the first layer that sets `path`, with its setting; `len(layers)` if it is at its default."""
    found = ((rank, layer[path]) for rank, layer in enumerate(layers) if path in layer)
    return next(found, (len(layers), Setting(None, "default")))


def _with(config: Config, mode: Mode, enabled: bool) -> Config:
    server = config.server.model_copy(update={"mode": mode})
    training = config.rl_training.model_copy(update={"enabled": enabled})
    return config.model_copy(update={"server": server, "rl_training": training})


# -- checks across sections ----------------------------------------------------------------------


def _unread(config: Config, settings: Mapping[str, Setting]) -> Iterator[str]:
    path = "server.prefix_cache_disk"
    if config.server.prefix_cache_dir is None and config.server.prefix_cache_disk != KEYS[path].field.default:
        need = "limits the files of server.prefix_cache_dir, which is not set; add --prefix-cache-dir"
        yield f"{path}: {need} {_origin(settings, path)}"


def _speculation(config: Config, settings: Mapping[str, Setting]) -> Iterator[str]:
    """A draft model and the kind of speculation that uses it are given together."""
    path, speculation, draft = "server.speculation", config.server.speculation, config.model.draft_model
    if speculation is Speculation.DRAFT and draft is None:
        need = "draft needs a draft model; add --draft-model, or use --speculation ngram"
        yield f"{path}: {need} {_origin(settings, path)}"
    if draft is not None and speculation in (Speculation.NGRAM, Speculation.OFF):
        need = f"the draft model is not used with --speculation {speculation}; add --speculation auto or draft"
        yield f"model.draft_model: {need} {_origin(settings, 'model.draft_model', path)}"


def _atropos(config: Config, settings: Mapping[str, Setting]) -> Iterator[str]:
    """Atropos' groups are only taken for training, and from one API."""
    url, api = config.rl_training.atropos_url is not None, config.server.atropos_api
    for path, is_set in ((_ATROPOS_URL, url), (_ATROPOS_API, api)):
        if is_set and not config.rl_training.enabled:
            need = "takes groups for training, which is off; add --enable-rl-training"
            yield f"{path}: {need} {_origin(settings, path)}"
    if url and api:
        yield (
            f"{_ATROPOS_URL}: {_ATROPOS_API} serves that API here, so environments send their groups to this server; "
            f"keep one of the two {_origin(settings, _ATROPOS_URL, _ATROPOS_API)}"
        )
    size, wanted = config.rl_training.trajectory_buffer_size, _UPDATES_AHEAD * config.rl_training.update_frequency
    if api and size < wanted:
        path = "rl_training.trajectory_buffer_size"
        yield (
            f"{path}: {size} does not hold the {_UPDATES_AHEAD - 1} updates that environments of Atropos send ahead "
            f"(max_batches_offpolicy) and the one that is trained; raise --trajectory-buffer-size to at least {wanted} "
            f"{_origin(settings, path, _ATROPOS_API)}"
        )


def _training_problems(config: Config, settings: Mapping[str, Setting]) -> Iterator[str]:
    if not config.rl_training.enabled:
        return
    rank, most = config.model.lora_rank, config.adapters.max_lora_rank
    if rank > most:
        origin = _origin(settings, _RANK, _BANK_RANK)
        yield (f"{_RANK}: {rank} is above {_BANK_RANK} {most}; raise --max-lora-rank or lower --lora-rank {origin}")
    if config.adapters.max_loras < _SMALLEST_BANK:
        need = f"training needs at least {_SMALLEST_BANK}, for the live version and the next one; raise --max-loras"
        yield f"adapters.max_loras: {need} {_origin(settings, 'adapters.max_loras')}"


def _origin(settings: Mapping[str, Setting], *paths: str) -> str:
    return f"(from {' and '.join(settings[path].source for path in paths if path in settings)})"


# -- printing ------------------------------------------------------------------------------------


def render(resolved: Resolved) -> str:
    """The whole configuration as commented yaml that reads back to the same configuration, apart from secrets, which
    are masked. A key that a source has set names that source."""
    values = resolved.config.model_dump(mode="json")
    return "\n".join([_YAML_HEADER, *_section_lines(Config, values, "", resolved.sources)]).rstrip() + "\n"


def _section_lines(
    section: type[Section], values: Mapping[str, Any], prefix: str, sources: Mapping[str, str]
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, field in section.model_fields.items():
        path = prefix + name
        inner = section_of(field)
        yield from _comment((inner.__doc__ or "") if inner else KEYS[path].description, indent)
        if inner:
            yield f"{indent}{name}:"
            yield from _section_lines(inner, values[name], f"{path}.", sources)
            if not prefix:
                yield ""
        else:
            source = f"  # from {sources[path]}" if path in sources else ""
            yield f"{indent}{name}: {yaml_text(values[name])}{source}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
