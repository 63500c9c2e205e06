"""Rollouts without clients: tasks of an environment, answered by the adapter in training."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast

from mlx_parallm.core import (
    AdapterClient,
    CollectionSpec,
    Event,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextTokenizer,
    WorkClass,
)
from mlx_parallm.errors import ConfigError, EngineDeadError, EngineError, TrainingFailedError, shown
from mlx_parallm.extras import REASONING_GYM
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.reward import REWARD
from mlx_parallm.rl.tasks import FileTask, FileTasks, find_tasks

# ---- environments --------------------------------------------------------------------------------

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
        raise _unknown(name, [*points, gym.PREFIX + "<task>", "FILE.jsonl (such as gsm8k's train.jsonl)"])
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


def _unknown(name: str, known: list[str]) -> ConfigError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}"
    return ConfigError(f"environment: {shown(name)} is unknown: {hint}")


# ---- system prompt -------------------------------------------------------------------------------


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


# ---- rollouts ------------------------------------------------------------------------------------

Generate = Callable[[GenerationRequest], AsyncIterator[Event]]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How rollouts are drawn: `group_size` samples for each task, of at most `max_tokens` tokens, at `temperature`.

    `system_prompt`: the system message of tasks that have none of their own; None: they get none.
    `seed`: all samples get their seeds from it. `run`: part of the trajectories' ids. `taken`: tasks that were taken in
    an earlier process; ids and seeds continue after them.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    system_prompt: str | None = None
    seed: int = 0
    run: str = "0"
    taken: int = 0


@dataclass(frozen=True, slots=True)
class DrawResult:
    """What was drawn. `tokens`: completion tokens. `failures`: for people, one line for each task that failed."""

    tokens: int
    failures: tuple[str, ...]


class Rollouts:
    """Draws groups of trajectories. Event loop's thread only.

    Args:
        generate: answers a request, and collects its trajectories.
        tasks: endless; starts after the tasks that were taken before.
        on_drawn: called with the number of trajectories that have just finished.

    Attributes:
        taken: tasks taken so far, `settings.taken` included.
    """

    def __init__(
        self,
        generate: Generate,
        adapters: AdapterClient,
        tokenizer: TextTokenizer,
        tasks: Iterator[Task],
        settings: RolloutSettings,
        on_drawn: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.taken = settings.taken
        self._generate = generate
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._settings = settings
        self._on_drawn = on_drawn

    async def draw(self, groups: int, selector: str) -> DrawResult:
        """Answers the next `groups` tasks with the current version of `selector`. A failing task does not stop others.

        Raises:
            EngineDeadError: the device thread has stopped.
            TrainingFailedError: there is no next task.
        """
        tasks = await asyncio.to_thread(self._take, groups)
        first, self.taken = self.taken, self.taken + groups
        answers = [self._answer(number, task, selector) for number, task in enumerate(tasks, first)]
        results = await asyncio.gather(*answers, return_exceptions=True)
        for result in results:
            if isinstance(result, EngineDeadError) or not isinstance(result, int | Exception):
                raise result
        failures = [f"task {number}: {_text(r)}" for number, r in enumerate(results, first) if not _is_count(r)]
        return DrawResult(sum(filter(_is_count, results)), tuple(failures))

    def _take(self, groups: int) -> list[Task | Exception]:
        """The next tasks; an exception of the environment takes the place of a task."""
        taken: list[Task | Exception] = []
        while len(taken) < groups:
            try:
                taken.append(next(self._tasks))
            except StopIteration:
                last = taken[-1] if taken else None
                why = f" after it raised: {_text(last)}" if isinstance(last, Exception) else ""
                raise TrainingFailedError(f"the environment has no more tasks{why}") from None
            except Exception as error:  # noqa: BLE001 - a user's environment may raise anything: this task fails
                taken.append(error)
        return taken

    async def _answer(self, number: int, task: Task | Exception, selector: str) -> int:
        """Returns the number of tokens drawn. Raises what the task fails with."""
        if isinstance(task, Exception):
            raise task
        settings = self._settings
        messages = with_system_prompt(task, settings.system_prompt)
        with self._adapters.lease(selector) as adapter:
            request = GenerationRequest(
                request_id=f"rollout-{settings.run}-{number}",
                prompts=(tuple(self._tokenizer.apply_chat_template(messages)),),
                # Sample j of a group is drawn with seed + j.
                sampling=SamplingParams(
                    temperature=settings.temperature, seed=settings.seed * 2**32 + number * settings.group_size
                ),
                stopping=StopParams(settings.max_tokens),
                n=settings.group_size,
                adapter=adapter,
                work_class=WorkClass.TRAINING,
                collection=replace(task.collection, messages=messages),
            )
            tokens = 0
            async for event in events_of(self._generate(request)):
                if isinstance(event, RequestFinished):
                    tokens = event.completion_tokens
        self._on_drawn(settings.group_size)
        return tokens


async def events_of(events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """The events of a request; the last one is RequestFinished.

    Raises:
        Exception: the error of a RequestFailed; EngineError if there is no terminal event.
    """
    async with aclosing(cast(AsyncGenerator[Event, None], events)):  # `core` promises aclose()
        async for event in events:
            if isinstance(event, RequestFailed):
                raise event.error
            yield event
            if isinstance(event, RequestFinished):
                return
    raise EngineError("the engine ended a request without a terminal event")


def _is_count(result: int | BaseException) -> TypeGuard[int]:
    return isinstance(result, int)


def _text(error: object) -> str:
    return str(error) or type(error).__name__
