"""ScorerCatalogue: which scorers there are, and whether a request's metadata has what they read.

A scorer that is not built in is described once, by a child process. This process runs no scorer's code.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property, partial
from importlib.metadata import entry_points
from typing import NamedTuple, NoReturn

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConfigError, InvalidRequestError, shown
from mlx_parallm.optional_packages import REASONING_GYM, Extra
from mlx_parallm.processes import command, environment, stdin_until_exit
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.builtin import BUILTINS
from mlx_parallm.rl.scoring.sample import Metadata, present, unusable
from mlx_parallm.rl.scoring.scorers import GROUP, REWARD, REWARD_MODEL, RewardSpec, scorers_of

_DESCRIBE_S = 120.0

ReadMetadata = Callable[[Metadata], object]
"""Reads one key of `metadata`. Raises InvalidRequestError: it is missing, or cannot be used."""


def no_reward_model(name: str) -> NoReturn:
    """Refuses all reward models, where answers are scored without the device."""
    raise InvalidRequestError("reward models score in a server or a run that trains, and not here")


class _Description(NamedTuple):
    """What a child process says of one scorer; see `worker`."""

    requires: tuple[str, ...]
    tasks: tuple[str, ...]
    problem: str


class ScorerCatalogue:
    """Which scorers there are, and the metadata that they read.

    A child process is asked once for each name that is not built in, which takes seconds. Only one thread at a time
    may call a check that has to ask. The same holds for reward models, which are looked for on the disk once.

    Args:
        check_reward_model: raises InvalidRequestError if there is no reward model of a name, without the prefix.
    """

    def __init__(
        self, reward: RewardSpec | None = None, check_reward_model: Callable[[str], None] = no_reward_model
    ) -> None:
        self._reward = reward
        self._check_reward_model = check_reward_model
        self._reward_models: set[str] = set()
        self._descriptions: dict[str, _Description] = {}
        self._tasks: tuple[str, ...] = ()

    def scorers(self, collection: CollectionSpec) -> list[str]:
        """The scorers that the collection names. `reward` stands for itself and for those in it that requests could
        name too."""
        names = scorers_of(collection)
        return [*names, *self._reward.scorers] if self._reward is not None and REWARD in names else names

    def check(self, collection: CollectionSpec) -> None:
        """Checks everything in this process. Use it for what the operator gives: a client could make it slow.

        Raises:
            InvalidRequestError: the scorer is unknown or cannot be used, or `metadata` lacks what it reads.
        """
        self.check_bounds(collection)
        for name in self.scorers(collection):
            if name in BUILTINS and (read := BUILTINS[name].read) is not None:
                read(collection.metadata)

    def check_bounds(self, collection: CollectionSpec) -> None:
        """The same without `Builtin.read`, which a client can make slow."""
        for name in self.scorers(collection):
            for read in self._readers(name):
                read(collection.metadata)

    def must_ask(self, collection: CollectionSpec) -> bool:
        """Whether a check may have to wait for a child process."""
        known = {REWARD, *BUILTINS, *self._descriptions, *self._reward_models}
        return not known.issuperset(self.scorers(collection))

    def check_reward(self, prefix: str = "") -> None:
        """Checks the terms of the operator's reward whose names begin with `prefix`, and loads functions once, which
        takes seconds.

        Raises:
            ConfigError: a term is unknown, or cannot be used.
        """
        if self._reward is None:
            return
        try:
            for name in self._reward.scorers:
                if name.startswith(prefix):
                    self._readers(name)
            for function in self._reward.functions:
                if function.startswith(prefix):
                    self._usable(function)
        except InvalidRequestError as error:  # names the setting in place of the request's field
            raise ConfigError(f"reward: {str(error).partition(': ')[2]}") from error

    def _readers(self, name: str) -> Sequence[ReadMetadata]:
        """What reads the metadata for a scorer, in no time.

        Raises:
            InvalidRequestError: there is no such scorer, or it cannot be used.
        """
        if (builtin := BUILTINS.get(name)) is not None:
            if builtin.needs is not None:
                _require(builtin.needs)
            return (builtin.bound,)
        if name.startswith(gym.PREFIX):
            self._check_task(name)
            return (gym.entry,)
        if name.startswith(REWARD_MODEL):
            self._find_reward_model(name)
            return ()
        if name == REWARD:
            if self._reward is None:
                raise unusable("no reward is configured; the operator sets one with --reward (rl_training.reward)")
            return ()
        if name not in self._packages:
            raise _unknown(name, [*BUILTINS, *self._packages, gym.PREFIX + "<task>", REWARD_MODEL + "<name>"])
        return [partial(present, key=key) for key in self._usable(name).requires]

    def _find_reward_model(self, name: str) -> None:
        """Looks for a reward model, once."""
        if name in self._reward_models:
            return
        try:
            self._check_reward_model(name.removeprefix(REWARD_MODEL))
        except InvalidRequestError as error:
            raise unusable(f"{name} cannot be used: {error}") from error
        self._reward_models.add(name)

    @cached_property
    def _packages(self) -> frozenset[str]:
        return frozenset(entry_points(group=GROUP).names)

    def _check_task(self, name: str) -> None:
        _require(REASONING_GYM)
        if not self._tasks:
            self._tasks = self._described(name).tasks
        known = [gym.PREFIX + task for task in self._tasks]
        if known and name not in known:
            raise _unknown(name, known)
        self._usable(name)

    def _usable(self, name: str) -> _Description:
        description = self._described(name)
        if description.problem:
            raise unusable(f"{name} cannot be used: {description.problem}")
        return description

    def _described(self, name: str) -> _Description:
        """What a child process says of this scorer. Raises InvalidRequestError: the child failed, which is not
        remembered."""
        if name not in self._descriptions:
            try:
                self._descriptions[name] = _describe(name)
            except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
                raise unusable(f"{name} could not be loaded; the server's log may say why") from error
        return self._descriptions[name]


def _describe(name: str) -> _Description:
    with stdin_until_exit() as stdin:
        done = subprocess.run(
            command("mlx_parallm.rl.scoring.worker", name),
            env=environment(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            timeout=_DESCRIBE_S,
            check=True,
            start_new_session=True,
        )
    reply: Mapping[str, Sequence[str]] = json.loads(done.stdout)
    return _Description(tuple(reply["requires"]), tuple(reply["tasks"]), str(reply["problem"]))


def _require(extra: Extra) -> None:
    """Raises InvalidRequestError: the package is not installed."""
    if not extra.installed:
        raise unusable(extra.missing)


def _unknown(name: str, known: list[str]) -> InvalidRequestError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}"
    return unusable(f"{shown(name)} is unknown: {hint}")
