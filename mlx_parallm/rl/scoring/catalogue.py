"""Which scorers there are, and what each reads: ScorerCatalogue, and questions about a collection's scorer.

A scorer that is not built in is described once, by a child process. This process runs no scorer's code.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from mlx_parallm.core import CollectionSpec
from mlx_parallm.errors import ConfigError, InvalidRequestError, shown
from mlx_parallm.extras import REASONING_GYM, Extra
from mlx_parallm.processes import command, environment, stdin_until_exit
from mlx_parallm.rl.scoring import gym, reward_models, sample
from mlx_parallm.rl.scoring.registry import BUILTINS, GROUP, PARAM, Builtin, terms
from mlx_parallm.rl.scoring.reward import REWARD, RewardSpec

_DESCRIBE_S = 120.0

ANSWER = "answer"
"""The key of `metadata` for the right answer."""


CheckRewardModel = Callable[[str], None]
"""Checks that there is a reward model of this name; see `RewardModelScorers.check`."""

no_reward_model: CheckRewardModel = reward_models.NoRewardModels().check


class _Description(NamedTuple):
    """What a child process says of one scorer; see `worker`."""

    requires: tuple[str, ...]
    tasks: tuple[str, ...]
    problem: str


class ScorerCatalogue:
    """Which scorers there are, and the metadata that they read.

    A child process is asked once for each name that is not built in, which takes seconds. Only one thread at a time
    may call a check that has to ask. The same holds for reward models, which are looked for on the disk once.
    """

    def __init__(
        self, reward: RewardSpec | None = None, check_reward_model: CheckRewardModel = no_reward_model
    ) -> None:
        self._reward = reward
        self._check_reward_model = check_reward_model
        self._reward_models: set[str] = set()
        self._descriptions: dict[str, _Description] = {}
        self._tasks: tuple[str, ...] = ()

    def check(self, collection: CollectionSpec) -> None:
        """Checks everything in this process. Use it for what the operator gives: a client could make it slow.

        Raises:
            InvalidRequestError: the scorer is unknown or cannot be used, or `metadata` lacks what it reads.
        """
        self.check_bounds(collection)
        for _, builtin in self.builtins(collection):
            if builtin.read is not None:
                builtin.read(collection.metadata)

    def check_bounds(self, collection: CollectionSpec) -> None:
        """The same without `Builtin.read`, which a client can make slow."""
        for name in self._all_names(collection):
            self._check_usable(name)
            self._check_metadata(name, collection.metadata)

    def must_ask(self, collection: CollectionSpec) -> bool:
        """Whether a check may have to wait for a child process."""
        known = {REWARD, *BUILTINS, *self._descriptions, *self._reward_models}
        return any(name not in known for name in self._all_names(collection))

    def builtins(self, collection: CollectionSpec) -> list[tuple[str, Builtin]]:
        """The built-in scorers of the collection, those of the configured reward included if it names that."""
        return [(name, BUILTINS[name]) for name in self._all_names(collection) if name in BUILTINS]

    def reward_models(self, collection: CollectionSpec) -> list[str]:
        """The reward models that score the collection, those of the configured reward included if it names that."""
        return [name for name in self._all_names(collection) if name.startswith(reward_models.PREFIX)]

    def check_reward(self) -> None:
        """Checks every term of the configured reward, and loads its functions once. It may take seconds.

        Raises:
            ConfigError: a term is unknown, or cannot be used.
        """
        if self._reward is None:
            return
        try:
            for name in self._reward.scorers:
                self._check_usable(name)
            for function in self._reward.functions:
                self._usable(function)
        except InvalidRequestError as error:
            raise _of_reward(error) from error

    def check_reward_models(self) -> None:
        """Checks those of the configured reward, with the base model that is loaded now. Raises ConfigError: one cannot
        be used."""
        try:
            for name in self._reward.scorers if self._reward is not None else ():
                if name.startswith(reward_models.PREFIX):
                    self._find_reward_model(name)
        except InvalidRequestError as error:
            raise _of_reward(error) from error

    def _check_usable(self, name: str) -> None:
        """Raises InvalidRequestError: there is no such scorer, or it cannot be loaded."""
        if (builtin := BUILTINS.get(name)) is not None:
            if builtin.needs is not None:
                _require(builtin.needs)
        elif name.startswith(gym.PREFIX):
            self._check_task(name)
        elif name.startswith(reward_models.PREFIX):
            self._find_reward_model(name)
        elif name == REWARD:
            self._require_reward()
        elif name in self._packages:
            self._usable(name)
        else:
            raise _unknown(name, [*BUILTINS, *self._packages, gym.PREFIX + "<task>", reward_models.PREFIX + "<name>"])

    def _check_metadata(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError: the metadata lacks what a scorer that can be used reads."""
        if (builtin := BUILTINS.get(name)) is not None:
            builtin.bound(metadata)
        elif name.startswith(gym.PREFIX):
            sample.entry(metadata)
        elif name != REWARD and not name.startswith(reward_models.PREFIX):
            for key in self._usable(name).requires:
                sample.present(metadata, key)

    def _all_names(self, collection: CollectionSpec) -> list[str]:
        """The scorers that the collection names. `reward` stands for itself and for those in it that have metadata to
        read."""
        names = _names(collection)
        return [*names, *self._reward.scorers] if self._reward is not None and REWARD in names else names

    def _require_reward(self) -> None:
        if self._reward is None:
            raise InvalidRequestError(
                f"{PARAM}: no reward is configured; the operator sets one with --reward (rl_training.reward)", PARAM
            )

    def _find_reward_model(self, name: str) -> None:
        """Looks for a reward model, once."""
        if name in self._reward_models:
            return
        try:
            self._check_reward_model(name.removeprefix(reward_models.PREFIX))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{PARAM}: {name} cannot be used: {error}", PARAM) from error
        self._reward_models.add(name)

    @cached_property
    def _packages(self) -> frozenset[str]:
        return frozenset(entry_points(group=GROUP).names)

    def _check_task(self, name: str) -> None:
        _require(REASONING_GYM)
        if not self._tasks:
            self._tasks = self._describe(name).tasks
        known = [gym.PREFIX + task for task in self._tasks]
        if known and name not in known:
            raise _unknown(name, known)
        self._usable(name)

    def _usable(self, name: str) -> _Description:
        description = self._describe(name)
        if description.problem:
            raise InvalidRequestError(f"{PARAM}: {name} cannot be used: {description.problem}", PARAM)
        return description

    def _describe(self, name: str) -> _Description:
        """What a child process says of this scorer.

        Raises:
            InvalidRequestError: the child process failed. That is not remembered.
        """
        if name not in self._descriptions:
            try:
                reply = _worker_description(name)
                description = _Description(tuple(reply["requires"]), tuple(reply["tasks"]), str(reply["problem"]))
            except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
                raise InvalidRequestError(
                    f"{PARAM}: {name} could not be loaded; the server's log may say why", PARAM
                ) from error
            self._descriptions[name] = description
        return self._descriptions[name]


