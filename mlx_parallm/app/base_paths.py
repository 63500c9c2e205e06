"""Which base models a process serves, and for which of them an adapter was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.adapters.files import read_config
from mlx_parallm.adapters.formats import CONFIG_FILE
from mlx_parallm.config import Config
from mlx_parallm.errors import AdapterFileError, ConfigError
from mlx_parallm.model.loading import name_of

_BASE_KEYS = ("base_model_name_or_path", "model")
"""Keys of an adapter_config.json that name its base model: PEFT's and mlx-lm's."""


@dataclass(frozen=True, slots=True)
class BasePath:
    """A base model before it is loaded. `path`: a directory or a hub id; None for the bundled model."""

    path: str | None
    name: str


def base_paths(config: Config) -> tuple[BasePath, ...]:
    """The base models in the order of the configuration.

    Raises:
        ConfigError: two of them have the same name.
    """
    model = config.model
    given = (model.base_model_path, *model.other_base_models)
    bases = [BasePath(path, name_of(path)) for each in given for path in _models_of(each)]
    if config.server.served_model_name:
        bases[0] = BasePath(bases[0].path, config.server.served_model_name[0])
    names = [*(base.name for base in bases), *config.server.served_model_name[1:]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"--model-path: two base models are called {twice[0]!r}; rename a folder, or name the first with "
            "--served-model-name"
        )
    return tuple(bases)


def _models_of(path: str | None) -> Iterator[str | None]:
    folder = None if path is None else Path(path).expanduser()
    models: list[str] = []
    if folder is not None and folder.is_dir() and not (folder / "config.json").exists():
        models = sorted(str(sub) for sub in folder.iterdir() if (sub / "config.json").exists())
    yield from models or (path,)  # loading the path reports what is wrong with it


def base_of_adapter(folder: Path, bases: tuple[BasePath, ...]) -> str:
    """The name of the base model for which the adapter in `folder` was made: the first one that its files may mean, or
    the first of all if they name none of `bases`. Blocks on the disk."""
    return next(iter(bases_of_adapter(folder, bases)), bases[0].name)


def bases_of_adapter(folder: Path, bases: tuple[BasePath, ...]) -> tuple[str, ...]:
    """The names of the base models for which the adapter in `folder` may have been made, as its adapter_config.json
    says. Several only if the last part of a path is all that fits. Blocks on the disk."""
    if len(bases) == 1:
        return (bases[0].name,)
    try:
        settings = read_config(folder, None) if (folder / CONFIG_FILE).is_file() else {}
    except AdapterFileError:
        settings = {}  # loading the adapter reports what is wrong with it
    declared = next((settings[key] for key in _BASE_KEYS if isinstance(settings.get(key), str)), "")
    exactly = tuple(base.name for base in bases if declared in (base.name, base.path))
    last = Path(declared).name
    ends = {base.name: {Path(base.name).name, Path(base.path or base.name).name} for base in bases}
    return exactly[:1] or tuple(name for name, parts in ends.items() if last and last in parts)
