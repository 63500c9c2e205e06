"""The environments that have registered, and the state of the queue as each of them sees it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.errors import OverloadedError
from mlx_parallm.extras.atropos.schema import RegisterEnv
from mlx_parallm.extras.atropos.source import SOURCE
from mlx_parallm.server.access import NamedKey
from mlx_parallm.server.limits import has_room

LEAST_WEIGHT = 0.01
"""Atropos' MIN_ENV_WEIGHT, the lower bound of `env_weight` in answers."""

MAX_ENVIRONMENTS = 1024
FORGOTTEN_AFTER_S = 60.0
"""When a key may have no more environments, those that were silent for this long make room for a new one: its own, and
those of keys that have more."""


@dataclass(slots=True)
class RegisteredEnvironment:
    """One environment. `last_seen`: on `time.monotonic`'s clock."""

    env_id: int
    name: str
    desired_name: str
    max_token_length: int
    weight: float
    group_size: int
    last_seen: float
    connected: bool = True

    @property
    def source(self) -> str:
        """Of its groups, in training."""
        return f"{SOURCE}:{self.name}"

    @property
    def share(self) -> float:
        return self.max_token_length * max(0.0, self.weight)


class Environments:
    """Registered environments by the name of their API key and their id: a key can use only its own. Ids count from the
    time of the server's start in milliseconds, so an environment that outlives a restart of the server never has the id
    of one that registers later."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, int], RegisteredEnvironment] = {}
        self._next = time.time_ns() // 1_000_000

    def register(self, wanted: RegisterEnv, key: NamedKey) -> RegisteredEnvironment:
        """Raises OverloadedError: there are too many, or too many of this key."""
        self._make_room(key)
        same = sum(each.desired_name == wanted.desired_name for each in self._by_id.values())
        while any(env_id == self._next for _, env_id in self._by_id):
            self._next += 1
        return self._add(
            key,
            self._next,
            f"{wanted.desired_name}_{same}",
            wanted.desired_name,
            wanted.max_token_length,
            wanted.weight,
            wanted.group_size,
        )

    def known(self, env_id: int, key: NamedKey) -> RegisteredEnvironment | None:
        return self._by_id.get((key.name, env_id))

    def find(self, env_id: int, key: NamedKey) -> RegisteredEnvironment:
        """The environment of an id. One that registered before this server was restarted is added again, with what is
        known of it. Raises OverloadedError as `register` does."""
        found = self.known(env_id, key)
        if found is None:
            self._make_room(key)
            found = self._add(key, env_id, f"environment_{env_id}", "", 1, 1.0, 1)
        found.last_seen = time.monotonic()
        return found

    def disconnect(self, env_id: int, key: NamedKey) -> bool:
        """Returns whether the key has such an environment."""
        found = self.known(env_id, key)
        if found is not None:
            found.connected = False
        return found is not None

    def forget_all(self) -> None:
        self._by_id.clear()

    def status(self, env_id: int, key: NamedKey, sizes: Mapping[str, Sequence[int]]) -> dict[str, float | int]:
        """The answer of /status-env, computed as Atropos does. `sizes`: of waiting groups, by source."""
        environment = self.find(env_id, key)
        own = sizes.get(environment.source, ())
        largest = max((size for groups in sizes.values() for size in groups), default=1)
        environment.group_size = max([environment.group_size, *own])
        total = sum(each.share for each in self._by_id.values() if each.connected)
        packs = (math.ceil(sum(groups) / largest) for name, groups in sizes.items() if name != environment.source)
        others = sum(packs) * largest
        return {
            "queue_size": (sum(own) + others) // environment.group_size,
            "unallocated_fraction": 1.0,
            "self_queue_size": sum(own) // environment.group_size,
            "max_group_size": largest,
            "env_weight": max(LEAST_WEIGHT, environment.share / total if total else 0.0),
        }

    def _add(
        self,
        key: NamedKey,
        env_id: int,
        name: str,
        desired_name: str,
        max_token_length: int,
        weight: float,
        group_size: int,
    ) -> RegisteredEnvironment:
        added = RegisteredEnvironment(
            env_id, name, desired_name, max_token_length, weight, group_size, time.monotonic()
        )
        self._by_id[key.name, env_id] = added
        return added

    def _make_room(self, key: NamedKey) -> None:
        counts = Counter(owner for owner, _ in self._by_id)
        replaceable = sorted(
            (each.last_seen, name)
            for name, each in self._by_id.items()
            if name[0] == key.name or counts[name[0]] > counts[key.name]
        )
        for last_seen, name in replaceable:
            if self._has_room(key) or time.monotonic() - last_seen < FORGOTTEN_AFTER_S:
                break
            del self._by_id[name]
        if not self._has_room(key):
            raise OverloadedError(
                f"{len(self._by_id)} environments are registered, and this key may not have more of the "
                f"{MAX_ENVIRONMENTS}; end some of them and try again."
            )

    def _has_room(self, key: NamedKey) -> bool:
        own = sum(owner == key.name for owner, _ in self._by_id)
        return has_room(MAX_ENVIRONMENTS, len(self._by_id), None if key.may_be_alone else own)
