"""Verifiers: an environment of the package verifiers as one of ours."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf

from mlx_parallm.core import CollectionSpec
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments.protocol import Message, RolloutClient, RolloutError, Task
from mlx_parallm.rl.environments.verifiers.policy import CLIENT, MODEL, Policy, PolicyInterception, text_of
from mlx_parallm.rl.environments.verifiers.settings import Settings, named, read_settings

_log = logging.getLogger(__name__)

_NOISY = ("verifiers", "aiohttp.access", "httpx", "httpx2")
"""Loggers with lines for each rollout or request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersTask(Task):
    """`source`: verifiers' task."""

    source: Any


class Verifiers:
    """Plays the tasks of an environment of verifiers, which rewards its own episodes.

    Args:
        environment_id: of a taskset of verifiers.

    Raises:
        ConfigError: it is unknown, cannot be loaded, has no tasks, or needs something that is not given here.
    """

    def __init__(self, environment_id: str) -> None:
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._id = environment_id
        self._settings = read_settings(environment_id)
        self._context = vf.ModelContext(model=MODEL, client=CLIENT)
        self._serving = _Serving(self._settings)
        try:
            self._taskset = self._settings.load().taskset
            self._known = [*(self._taskset if self._taskset.bounded else itertools.islice(self._taskset, 1))]
        except Exception as error:  # a user's environment may raise anything
            raise ConfigError(f"environment: {named(environment_id)} cannot be loaded: {error}") from error
        if not self._known:
            raise ConfigError(f"environment: {named(environment_id)} has no tasks")
        for task in self._known:
            if needs := _what_is_missing(task):
                raise ConfigError(f"environment: {named(environment_id)}: task {task.data.idx} needs {needs}")

    def tasks(self, seed: int) -> Iterator[Task]:
        """The tasks of a finite taskset, each once before any comes again, in an order that depends on the seed; those
        of an endless one in its own order."""
        if not self._taskset.bounded:
            yield from map(self._task, self._taskset)
            return
        for epoch in itertools.count():
            order = random.Random(f"{seed}/{epoch}").sample(self._known, len(self._known))
            yield from map(self._task, order)

    async def rollout(self, client: RolloutClient, task: Task) -> float | None:
        """The episode's reward by the rubric of the task; None if the task has none.

        Raises:
            RolloutError: the episode failed.
            Exception: the last error of the client, if the episode failed with it.
        """
        assert isinstance(task, VerifiersTask)
        environment, policy = await self._serving.environment(), Policy(client)
        with policy.playing():
            episode = await environment.run_episode(_with_system_prompt(task), self._context)
        if not episode.ok:
            raise policy.fault or RolloutError(_fault(episode))
        played = [trace for trace in episode.traces if trace.agent.name == self._settings.agent]
        if len(played) != 1:
            raise RolloutError(
                f"{named(self._id)} ran its agent {len(played)} times in one episode; it must be once, because an "
                "episode has one reward"
            )
        return float(played[0].reward) if any(each is not None for each in played[0].rewards.values()) else None

    def _task(self, source: Any) -> VerifiersTask:
        collection = CollectionSpec(metadata={"environment": named(self._id), "task": source.data.idx})
        return VerifiersTask(_messages(source), collection, source=source)


class _Serving:
    """What all episodes of an environment share while it is served: its tools, and verifiers' interception servers.

    They belong to one event loop, and end with it. A later loop gets others.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._holding: asyncio.Task[None] | None = None

    async def environment(self) -> Any:
        """The environment that is served on the running loop. Raises what its start raises; the next call tries
        again."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._ready is None:
            self._loop, self._ready = loop, loop.create_future()
            self._holding = loop.create_task(self._hold(self._ready))
        return await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Serves until the loop ends, which cancels its tasks."""
        try:
            environment = self._settings.load()
            async with environment.serving():
                environment._interception = PolicyInterception(environment._interception)
                ready.set_result(environment)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything
            if ready.done():
                _log.warning("environment: %s", error)
            else:
                ready.set_exception(error)
            self._ready = None


def _messages(source: Any) -> tuple[Message, ...]:
    """What the first prompt is made of. Empty if the environment opens the conversation."""
    data = source.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return (*system, {"role": "user", "content": data.prompt})
    return (*system, *({"role": each.role, "content": text_of(each.content)} for each in data.prompt or ()))


def _with_system_prompt(task: VerifiersTask) -> Any:
    """verifiers' task, with the system prompt of the run if that was put before its messages."""
    if len(task.messages) > len(_messages(task.source)):
        return task.source.with_system_prompt(task.messages[0]["content"])
    return task.source


def _what_is_missing(task: Any) -> str:
    """What a task needs that is not given here, in words; empty if it can be played."""
    data = task.data
    if data.image is not None or task.NEEDS_CONTAINER:
        return (
            f"a container{'' if data.image is None else f' of the image {data.image}'}; containers are not given here"
        )
    if data.skills:
        return "skills, which its harness does not support here"
    if "*" not in data.network_allow or data.network_block:
        return "limits on the network, which are not enforced here"
    try:
        _messages(task)
    except NotImplementedError:
        return "images; only text is supported"
    return ""


def _fault(episode: Any) -> str:
    """Why an episode failed, in one line."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed without an error"
