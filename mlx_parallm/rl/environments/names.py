"""Environments by name: built-in ones, files of tasks, those of other packages, and those of users."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError, shown
from mlx_parallm.extras import REASONING_GYM
from mlx_parallm.rl.environments import verifiers
from mlx_parallm.rl.environments.calculator import Calculator
from mlx_parallm.rl.environments.hints import Hints
from mlx_parallm.rl.environments.protocol import Environment
from mlx_parallm.rl.environments.sources import ReasoningGym, TasksOfFile, rewarded_tasks
from mlx_parallm.rl.environments.words import Words
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.functions import module_of_file
from mlx_parallm.rl.scoring.sample import ScorerError
from mlx_parallm.rl.tasks import FileTasks, find_tasks

GROUP = "mlx_parallm.environments"
"""Entry points of a user's package: name = "module:object", an Environment or a class of one."""

_BUILT_IN: Mapping[str, Callable[[], Environment]] = {"words": Words, "hints": Hints, "calculator": Calculator}
_OF_FILE = ".py:"
_OTHER_FORMS = (
    f"{gym.PREFIX}<task>",
    f"{verifiers.PREFIX}<id>",
    "FILE.jsonl (such as gsm8k's train.jsonl)",
    "FILE.py:NAME",
)


def environment(name: str, rewarded: bool = False) -> Environment:
    """The environment of this name: `reasoning_gym:<task>`, `verifiers:<id>`, a file of tasks, a data set of the
    Hugging Face hub, an entry point, a built-in one, or `FILE.py:NAME`. Importing it may take seconds.

    Args:
        rewarded: the configured reward scores the tasks, whatever scorers they name.

    Raises:
        ConfigError: it is unknown, not installed, or cannot be loaded.
    """
    found = _environment(name, rewarded)
    return rewarded_tasks(found) if rewarded else found


def _environment(name: str, rewarded: bool) -> Environment:
    if name.startswith(gym.PREFIX):
        return _reasoning_gym(name)
    if name.startswith(verifiers.PREFIX):
        return verifiers.load(name)
    if _OF_FILE in name:
        return _of_file(name)
    file = find_tasks(name, rewarded)
    return _installed(name)() if file is None else TasksOfFile(file)


def answers_of(name: str, rewarded: bool = False) -> FileTasks:
    """The tasks whose answers a server looks up: those of a file or of a data set of the Hugging Face hub.

    Any other environment has none, and is not loaded.

    Raises:
        ConfigError: it is unknown, or its file cannot be used.
    """
    if name.startswith((gym.PREFIX, verifiers.PREFIX)) or _OF_FILE in name:
        return FileTasks()
    file = find_tasks(name, rewarded)
    if file is None:
        _installed(name)
    return file or FileTasks()


# ---- one object each -----------------------------------------------------------------------------


def _installed(name: str) -> Callable[[], Environment]:
    """What makes the environment of another package, or a built-in one."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name in points:
        return partial(_of_package, points[name])
    if name not in _BUILT_IN:
        raise _unknown(
            name,
            [*points, *_BUILT_IN, *_OTHER_FORMS],
            "; an environment of Atropos runs by itself and needs --atropos-url",
        )
    return _BUILT_IN[name]


def _reasoning_gym(name: str) -> Environment:
    if not REASONING_GYM.installed:
        raise ConfigError(f"environment: {REASONING_GYM.missing}")
    tasks = gym.task_names()
    task = name.removeprefix(gym.PREFIX)
    if task not in tasks:
        raise _unknown(name, [gym.PREFIX + known for known in tasks])
    return ReasoningGym(task)


def _of_package(point: EntryPoint) -> Environment:
    named = f"{point.name} ({point.value})"
    try:
        found = point.load()
    except Exception as error:  # a user's package may raise anything
        raise ConfigError(f"environment: {named} cannot be loaded: {error}") from error
    return _made(found, named)


def _of_file(reference: str) -> Environment:
    source, _, name = reference.rpartition(":")
    file = Path(source).expanduser().absolute()
    try:
        module = module_of_file(file)
    except ScorerError as error:
        raise ConfigError(f"environment: {reference} cannot be loaded: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"environment: {file.name} has no {shown(name)}; name a class or an object of it")
    return _made(getattr(module, name), reference)


def _made(found: Any, named: str) -> Environment:
    """The environment that a name means: an object or a class of one."""
    try:
        made: Environment = found() if isinstance(found, type) else found
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"environment: {named} cannot be loaded: {error}") from error
    if not callable(getattr(made, "tasks", None)):
        raise ConfigError(f"environment: {named} has no method tasks(seed)")
    rollout = getattr(made, "rollout", None)
    if rollout is not None and not inspect.iscoroutinefunction(rollout):
        raise ConfigError(f"environment: {named}: rollout must be a method `async def rollout(self, client, task)`")
    return made


def _unknown(name: str, known: list[str], more: str = "") -> ConfigError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}{more}"
    return ConfigError(f"environment: {shown(name)} is unknown: {hint}")
