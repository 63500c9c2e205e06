"""ScoringService checks the metadata that requests give to their scorers, and scores groups of trajectories.

    server's process                                    child processes
    ScoringService ── ScoringPool ── groups ──▶ worker ──▶ registry ──▶ exact, math, a package's own, ...
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
import subprocess
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from mlx_parallm.core import CollectionSpec, Trajectory
from mlx_parallm.errors import InvalidRequestError, OverloadedError, shown
from mlx_parallm.extras import REASONING_GYM, Extra
from mlx_parallm.processes import command, environment, stdin_until_exit
from mlx_parallm.rl.scoring import gym, sample
from mlx_parallm.rl.scoring.pool import ScoringError, ScoringJob, ScoringPool
from mlx_parallm.rl.scoring.queue import Rule
from mlx_parallm.rl.scoring.registry import BUILTINS, GROUP, PARAM, Builtin, terms
from mlx_parallm.rl.scoring.sample import ScorerInput

_DESCRIBE_S = 120.0

_WAIT_S = 15.0
"""How long a request waits for its check, and for the checks of other requests before it."""

_CHECK_S = 5.0
"""Time after which a checking process is killed. A check ends by itself after `worker.CHECK_S` if Python can end it."""

_REMEMBERED = 1024

ANSWER = "answer"
"""The key of `metadata` for the right answer."""


class ScoringService:
    """Checks requests and scores groups, in child processes. On one event loop. A fault affects only its own group.

    Args:
        processes: number of scoring processes at most. Another one checks the metadata of requests.
        batch_size: trajectories sent to a process at a time, at most; a larger group is sent alone and whole.
        timeout_s: how long a group may take, not counting the import of its scorer.
    """

    def __init__(self, processes: int, batch_size: int, timeout_s: float) -> None:
        self._pool = ScoringPool(processes, batch_size, timeout_s)
        self._checks = ScoringPool(1, 1, _CHECK_S)
        self._catalogue = ScorerCatalogue()
        self._describing = asyncio.Lock()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()  # by digest of scorer and value; "": not refused

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
            samples = [ScorerInput.to_json(trajectory) for trajectory in group]
            reply = await self._pool.run(ScoringJob(rule, len(group), {"scorer": scorer, "samples": samples}))
            return _checked_rewards(reply, len(group))
        except ScoringError as error:
            raise ScoringError(f"{scorer}: {error}") from error

    async def check(self, collection: CollectionSpec) -> None:
        """Checks that the scorer of a request is known, and that `metadata` has what it reads.

        The first time that a scorer is named that is not built in, this waits seconds for a child process.

        Raises:
            InvalidRequestError: the scorer is unknown or cannot be used, or `metadata` lacks what it reads.
            OverloadedError: too many other requests are being checked.
        """
        if self._catalogue.must_ask(collection):
            async with self._describing:  # a single thread waits for the child, other requests wait for the lock
                await asyncio.to_thread(self._catalogue.check_bounds, collection)
        else:
            self._catalogue.check_bounds(collection)
        for name, builtin in _builtins(collection):
            if builtin.read is not None:
                await self._check_value(name, builtin.key, collection)

    async def close(self) -> None:
        """Ends the processes; waiting groups fail."""
        await asyncio.gather(self._pool.close(), self._checks.close())

    async def _check_value(self, scorer: str, key: str, collection: CollectionSpec) -> None:
        """Checks one value of `metadata` in the checking process, unless its result is remembered."""
        digest = _digest([scorer, collection.metadata[key]])
        if digest not in self._refusals:
            job = ScoringJob(
                Rule(collection.client, scorer, ""), 1, {"check": scorer, "metadata": {key: collection.metadata[key]}}
            )
            try:
                reply = await asyncio.wait_for(self._checks.run(job), _WAIT_S)
                self._refusals[digest] = str(reply["refused"])
            except TimeoutError as error:
                raise OverloadedError("The metadata of other requests is being checked; try again.") from error
            except ScoringError as error:
                self._refusals[digest] = f"{sample.PARAM}.{key} could not be checked: {error}"
            if len(self._refusals) > _REMEMBERED:
                self._refusals.popitem(last=False)
        self._refusals.move_to_end(digest)
        if refusal := self._refusals[digest]:
            raise InvalidRequestError(refusal, sample.PARAM)


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


# ---- the catalogue -------------------------------------------------------------------------------


class _Description(NamedTuple):
    """What a child process says of one scorer; see `worker`."""

    requires: tuple[str, ...]
    tasks: tuple[str, ...]
    problem: str


class ScorerCatalogue:
    """Which scorers there are, and the metadata that they read.

    A child process is asked once for each name that is not built in, which takes seconds. Only one thread at a time
    may call a check that has to ask.
    """

    def __init__(self) -> None:
        self._descriptions: dict[str, _Description] = {}
        self._tasks: tuple[str, ...] = ()

    def check(self, collection: CollectionSpec) -> None:
        """Checks everything in this process. Use it for what the operator gives: a client could make it slow.

        Raises:
            InvalidRequestError: the scorer is unknown or cannot be used, or `metadata` lacks what it reads.
        """
        self.check_bounds(collection)
        for _, builtin in _builtins(collection):
            if builtin.read is not None:
                builtin.read(collection.metadata)

    def check_bounds(self, collection: CollectionSpec) -> None:
        """The same without `Builtin.read`, which a client can make slow."""
        for name in _names(collection):
            if (builtin := BUILTINS.get(name)) is not None:
                if builtin.needs is not None:
                    _require(builtin.needs)
                builtin.bound(collection.metadata)
            elif name.startswith(gym.PREFIX):
                self._check_task(name)
                sample.entry(collection.metadata)
            elif name in self._packages:
                for key in self._usable(name).requires:
                    sample.present(collection.metadata, key)
            else:
                raise _unknown(name, [*BUILTINS, *self._packages, gym.PREFIX + "<task>"])

    def must_ask(self, collection: CollectionSpec) -> bool:
        """Whether a check may have to wait for a child process."""
        return any(name not in BUILTINS and name not in self._descriptions for name in _names(collection))

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
