"""ScoringService checks the metadata that requests give to their scorers, and scores groups of trajectories.

    server's process                                    child processes
    ScoringService ── ScoringPool ── groups ──▶ worker ──▶ scorers ──▶ builtin, gym, functions, judges, ...
       ├── ScoringPool ── metadata of requests ──▶ worker
       └── ScorerCatalogue ── once per scorer name ──▶ worker NAME

The server's process runs no scorer's code and no check that a client can make slow. A child process describes each
scorer that is not built in, once. Another one compiles patterns and checks schemas, once for each of them; the server's
process limits their size before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import EngineError, InvalidRequestError, OverloadedError
from mlx_parallm.rl.scoring.builtin import BUILTINS
from mlx_parallm.rl.scoring.judges import INSTRUCTION, JUDGE, Judge
from mlx_parallm.rl.scoring.pool import Rule, ScoringError, ScoringPool
from mlx_parallm.rl.scoring.sample import PARAM, ScorerInput
from mlx_parallm.rl.scoring.scorers import REWARD, REWARD_MODEL, RewardSpec, Term

if TYPE_CHECKING:
    from mlx_parallm.extras.reward_models.service import RewardModels


import subprocess
from collections.abc import Callable
from difflib import get_close_matches
from functools import cached_property, partial
from importlib.metadata import entry_points
from typing import NamedTuple, NoReturn

from mlx_parallm.errors import ConfigError, shown
from mlx_parallm.optional_packages import REASONING_GYM, Extra
from mlx_parallm.processes import command, environment, stdin_until_exit
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.sample import Metadata, present, unusable
from mlx_parallm.rl.scoring.scorers import GROUP, scorers_of

_WAIT_S = 15.0
"""How long a request waits for its check, and for the checks of other requests before it."""

_CHECK_S = 5.0
"""Time after which a checking process is killed. A check ends by itself after `worker.CHECK_S` if Python can end it."""

_REMEMBERED = 1024


class ScoringService:
    """Checks requests and scores groups, in child processes. On one event loop. A fault affects only its own group.

    Args:
        processes: number of scoring processes at most. Another one checks the metadata of requests.
        batch_size: trajectories of one batch at most; a larger group is a batch by itself. See `FairQueue`.
        timeout_s: how long a group may take, not counting the import of its scorer.
        reward: what the scorer `reward` stands for; None: there is none of that name.
        reward_models: those that requests may name; None: there are none.
        judge: the model that grades the answers of lessons.

    Attributes:
        catalogue: the scorers that there are.
        reward_models: those of its arguments.
        last_fault: why the last group that could not be scored failed.
        on_device: groups that reward models are scoring.
    """

    def __init__(
        self,
        processes: int,
        batch_size: int,
        timeout_s: float,
        reward: RewardSpec | None = None,
        reward_models: RewardModels | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.last_fault = ""
        self.on_device = 0
        self._reward, self._judge = reward, judge or Judge()
        self._timeout_s = timeout_s
        self._pool = ScoringPool(processes, batch_size, timeout_s)
        self._checks = ScoringPool(1, 1, _CHECK_S)
        self.reward_models = reward_models
        self.catalogue = ScorerCatalogue(reward, reward_models.check if reward_models else no_reward_model)
        self._describing = asyncio.Lock()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()  # by digest of scorer and value; "": not refused

    # -- rewards ---------------------------------------------------------------------------------

    async def score(self, group: Sequence[Trajectory]) -> tuple[float, ...]:
        """The rewards of trajectories that have the same scorer, in order: finite numbers.

        Raises:
            ScoringError: the group names no scorer, or the scorer failed.
        """
        if not group:
            return ()
        collection = group[0].collection
        if (scorer := collection.scorer) is None:
            raise ScoringError("the group names no scorer")
        rule = Rule(collection.client, scorer, _digest(dict(collection.metadata)).hex())
        try:
            reply = await self._pool.run(rule, len(group), await self._message(group))
            return _checked_rewards(reply, len(group))
        except (ScoringError, InvalidRequestError, EngineError) as error:
            slow = str(error) == f"took more than {self._timeout_s:g} s"
            advice = "; rl_training.scoring_timeout_s is the limit" if slow else ""
            self.last_fault = f"{scorer}: {error}{advice}"
            raise ScoringError(self.last_fault) from error

    async def _message(self, group: Sequence[Trajectory]) -> Mapping[str, Any]:
        """What a scoring process needs to score the group: the samples, with the rewards of reward models, and what the
        scorer `reward` stands for if it is used, which a lesson's judge is too."""
        collection, reward = group[0].collection, None
        scorer, scorers = collection.scorer, self.catalogue.scorers(collection)
        if scorer == JUDGE and INSTRUCTION in collection.metadata:
            judge = replace(self._judge, instruction=collection.metadata[INSTRUCTION])
            scorer, reward = REWARD, RewardSpec((Term(1.0, JUDGE),), judge)
        elif REWARD in scorers:
            reward = self._reward
        samples = [ScorerInput.to_json(trajectory, reward is not None) for trajectory in group]
        for name in scorers:
            if name.startswith(REWARD_MODEL):
                for sample, value in zip(samples, await self._rewards_of(name, group), strict=True):
                    sample["reward_models"][name] = value
        return {"scorer": scorer, "samples": samples, "reward": reward and asdict(reward)}

    async def _rewards_of(self, reward_model: str, group: Sequence[Trajectory]) -> Sequence[float]:
        name = reward_model.removeprefix(REWARD_MODEL)
        if self.reward_models is None:
            no_reward_model(name)
        self.on_device += 1
        try:
            return await self.reward_models.rewards(name, group)
        finally:
            self.on_device -= 1

    def judge_by(self, url: str, api_key: str) -> None:
        """Sets the server that judges are asked on, if the configuration names none: this one."""
        if not self._judge.url:
            self._judge = replace(self._judge, url=url, api_key=api_key)
        if self._reward is not None and not self._reward.judge.url:
            judge = replace(self._reward.judge, url=url, api_key=api_key)
            self._reward = replace(self._reward, judge=judge)

    async def close(self) -> None:
        """Ends the processes; waiting groups fail."""
        await asyncio.gather(self._pool.close(), self._checks.close())

    # -- what requests bring ---------------------------------------------------------------------

    async def check(self, collection: CollectionSpec) -> None:
        """Checks that the scorer of a request is known, and that `metadata` has what it reads.

        The first time that a scorer is named that is not built in, this waits seconds for a child process.

        Raises:
            InvalidRequestError: the scorer is unknown or cannot be used, or `metadata` lacks what it reads.
            OverloadedError: too many other requests are being checked, or the checking process failed.
        """
        if self.catalogue.must_ask(collection):
            async with self._describing:  # a single thread waits for the child, other requests wait for the lock
                await asyncio.to_thread(self.catalogue.check_bounds, collection)
        else:
            self.catalogue.check_bounds(collection)
        for name in self.catalogue.scorers(collection):
            if name in BUILTINS and BUILTINS[name].read is not None:
                await self._check_value(name, BUILTINS[name].key, collection)

    async def _check_value(self, scorer: str, key: str, collection: CollectionSpec) -> None:
        """Checks one value of `metadata` in the checking process, unless its result is remembered."""
        digest = _digest([scorer, collection.metadata[key]])
        if digest not in self._refusals:
            rule = Rule(collection.client, scorer, "")
            message = {"check": scorer, "metadata": {key: collection.metadata[key]}}
            try:
                async with asyncio.timeout(_WAIT_S):
                    reply = await self._checks.run(rule, 1, message)
            except TimeoutError as error:
                raise OverloadedError("The metadata of other requests is being checked; try again.") from error
            except ScoringError as error:  # a fault of the process, which says nothing about the value
                raise OverloadedError("The metadata could not be checked now; try again.") from error
            self._refusals[digest] = str(reply["refused"])
            if len(self._refusals) > _REMEMBERED:
                self._refusals.popitem(last=False)
        self._refusals.move_to_end(digest)
        if refusal := self._refusals[digest]:
            raise InvalidRequestError(refusal, PARAM)


