"""Names, versions, leases and the route: what a selector means, now. Holds no array, so any thread may ask.

"math" ──live──▶ math@3      a publish adds math@4 and flips the name to it; rows and requests that
                 math@2      lease math@3 keep it; a rollback flips back
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mlx_parallm.adapters.versions import Version, VersionInfo
from mlx_parallm.core import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownModelError

KEPT_VERSIONS = 4
"""Newest versions of a name that are kept though nobody leases them."""

_BASE_ROUTE: Mapping[str, float] = {BASE_ADAPTER.name: 1.0}

_T = TypeVar("_T")


@dataclass(slots=True)
class _Name:
    """`live`: versions that the name meant, the last one now. `next_version` is never used twice."""

    versions: dict[int, Version] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    next_version: int = 1


class AdapterBooks:
    """Thread-safe: every public method takes the one lock and waits for nothing else.

    Args:
        default_adapter: the name whose checkpoints can be selected by themselves.
        find_checkpoint: (adapter name, `checkpoint-<step>` | tag | `latest`) → its version, unless there is none.
        first_version: of a name that has no version yet: one above what its checkpoints have used.
    """

    def __init__(
        self,
        default_adapter: str = "default",
        find_checkpoint: Callable[[str, str], tuple[AdapterRef, VersionInfo] | None] = lambda name, which: None,
        first_version: Callable[[str], int] = lambda name: 1,
    ) -> None:
        self.default_adapter = default_adapter
        self.swaps = 0
        self._find_checkpoint = find_checkpoint
        self._first_version = first_version
        self._names: dict[str, _Name] = {}
        self._orphans: dict[AdapterRef, Version] = {}  # forgotten, and leased
        self._routes: list[Mapping[str, float]] = [_BASE_ROUTE]
        self._base = Version(BASE_ADAPTER, VersionInfo(0, 0.0, (), 0))
        self._lock = threading.RLock()

    # -- what a selector means -------------------------------------------------------------------

    def find(self, selector: str) -> Version:
        """The version that `name`, `name@version` or a checkpoint of the default adapter means; `base` too.

        Raises:
            UnknownModelError: nothing has that name.
        """
        with self._lock:
            version = self._find(selector)
        if version is None:
            raise UnknownModelError(f"No model or adapter is called {selector[:100]!r}; see GET /v1/models.")
        return version

    def version(self, ref: AdapterRef) -> Version | None:
        """A version that a selector finds, or that somebody leases."""
        if ref == BASE_ADAPTER:
            return self._base
        with self._lock:
            name = self._names.get(ref.name)
            known = name.versions.get(ref.version) if name else None
            return known or self._orphans.get(ref)

    def choose(self) -> str:
        """A selector for a request that names no adapter, drawn by the route's shares."""
        route = self.route()
        return random.choices(list(route), list(route.values()))[0]

    @contextmanager
    def lease(self, selector: str | None) -> Iterator[Version]:
        """The version `selector` means (None: the route's draw), kept while the block runs.

        Raises:
            UnknownModelError: nothing has that name.
        """
        with self._lock:
            version = self.find(self.choose() if selector is None else selector)
            version.leases += 1
        try:
            yield version
        finally:
            with self._lock:
                version.leases -= 1
                if not version.leases:
                    self._orphans.pop(version.ref, None)
                self._trim(version.ref.name)

    def _find(self, selector: str) -> Version | None:
        if selector == BASE_ADAPTER.name:
            return self._base
        text, at, number = selector.partition("@")
        name = self._names.get(text)
        if at:
            known = number.isascii() and number.isdecimal() and len(number) < 10 and name is not None
            return name.versions.get(int(number)) if known and name else None
        if name is not None and name.live:
            return name.versions[name.live[-1]]
        return self._of_checkpoint(selector)

    def _of_checkpoint(self, which: str) -> Version | None:
        found = self._find_checkpoint(self.default_adapter, which)
        if found is None:
            return None
        return self._restored(*found)

    # -- versions --------------------------------------------------------------------------------

    def add(self, adapter: str, info: VersionInfo) -> Version:
        """A new version, not live yet. What was read from the same files with other content is superseded."""
        with self._lock:
            name = self._name(adapter)
            for older in self._all():
                same_place = bool(info.root) and older.info.root == info.root
                older.superseded |= same_place and older.info.digest != info.digest
            version = Version(AdapterRef(adapter, name.next_version), info)
            name.versions[version.ref.version] = version
            name.next_version += 1
            return version

    def know(self, ref: AdapterRef, info: VersionInfo) -> Version:
        """Adds a version with its number of old, unless it is there."""
        with self._lock:
            return self._restored(ref, info)

    def _restored(self, ref: AdapterRef, info: VersionInfo) -> Version:
        name = self._name(ref.name)
        name.next_version = max(name.next_version, ref.version + 1)
        return name.versions.setdefault(ref.version, Version(ref, info))

    def flip(self, ref: AdapterRef) -> None:
        """Makes the bare name mean `ref`. Requests that come from now on get it.

        Raises:
            UnknownModelError: the version was forgotten meanwhile.
        """
        with self._lock:
            name = self._name(ref.name)
            if ref.version not in name.versions:
                raise UnknownModelError(f"{ref} was unloaded before it went live; load it again.", param="lora_name")
            if name.live[-1:] != [ref.version]:
                self.swaps += bool(name.live)
                name.live.append(ref.version)
            self._trim(ref.name)

    def saved(self, version: Version, root: str, checkpoint: str) -> None:
        """A version's content is in a checkpoint now: that is where it is read again."""
        with self._lock:
            version.info = replace(version.info, root=root, checkpoint=checkpoint)
            version.superseded = False

    def live(self, adapter: str) -> Version | None:
        """What the bare name means."""
        with self._lock:
            name = self._names.get(adapter)
            return name.versions[name.live[-1]] if name and name.live else None

    def discard(self, ref: AdapterRef) -> None:
        """Forgets a version that never went live, unless that has happened."""
        with self._lock:
            if ref.version in self._name(ref.name).versions:
                self._forget(ref)

    def rollback(self, adapter: str, available: Callable[[Version], bool]) -> Version:
        """Makes the name mean the version that it meant before.

        Raises:
            UnknownModelError, ConflictError: nothing has that name; there is no earlier version, or not any more.
        """
        with self._lock:
            self.find(adapter)
            name = self._names.get(adapter)
            if name is None or len(name.live) < 2:
                raise ConflictError(f"{adapter!r} has no earlier version to go back to.", param="lora_name")
            earlier = name.versions[name.live[-2]]
            if not available(earlier):
                raise ConflictError(f"The weights of {earlier.ref} were replaced where they lay.", param="lora_name")
            name.live.pop()
            self.swaps += 1
            return earlier

    def unload(self, selector: str) -> tuple[Version, ...]:
        """Forgets a version, or all versions of a name.

        Raises:
            UnknownModelError: nothing has that name.
            ConflictError: a route leads there; or the one version is live.
        """
        with self._lock:
            version = self.find(selector)
            if version is self._base:
                raise UnknownModelError("The base model is no adapter; it cannot be unloaded.", param="lora_name")
            whole = selector == version.ref.name
            name = self._names[version.ref.name]
            going = tuple(name.versions.values()) if whole else (version,)
            self._refuse_unload(version, going, whole)
            for one in going:
                self._forget(one.ref)
            if whole:
                name.live.clear()
            return going

    def _refuse_unload(self, version: Version, going: tuple[Version, ...], whole: bool) -> None:
        if set(going) & self._routed():
            raise ConflictError(
                f"{version.ref.name!r} serves requests that name no adapter; change POST /v1/adapters/route first.",
                param="lora_name",
            )
        if not whole and version is self.live(version.ref.name):
            raise ConflictError(f"{version.ref} is live; unload {version.ref.name!r} or roll back.", param="lora_name")

    # -- the route -------------------------------------------------------------------------------

    def route(self) -> Mapping[str, float]:
        """Selector → share of the requests that name no adapter; shares add up to 1."""
        return self._routes[-1]

    def check_route(self, weights: Mapping[str, float]) -> tuple[Mapping[str, float], tuple[Version, ...]]:
        """The weights as shares, and their versions.

        Raises:
            UnknownModelError, InvalidRequestError: a selector means nothing; no weight is above 0.
        """
        total = sum(weights.values())
        if not total > 0:
            raise InvalidRequestError("At least one weight must be above 0.", param="weights")
        shares = {selector: weight / total for selector, weight in weights.items() if weight > 0}
        return shares, tuple(self.find(selector) for selector in shares)

    def set_route(self, shares: Mapping[str, float]) -> None:
        with self._lock:
            for selector in shares:
                self.find(selector)
            if shares != self._routes[-1]:
                self._routes = [*self._routes[-1:], shares]
                self.swaps += 1

    def rollback_route(self) -> Mapping[str, float]:
        """Takes back the last `set_route`. Raises ConflictError when there was none."""
        with self._lock:
            if len(self._routes) < 2:
                raise ConflictError("The route has no earlier state to go back to.")
            for selector in self._routes[0]:
                self.find(selector)
            self._routes.pop()
            self.swaps += 1
            return self._routes[-1]

    # -- books -----------------------------------------------------------------------------------

    def versions(self) -> tuple[Version, ...]:
        """All that a selector finds, by name and number, checkpoints that nobody asked for apart."""
        with self._lock:
            return tuple(sorted(self._all(), key=lambda v: (v.ref.name, v.ref.version)))

    def needed(self, version: Version) -> bool:
        """Whether somebody leases it, or a name, a route or a rollback leads to it."""
        with self._lock:
            name = self._names.get(version.ref.name)
            ahead = name.live[-2:] if name and not version.forgotten else []
            return version.leases > 0 or version.ref.version in ahead or version in self._routed()

    def serves(self, root: str) -> bool:
        """Whether a version that somebody needs comes from the files at `root`."""
        with self._lock:
            return any(version.info.root == root and self.needed(version) for version in self._all())

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree."""
        with self._lock:
            for adapter, name in self._names.items():
                assert set(name.live) <= set(name.versions)
                for number, version in name.versions.items():
                    assert version.ref == AdapterRef(adapter, number)
                    assert number < name.next_version
                    assert version.leases >= 0
                    assert not version.forgotten
            assert all(v.forgotten and v.leases > 0 for v in self._orphans.values())

    def _all(self) -> Iterator[Version]:
        for name in self._names.values():
            yield from name.versions.values()

    def _name(self, adapter: str) -> _Name:
        if adapter not in self._names:
            self._names[adapter] = _Name(next_version=self._first_version(adapter))
        return self._names[adapter]

    def _routed(self) -> set[Version]:
        found = (self._find(selector) for selector in self._routes[-1])
        return {version for version in found if version is not None}

    def _trim(self, adapter: str) -> None:
        """Forgets versions beyond the newest few that nobody needs, and what a name meant before those."""
        name = self._names.get(adapter)
        if name is None:
            return
        for number in sorted(name.versions)[:-KEPT_VERSIONS]:
            if not self.needed(name.versions[number]):
                self._forget(name.versions[number].ref)

    def _forget(self, ref: AdapterRef) -> None:
        name = self._names[ref.name]
        version = name.versions.pop(ref.version)
        version.forgotten = True
        if version.leases:
            self._orphans[ref] = version
        name.live = [number for number in name.live if number != ref.version]
