"""Environments by name: built-in ones, files of tasks, those of other packages, and those of users."""

from __future__ import annotations

import inspect
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConfigError, shown
from mlx_parallm.extras_table import needed
from mlx_parallm.optional_packages import REASONING_GYM
from mlx_parallm.rl.environments.builtin import BUILT_IN
from mlx_parallm.rl.environments.files import FileTasks, find_tasks
from mlx_parallm.rl.environments.protocol import Environment, EpisodeEnvironment, RolloutClient, Task, is_of_episodes
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.own_functions import module_of_file
from mlx_parallm.rl.scoring.sample import ScorerError
from mlx_parallm.rl.scoring.scorers import REWARD

GROUP = "mlx_parallm.environments"
"""Entry points of a user's package: name = "module:object", an Environment or a class of one."""

_OF_FILE = ".py:"
_OTHER_FORMS = (
    f"{gym.PREFIX}<task>",
    "verifiers:<id>",
    "FILE.jsonl (such as gsm8k's train.jsonl)",
    "FILE.py:NAME",
)

_CHUNK = 50
"""Entries that are taken from one reasoning-gym data set before the next one is made. Few tasks have fewer."""


def environment(name: str, rewarded: bool = False) -> Environment:
    """The environment of this name: `reasoning_gym:<task>`, `verifiers:<id>`, a file of tasks, a data set of the
    Hugging Face hub, an entry point, a built-in one, or `FILE.py:NAME`. Importing it may take seconds.

    Args:
        rewarded: the operator's reward scores the tasks, whatever scorers they name.

    Raises:
        ConfigError: it is unknown, not installed, or cannot be loaded.
    """
    found = _environment(name, rewarded)
    if not rewarded:
        return found
    return _RewardedEpisodes(found) if is_of_episodes(found) else _Rewarded(found)


def _environment(name: str, rewarded: bool) -> Environment:
    if (prefix := _prefix_of(name)) is not None:
        return _LOADERS[prefix](name)
    if _OF_FILE in name:
        return _of_file(name)
    return find_tasks(name, rewarded) or _installed(name)()


def answers_of(name: str, rewarded: bool = False) -> FileTasks:
    """The tasks whose answers a server looks up: those of a file or of a data set of the Hugging Face hub.

    Any other environment has none, and is not loaded.

    Raises:
        ConfigError: it is unknown, or its file cannot be used.
    """
    if _prefix_of(name) is not None or _OF_FILE in name:
        return FileTasks()
    file = find_tasks(name, rewarded)
    if file is None:
        _installed(name)
    return file or FileTasks()


def _prefix_of(name: str) -> str | None:
    return next((prefix for prefix in _LOADERS if name.startswith(prefix)), None)


# ---- reasoning-gym -------------------------------------------------------------------------------


class ReasoningGym:
    """One reasoning-gym task with its default configuration: its question as the prompt, its own scoring."""

    def __init__(self, task: str) -> None:
        self._task = task

    def tasks(self, seed: int) -> Iterator[Task]:
        for chunk in itertools.count():
            # Entry i of a data set is made with the data set's seed + i, so nearby seeds would share entries.
            data = gym.dataset(self._task, seed=random.Random(f"{seed}/{chunk}").getrandbits(31))
            yield from map(self._from_entry, gym.entries(data, _CHUNK))

    def _from_entry(self, entry: dict[str, Any]) -> Task:
        plain = json.loads(json.dumps(entry, default=str))
        message = {"role": "user", "content": str(entry["question"])}
        return Task((message,), CollectionSpec(gym.PREFIX + self._task, {"entry": plain}))


def _reasoning_gym(name: str) -> Environment:
    if not REASONING_GYM.installed:
        raise ConfigError(f"environment: {REASONING_GYM.missing}")
    tasks = gym.task_names()
    task = name.removeprefix(gym.PREFIX)
    if task not in tasks:
        raise _unknown(name, [gym.PREFIX + known for known in tasks])
    return ReasoningGym(task)


def _verifiers(name: str) -> Environment:
    loaded: Environment = needed("verifiers", "environment").load(name)
    return loaded


_LOADERS: dict[str, Callable[[str], Environment]] = {gym.PREFIX: _reasoning_gym, "verifiers:": _verifiers}
"""What loads the environments whose names have a prefix."""


# ---- one object each -----------------------------------------------------------------------------


def _installed(name: str) -> Callable[[], Environment]:
    """What makes the environment of another package, or a built-in one."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name in points:
        return partial(_of_package, points[name])
    if name not in BUILT_IN:
        raise _unknown(
            name,
            [*points, *BUILT_IN, *_OTHER_FORMS],
            "; an environment of Atropos runs by itself and needs --atropos-url",
        )
    return BUILT_IN[name]


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


# ---- scored by the operator's reward -------------------------------------------------------------


class _Rewarded:
    """The tasks of another environment, scored by the operator's reward in place of their own scorers."""

    def __init__(self, source: Environment) -> None:
        self._source = source
        if callable(examples := getattr(source, "examples", None)):
            self.examples = examples  # for a warm-up

    def tasks(self, seed: int) -> Iterator[Task]:
        for task in self._source.tasks(seed):
            yield replace(task, collection=replace(task.collection, scorer=REWARD))


class _RewardedEpisodes(_Rewarded):
    """The rollouts of another environment. The operator's reward scores their last answers."""

    def __init__(self, source: EpisodeEnvironment) -> None:
        super().__init__(source)
        self._rollout = source.rollout

    async def rollout(self, client: RolloutClient, task: Task) -> None:
        await self._rollout(client, task)


# ---- system prompts ------------------------------------------------------------------------------


def read_system_prompt(text: str | None) -> str | None:
    """The value of `rl_training.system_prompt`, with the text of the file in place of `@FILE`.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    prompt = read_text("rl_training.system_prompt", text)
    return prompt.strip() if prompt is not None and prompt is not text else prompt


def read_text(setting: str, text: str | None) -> str | None:
    """The value of a setting, with the text of the file in place of `@FILE`.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if text is None or not text.startswith("@"):
        return text
    try:
        content = Path(text[1:]).expanduser().read_text("utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{setting}: {text[1:]} cannot be read: {error}") from error
    if not content.strip():
        raise ConfigError(f"{setting}: {text[1:]} is empty")
    return content
