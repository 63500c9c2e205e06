"""Environments: where the tasks of rollouts come from, and the system prompt that all of them get."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.core import CollectionSpec
from mlx_parallm.errors import ConfigError, shown
from mlx_parallm.extras import REASONING_GYM
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.reward import REWARD
from mlx_parallm.rl.tasks import FileTask, FileTasks, find_tasks

GROUP = "mlx_parallm.environments"
"""Entry points of a user's package: name = "module:object", an Environment or a class of one."""

_CHUNK = 50
"""Entries that are taken from one reasoning-gym data set before the next one is made. Few tasks have fewer."""


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation to be continued (dicts with `role` and `content`), and how the answers are scored."""

    messages: tuple[Mapping[str, Any], ...]
    collection: CollectionSpec


class Environment(Protocol):
    def tasks(self, seed: int) -> Iterator[Task]:
        """An endless stream of tasks: the same for the same seed, and different for other seeds if possible."""
        ...


class ReasoningGym:
    """One reasoning-gym task with its default configuration: its question as the prompt, its own scoring."""

    def __init__(self, task: str) -> None:
        self._task = task

    def tasks(self, seed: int) -> Iterator[Task]:
        for chunk in itertools.count():
            # Entry i of a data set is drawn with the data set's seed + i, so nearby seeds would share entries.
            data = gym.dataset(self._task, seed=random.Random(f"{seed}/{chunk}").getrandbits(31))
            yield from map(self._from_entry, gym.entries(data, _CHUNK))

    def _from_entry(self, entry: dict[str, Any]) -> Task:
        plain = json.loads(json.dumps(entry, default=str))
        message = {"role": "user", "content": str(entry["question"])}
        return Task((message,), CollectionSpec(gym.PREFIX + self._task, {"entry": plain}))


class TasksOfFile:
    """The tasks of a file, each once before any comes again, in an order that depends on the seed."""

    def __init__(self, file: FileTasks) -> None:
        self._file = file

    def tasks(self, seed: int) -> Iterator[Task]:
        for epoch in itertools.count():
            order = random.Random(f"{seed}/{epoch}").sample(self._file.tasks, len(self._file.tasks))
            yield from map(_from_line, order)


def _from_line(task: FileTask) -> Task:
    text = task.prompt if isinstance(task.prompt, str) else ""
    return Task(task.messages, CollectionSpec(task.scorer, task.metadata, prompt_text=text))


class Rewarded:
    """The tasks of another environment, scored by the configured reward."""

    def __init__(self, source: Environment) -> None:
        self._source = source

    def tasks(self, seed: int) -> Iterator[Task]:
        return map(_rewarded, self._source.tasks(seed))


def _rewarded(task: Task) -> Task:
    return replace(task, collection=replace(task.collection, scorer=REWARD))


def environment(name: str, rewarded: bool = False) -> Environment:
    """The environment of this name: `reasoning_gym:<task>`, a file of tasks, a data set of the Hugging Face hub, or an
    entry point. Importing reasoning-gym may take seconds.

    Args:
        rewarded: the configured reward scores the tasks, whatever scorers they name.

    Raises:
        ConfigError: it is unknown, not installed, or cannot be loaded.
    """
    found = _environment(name, rewarded)
    return Rewarded(found) if rewarded else found


def _environment(name: str, rewarded: bool) -> Environment:
    if name.startswith(gym.PREFIX):
        return _reasoning_gym(name)
    file = find_tasks(name, rewarded)
    return _loaded(_entry_point(name)) if file is None else TasksOfFile(file)


def answers_of(name: str, rewarded: bool = False) -> FileTasks:
    """The tasks whose answers a server looks up: those of a file or of a data set of the Hugging Face hub.

    Any other environment has none, and is not loaded.

    Raises:
        ConfigError: it is unknown, or its file cannot be used.
    """
    if name.startswith(gym.PREFIX):
        return FileTasks()
    file = find_tasks(name, rewarded)
    if file is None:
        _entry_point(name)
    return file or FileTasks()


def _entry_point(name: str) -> EntryPoint:
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise _unknown(
            name,
            [*points, gym.PREFIX + "<task>", "FILE.jsonl (such as gsm8k's train.jsonl)"],
            "; an environment of Atropos runs by itself and needs --atropos-url",
        )
    return points[name]


def _reasoning_gym(name: str) -> Environment:
    if not REASONING_GYM.installed:
        raise ConfigError(f"environment: {REASONING_GYM.missing}")
    tasks = gym.task_names()
    task = name.removeprefix(gym.PREFIX)
    if task not in tasks:
        raise _unknown(name, [gym.PREFIX + known for known in tasks])
    return ReasoningGym(task)


def _loaded(point: EntryPoint) -> Environment:
    try:
        found = point.load()
        made: Environment = found() if isinstance(found, type) else found
    except Exception as error:  # a user's package may raise anything
        raise ConfigError(f"environment: {point.name} ({point.value}) cannot be loaded: {error}") from error
    if not callable(getattr(made, "tasks", None)):
        raise ConfigError(f"environment: {point.name} ({point.value}) has no method tasks(seed)")
    return made


def _unknown(name: str, known: list[str], more: str = "") -> ConfigError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}{more}"
    return ConfigError(f"environment: {shown(name)} is unknown: {hint}")


def read_system_prompt(text: str | None) -> str | None:
    """The value of `rl_training.system_prompt`, with the text of the file in place of `@FILE`.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if text is None or not text.startswith("@"):
        return text
    try:
        prompt = Path(text[1:]).expanduser().read_text("utf-8").strip()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"rl_training.system_prompt: {text[1:]} cannot be read: {error}") from error
    if not prompt:
        raise ConfigError(f"rl_training.system_prompt: {text[1:]} is empty")
    return prompt


def with_system_prompt(task: Task, system_prompt: str | None) -> tuple[Mapping[str, str], ...]:
    """The messages of the task, after the system prompt if they have no system message of their own."""
    if system_prompt is None or any(message["role"] == "system" for message in task.messages):
        return task.messages
    return ({"role": "system", "content": system_prompt}, *task.messages)
