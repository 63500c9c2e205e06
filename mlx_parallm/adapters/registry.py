"""AdapterRegistry: which version each adapter name means now. It holds no array, so any thread may use it.

"math" ──live──▶ math@3      publishing adds math@4 and then makes it live: "math" means it from then on.
                 math@2      Rows and requests that lease math@3 keep it. A rollback makes it live again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mlx_parallm.adapters.weights import Version, VersionInfo
from mlx_parallm.core import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownModelError

KEPT_VERSIONS = 4
"""The newest versions of each name are kept even if nobody uses them."""

_MAX_LISTED, _MAX_LISTED_CHARACTERS = 10, 80
"""The error about an unknown name lists at most this many names, each cut to this many characters."""
_BASE_ROUTE: Mapping[str, float] = {BASE_ADAPTER.name: 1.0}


@dataclass(slots=True)
class _Name:
    """The versions of one name.

    `live`: the numbers of the versions that have been live, in order; the last one is live now. `next_version`: the
    number of the next new version; no number is used twice.
    """

    versions: dict[int, Version] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    next_version: int = 1


class AdapterRegistry:
    """Thread-safe: every public method takes the one lock and waits for nothing else.

    A *selector* is `name` (its live version), `name@version`, or a checkpoint of the default adapter:
    `checkpoint-<step>`, a tag, or `latest`. `base` is the base model.

    Args:
        default_adapter: the adapter whose checkpoints are selectors.
        find_checkpoint: (adapter name, checkpoint name, tag or `latest`) → its version, None if there is none.
        first_version: the first version number of a name that has no version yet; no checkpoint may have used it.
        model_names: names of the served model, for the error about an unknown name. They are no selectors.
        default_takes_over: the first live version of the default adapter gets the base model's share of the route.

    Attributes:
        swaps: how often the live version of a name, or the route, changed.
        flip_s_last, flip_s_max: seconds that `flip` took.
    """

    def __init__(
        self,
        default_adapter: str = "default",
        find_checkpoint: Callable[[str, str], tuple[AdapterRef, VersionInfo] | None] = lambda name, which: None,
        first_version: Callable[[str], int] = lambda name: 1,
        model_names: Sequence[str] = (),
        default_takes_over: bool = False,
    ) -> None:
        self.default_adapter = default_adapter
        self.swaps = 0
        self.flip_s_last = self.flip_s_max = 0.0
        self._find_checkpoint = find_checkpoint
        self._first_version = first_version
        self._model_names = model_names
        self._default_takes_over = default_takes_over
        self._names: dict[str, _Name] = {}
        self._forgotten: dict[AdapterRef, Version] = {}  # forgotten versions that are still leased
        self._routes: list[Mapping[str, float]] = [_BASE_ROUTE]
        self._base = Version(BASE_ADAPTER, VersionInfo(0, 0.0, (), 0))
        self._lock = threading.RLock()

    # -- selectors -------------------------------------------------------------------------------

    def find(self, selector: str) -> Version:
        """The version that a selector means.

        Raises:
            UnknownModelError: there is no such version.
        """
        with self._lock:
            version = self._find(selector)
            if version is None:
                raise self._unknown(selector)
        return version

    def _unknown(self, selector: str) -> UnknownModelError:
        """The error about a selector that means nothing. It lists known names, in text of bounded length."""
        names = [*self._model_names, BASE_ADAPTER.name, *sorted(name for name, its in self._names.items() if its.live)]
        others = len(names) - _MAX_LISTED
        listed = ", ".join(name[:_MAX_LISTED_CHARACTERS] for name in names[:_MAX_LISTED])
        listed += f" and {others} more" if others > 0 else ""
        return UnknownModelError(
            f"No model or adapter is called {selector[:100]!r}; there are {listed}: see GET /v1/models."
        )

    def version(self, ref: AdapterRef) -> Version | None:
        """The version with this name and number, None if no selector finds it and it is not leased."""
        if ref == BASE_ADAPTER:
            return self._base
        with self._lock:
            name = self._names.get(ref.name)
            known = name.versions.get(ref.version) if name else None
            return known or self._forgotten.get(ref)

    @contextmanager
    def lease(self, selector: str | None) -> Iterator[Version]:
        """The version that `selector` means. If it is None, a selector is drawn from the route, whose shares are the
        probabilities. The version is not deleted while the block runs.

        Raises:
            UnknownModelError: there is no such version.
        """
        with self._lock:
            if selector is None:
                route = self._routes[-1]
                selector = random.choices(list(route), list(route.values()))[0]
            version = self._find(selector)
            if version is None:
                raise self._unknown(selector)
            version.leases += 1
        try:
            yield version
        finally:
            with self._lock:
                version.leases -= 1
                if not version.leases:
                    self._forgotten.pop(version.ref, None)
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
        found = self._find_checkpoint(self.default_adapter, selector)
        return None if found is None else self.restore(*found)

    # -- versions --------------------------------------------------------------------------------

    def add(self, adapter: str, info: VersionInfo) -> Version:
        """Adds a version, not live yet. Versions from the same files with older content become superseded."""
        with self._lock:
            name = self._name(adapter)
            for older in self._all():
                same_place = bool(info.root) and older.info.root == info.root
                older.superseded |= same_place and older.info.digest != info.digest
            version = Version(AdapterRef(adapter, name.next_version), info)
            name.versions[version.ref.version] = version
            name.next_version += 1
            return version

    def restore(self, ref: AdapterRef, info: VersionInfo) -> Version:
        """Adds a checkpoint's version under the number that it had, unless it is there already."""
        with self._lock:
            name = self._name(ref.name)
            name.next_version = max(name.next_version, ref.version + 1)
            return name.versions.setdefault(ref.version, Version(ref, info))

    def flip(self, ref: AdapterRef) -> None:
        """Makes a version live. Requests that name the adapter get it from now on.

        Raises:
            UnknownModelError: the version was unloaded meanwhile.
        """
        started = time.perf_counter()
        with self._lock:
            name = self._name(ref.name)
            if ref.version not in name.versions:
                raise UnknownModelError(f"{ref} was unloaded before it went live; load it again.", param="lora_name")
            is_first = not name.live
            if name.live[-1:] != [ref.version]:
                self.swaps += not is_first
                name.live.append(ref.version)
            takes_over = is_first and self._default_takes_over and ref.name == self.default_adapter
            if takes_over and self.route() == _BASE_ROUTE:
                self.set_route({ref.name: 1.0})
            self._trim(ref.name)
        self.flip_s_last = time.perf_counter() - started
        self.flip_s_max = max(self.flip_s_max, self.flip_s_last)

    def set_checkpoint(self, version: Version, root: str, checkpoint: str) -> None:
        """Records that a checkpoint holds the version's weights, and is to be read when they are needed again."""
        with self._lock:
            version.info = replace(version.info, root=root, checkpoint=checkpoint)
            version.superseded = False

    def live(self, adapter: str) -> Version | None:
        """The live version of a name."""
        with self._lock:
            name = self._names.get(adapter)
            return name.versions[name.live[-1]] if name and name.live else None

    def live_from(self, root: str) -> Version | None:
        """A live version that was read from the directory `root`."""
        with self._lock:
            return next((v for v in self._all() if v.info.root == root and v is self.live(v.ref.name)), None)

    def discard(self, ref: AdapterRef) -> None:
        """Forgets a version, if it is still known. If it is live, that is undone: what it replaced is live again."""
        with self._lock:
            if ref.version in self._name(ref.name).versions:
                self._forget(ref)
                routes = [route for route in self._routes if all(map(self._find, route))]
                self._routes = routes or [_BASE_ROUTE]

    def rollback(self, adapter: str, available: Callable[[Version], bool]) -> Version:
        """Makes the previously live version live again.

        Raises:
            UnknownModelError: nothing has that name.
            ConflictError: there is no earlier version, or its weights are not `available`.
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
            UnknownModelError: there is no such version.
            ConflictError: the route uses a version to be unloaded, or `selector` is one version and it is live.
        """
        with self._lock:
            version = self.find(selector)
            if version is self._base:
                raise UnknownModelError("The base model is no adapter; it cannot be unloaded.", param="lora_name")
            whole = selector == version.ref.name
            name = self._names[version.ref.name]
            going = tuple(name.versions.values()) if whole else (version,)
            if set(going) & self._routed():
                raise ConflictError(
                    f"{version.ref.name!r} serves requests that name no adapter; change POST /v1/adapters/route first.",
                    param="lora_name",
                )
            if not whole and version is self.live(version.ref.name):
                raise ConflictError(f"{version.ref} is live; unload {version.ref.name!r} or roll back.", "lora_name")
            for one in going:
                self._forget(one.ref)
            if whole:
                name.live.clear()
            return going

    # -- the route -------------------------------------------------------------------------------

    def route(self) -> Mapping[str, float]:
        """For requests that name no adapter: selector → share. The shares add up to 1."""
        return self._routes[-1]

    def check_route(self, weights: Mapping[str, float]) -> tuple[Mapping[str, float], tuple[Version, ...]]:
        """The weights as shares that add up to 1, and the versions they lead to.

        Raises:
            UnknownModelError: a selector has no version.
            InvalidRequestError: no weight is above 0.
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
        """Takes back the last `set_route`. Raises ConflictError if there was none."""
        with self._lock:
            if len(self._routes) < 2:
                raise ConflictError("The route has no earlier state to go back to.")
            for selector in self._routes[0]:
                self.find(selector)
            self._routes.pop()
            self.swaps += 1
            return self._routes[-1]

    # -- state -----------------------------------------------------------------------------------

    def versions(self) -> tuple[Version, ...]:
        """All known versions, sorted by name and number. Those of checkpoints count once a selector has found them."""
        with self._lock:
            return tuple(sorted(self._all(), key=lambda v: (v.ref.name, v.ref.version)))

    def needed(self, version: Version) -> bool:
        """Whether the version is leased, is live, is in the route, or would be live after a rollback."""
        with self._lock:
            name = self._names.get(version.ref.name)
            ahead = name.live[-2:] if name and not version.forgotten else []
            return version.leases > 0 or version.ref.version in ahead or version in self._routed()

    def needs_files(self, root: str) -> bool:
        """Whether a version that is needed comes from the files at `root`."""
        with self._lock:
            return any(version.info.root == root and self.needed(version) for version in self._all())

    def check_integrity(self) -> None:
        """Raises AssertionError if names, versions and leases do not agree."""
        with self._lock:
            for adapter, name in self._names.items():
                assert set(name.live) <= set(name.versions)
                for number, version in name.versions.items():
                    assert version.ref == AdapterRef(adapter, number)
                    assert number < name.next_version
                    assert version.leases >= 0
                    assert not version.forgotten
            assert all(v.forgotten and v.leases > 0 for v in self._forgotten.values())

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
        """Forgets versions that are neither needed nor among the newest few."""
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
            self._forgotten[ref] = version
        name.live = [number for number in name.live if number != ref.version]
