"""Which scorers there are and what they read, without running their code in the server's process."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from mlx_parallm.adapters.names import shown
from mlx_parallm.children.start import command, environment
from mlx_parallm.children.watch import life_line
from mlx_parallm.core import Collection
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring import fields, gym
from mlx_parallm.rl.scoring.names import PARAM, terms
from mlx_parallm.rl.scoring.registry import BUILTINS, GROUP
from mlx_parallm.rl.scoring.sample import Metadata

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class _Facts:
    requires: tuple[str, ...]
    tasks: tuple[str, ...]
    problem: str


class Catalogue:
    """Thread-safe. A child process is asked once for each name that is not built in, and takes seconds to answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: dict[str, _Facts] = {}
        self._tasks: tuple[str, ...] = ()

    def check(self, collection: Collection) -> None:
        """All that can be checked, here and now: for what the operator brings, and not for a client's request.

        Raises:
            InvalidRequestError: unknown or unusable scorer, or `metadata` lacks what it reads.
        """
        self.check_bounds(collection)
        for term in terms(collection.scorer) if collection.scorer is not None else ():
            if (builtin := BUILTINS.get(term.scorer)) is not None and builtin.read is not None:
                builtin.read(collection.metadata)

    def check_bounds(self, collection: Collection) -> None:
        """The same, but for `Builtin.read`, which a client can make take long."""
        for term in terms(collection.scorer) if collection.scorer is not None else ():
            self._check(term.scorer, collection.metadata)

    def must_ask(self, collection: Collection) -> bool:
        """Whether a check may have to wait for a child process."""
        names = [term.scorer for term in terms(collection.scorer)] if collection.scorer is not None else []
        return any(name not in BUILTINS and name not in self._facts for name in names)

    def _check(self, name: str, metadata: Metadata) -> None:
        if name in BUILTINS:
            BUILTINS[name].bound(metadata)
        elif name.startswith(gym.PREFIX):
            self._check_task(name)
            fields.entry(metadata)
        elif name in self._packages:
            for key in self._usable(name).requires:
                fields.present(metadata, key)
        else:
            raise _unknown(name, [*BUILTINS, *self._packages, gym.PREFIX + "<task>"])

    @cached_property
    def _packages(self) -> frozenset[str]:
        return frozenset(entry_points(group=GROUP).names)

    def _check_task(self, name: str) -> None:
        if not gym.installed():
            raise InvalidRequestError(f"{PARAM}: {gym.NOT_INSTALLED}", PARAM)
        with self._lock:
            if not self._tasks:
                self._tasks = self._ask(name).tasks
        known = [gym.PREFIX + task for task in self._tasks]
        if known and name not in known:
            raise _unknown(name, known)
        self._usable(name)

    def _usable(self, name: str) -> _Facts:
        with self._lock:
            facts = self._ask(name)
        if facts.problem:
            raise InvalidRequestError(f"{PARAM}: {name} cannot be used: {facts.problem}", PARAM)
        return facts

    def _ask(self, name: str) -> _Facts:
        """The lock is held, so that a name is asked for once. No answer is not remembered."""
        if name not in self._facts:
            self._facts[name] = _described(name)
        return self._facts[name]


def _described(name: str) -> _Facts:
    try:
        said = _said(name)
        return _Facts(tuple(said["requires"]), tuple(said["tasks"]), str(said["problem"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(
            f"{PARAM}: {name} could not be loaded; the server's log may say why", PARAM
        ) from error


def _said(name: str) -> Mapping[str, Any]:
    with life_line() as stdin:
        done = subprocess.run(
            command("mlx_parallm.rl.scoring.describe", name),
            env=environment(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            timeout=_LIMIT_S,
            check=True,
            start_new_session=True,
        )
    answer: Mapping[str, Any] = json.loads(done.stdout)
    return answer


def _unknown(name: str, known: list[str]) -> InvalidRequestError:
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:20])}"
    return InvalidRequestError(f"{PARAM}: {shown(name)} is unknown: {hint}", PARAM)