def _digest(value: object) -> bytes:
    """The SHA-256 of a JSON value, in which the order of keys does not count."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _checked_rewards(reply: Mapping[str, Any], count: int) -> tuple[float, ...]:
    """The rewards in a reply, which a scorer may have written itself.

    Raises:
        ScoringError: they are not this many finite numbers.
    """
    rewards = reply.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != count:
        raise ScoringError(f"the scoring process did not give {count} rewards")
    if not all(isinstance(reward, float | int) and math.isfinite(reward) for reward in rewards):
        raise ScoringError("a reward must be a finite number")
    return tuple(map(float, rewards))


# ---- which scorers there are ---------------------------------------------------------------------

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
        """What a child process says of this scorer. Raises InvalidRequestError: the child failed, or lacked what it
        may have later, which is not remembered."""
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
    reply: Mapping[str, Any] = json.loads(done.stdout)
    if reply["may_pass"]:
        raise unusable(f"{name} cannot be used now: {reply['problem']}")
    return _Description(tuple(reply["requires"]), tuple(reply["tasks"]), str(reply["problem"]))


def _require(extra: Extra) -> None:
    """Raises InvalidRequestError: the package is not installed."""
    if not extra.installed:
        raise unusable(extra.missing)


def _unknown(name: str, known: list[str]) -> InvalidRequestError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}"
    return unusable(f"{shown(name)} is unknown: {hint}")