def _worker_description(name: str) -> Mapping[str, Any]:
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
    reply: Mapping[str, Any] = json.loads(done.stdout)
    return reply


def _of_reward(error: InvalidRequestError) -> ConfigError:
    """The error with the name of the setting in place of the request's field."""
    return ConfigError(f"reward: {str(error).partition(': ')[2]}")


def _require(extra: Extra) -> None:
    """Raises InvalidRequestError: the package is not installed."""
    if not extra.installed:
        raise InvalidRequestError(f"{PARAM}: {extra.missing}", PARAM)


def _unknown(name: str, known: list[str]) -> InvalidRequestError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}"
    return InvalidRequestError(f"{PARAM}: {shown(name)} is unknown: {hint}", PARAM)


def lacks_answer(collection: CollectionSpec) -> bool:
    """Whether a built-in scorer of the collection reads `metadata.answer` and there is none.

    Raises:
        InvalidRequestError: the scorer is neither a name nor a weighted sum of names.
    """
    return collection.metadata.get(ANSWER) is None and any(b.key == ANSWER for _, b in _builtins(collection))


def terms_without_answer(collection: CollectionSpec) -> list[str]:
    """The scorers of the collection that do not read `metadata.answer`."""
    return [name for name in _names(collection) if name not in BUILTINS or BUILTINS[name].key != ANSWER]


def _builtins(collection: CollectionSpec) -> list[tuple[str, Builtin]]:
    return [(name, BUILTINS[name]) for name in _names(collection) if name in BUILTINS]


def _names(collection: CollectionSpec) -> list[str]:
    return [] if collection.scorer is None else [term.scorer for term in terms(collection.scorer)]
