"""AdapterRegistry: which version each adapter name means now. It holds no array, so any thread may use it.

"math" ──live──▶ math@3      Publishing adds math@4 and then makes it live: from then on, "math" means math@4.
                 math@2      Rows and requests that lease math@3 keep it. A rollback makes math@3 live again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mlx_parallm.adapters.weights import Version, VersionInfo
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, UnknownModelError

KEPT_VERSIONS = 4
"""How many of the newest versions of each name are kept even if nobody uses them."""

_BASE_ROUTE: Mapping[str, float] = {BASE_ADAPTER.name: 1.0}

Split = Callable[[str], AdapterRef]
"""Which of the versions of one adapter answers a request, by the key of its user, session or group."""


class AdapterRegistry:
    """Finds the version that a request means. It is thread-safe: it has one lock, and nothing blocks while holding it.

    A *selector* is `name` (its live version), `name@version`, or a checkpoint of the default adapter:
    `checkpoint-<step>`, a tag, or `latest`. `base` is the base model. The *route* serves requests that name no adapter.

    Args:
        default_adapter: the adapter whose checkpoints are selectors.
        find_checkpoint: (adapter name, checkpoint name, tag or `latest`) → its version, None if there is none.
        first_version: the first version number of a name that has no version yet; none of before may have used it.
        number_of: (adapter name, digest) → the number that this content had as a version, in earlier processes too;
            None: it had none.
        model_names: names of the served model, for the error about an unknown name. They are not selectors.
        default_takes_over: the default adapter's first live version becomes the route if that is the base model alone.

    Attributes: `swaps` says how often the live version of a name, or the route, has changed; `gone_total` how many
    versions have been forgotten and lost their last lease; `flip_s_last` and `flip_s_max` how many seconds the last and
    the slowest `flip` took.
    """

    def __init__(
        self,
        default_adapter: str = "default",
        find_checkpoint: Callable[[str, str], tuple[AdapterRef, VersionInfo] | None] = lambda name, which: None,
        first_version: Callable[[str], int] = lambda name: 1,
        number_of: Callable[[str, str], int | None] = lambda name, digest: None,
        model_names: Sequence[str] = (),
        default_takes_over: bool = False,
    ) -> None:
        self.default_adapter = default_adapter
        self.swaps = self.gone_total = 0
        self.flip_s_last = self.flip_s_max = 0.0
        self._find_checkpoint = find_checkpoint
        self._first_version = first_version
        self._number_of = number_of
        self._model_names = model_names
        self._default_takes_over = default_takes_over
        self._versions: dict[AdapterRef, Version] = {}  # including forgotten ones that are still leased
        self._live: dict[str, list[Version]] = {}  # of each name: those that have been live; the last one is live now
        self._next: dict[str, int] = {}  # of each name, the number of the next version; none is used twice
        self._routes: list[Mapping[str, float]] = [_BASE_ROUTE]
        self._splits: dict[str, Split] = {}
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
                live = sorted(name for name, versions in self._live.items() if versions)
                raise UnknownModelError.listing(selector, (*self._model_names, BASE_ADAPTER.name, *live))
        return version

    def version(self, ref: AdapterRef) -> Version | None:
        """The version with this name and number, None if there is none. A forgotten one exists while it is leased."""
        return self._base if ref == BASE_ADAPTER else self._versions.get(ref)

    def known(self, ref: AdapterRef) -> Version | None:
        """The version with this name and number; None if there is none, or it was forgotten."""
        with self._lock:
            version = self._versions.get(ref)
            return version if version and not version.forgotten else None

    @contextmanager
    def lease(self, selector: str | None, key: str | None = None) -> Iterator[Version]:
        """The version that `selector` means. If `selector` is None, one is chosen by the route, whose shares are the
        probabilities. The version is not deleted while the block runs.

        `key`: of a request; if the name is split, it decides which version answers. None: the live version.

        Raises:
            UnknownModelError: there is no such version.
        """
        with self._lock:
            if selector is None:
                route = self._routes[-1]
                selector = random.choices(list(route), list(route.values()))[0]
            if key is not None and (choose := self._splits.get(selector)):
                selector = str(choose(key))
            version = self.find(selector)
            version.leases += 1
        try:
            yield version
        finally:
            with self._lock:
                version.leases -= 1
                if version.forgotten:
                    self._forget(version)
                if not self.needed(version):
                    self._trim(version.ref.name)

    def _find(self, selector: str) -> Version | None:
        if selector == BASE_ADAPTER.name:
            return self._base
        name, at, number = selector.partition("@")
        if at:
            is_number = number.isascii() and number.isdecimal() and len(number) < 10
            return self.known(AdapterRef(name, int(number))) if is_number else None
        if live := self._live.get(name):
            return live[-1]
        found = self._find_checkpoint(self.default_adapter, selector)
        return None if found is None else self.restore(*found)

    # -- versions --------------------------------------------------------------------------------

    def add(self, adapter: str, info: VersionInfo, number: int | None = None) -> Version:
        """Adds a version, which is not live yet. Those from the same directory with other content become superseded.

        `number`: that the version gets, and keeps until it is unloaded; None: the one that this content had before, or
        else the next one.

        Raises:
            ConflictError: the name has had a version of this number, or of a higher one.
        """
        with self._lock:
            for older in self._versions.values():
                same_place = bool(info.root) and older.info.root == info.root
                older.superseded |= same_place and older.info.digest != info.digest
            earlier = self._number_of(adapter, info.digest)
            if earlier is not None and number in (None, earlier):
                version = self.restore(AdapterRef(adapter, earlier), info)
                version.numbered |= number is not None
                return version
            next_number = self._next.get(adapter) or self._first_version(adapter)
            least = 0 if adapter not in self._next and next_number == 1 else next_number
            if number is not None and number < least:
                raise ConflictError(
                    f"lora_name: {adapter!r} has had version {next_number - 1}, and the number of a version is used "
                    f"once: load {adapter}@{next_number} or a later one, or choose another name.",
                    param="lora_name",
                )
            ref = AdapterRef(adapter, next_number if number is None else number)
            self._next[adapter] = ref.version + 1
            version = self._versions[ref] = Version(ref, info, numbered=number is not None)
            return version

    def restore(self, ref: AdapterRef, info: VersionInfo) -> Version:
        """Adds a version from files under the number that it had, unless it is there already with files."""
        with self._lock:
            next_number = self._next.get(ref.name) or self._first_version(ref.name)
            self._next[ref.name] = max(next_number, ref.version + 1)
            version = self._versions.get(ref)
            if version is None or version.forgotten:
                version = self._versions[ref] = Version(ref, info)
            elif version.superseded:
                version.info, version.superseded = info, False
            return version

    def number_from(self, adapter: str, least: int) -> None:
        """The next version of this adapter gets at least this number."""
        with self._lock:
            next_number = self._next.get(adapter) or self._first_version(adapter)
            self._next[adapter] = max(next_number, least)

    def flip(self, ref: AdapterRef) -> None:
        """Makes a version live. Requests that name the adapter get it from now on.

        Raises:
            UnknownModelError: the version was unloaded meanwhile.
        """
        started = time.perf_counter()
        with self._lock:
            version, live = self._versions.get(ref), self._live.setdefault(ref.name, [])
            if version is None or version.forgotten:
                raise UnknownModelError(f"{ref} was unloaded before it went live; load it again.", param="lora_name")
            takes_over = not live and self._default_takes_over and ref.name == self.default_adapter
            if live[-1:] != [version]:
                self.swaps += bool(live)
                live.append(version)
            if takes_over and self.route() == _BASE_ROUTE:
                self.set_route({ref.name: 1.0})
            self._trim(ref.name)
        self.flip_s_last = time.perf_counter() - started
        self.flip_s_max = max(self.flip_s_max, self.flip_s_last)

    def set_files(self, version: Version, root: str, digest: str = "", checkpoint: str | None = None) -> None:
        """Records that a checkpoint or a copy holds the version's weights, to be read when they are needed again. See
        `VersionInfo`; what is left out stays as it is."""
        with self._lock:
            old = version.info
            version.info = replace(old, root=root, digest=digest or old.digest, checkpoint=checkpoint or old.checkpoint)
            version.superseded = False

    def live(self, adapter: str) -> Version | None:
        """The live version of a name."""
        with self._lock:
            return next(reversed(self._live.get(adapter, [])), None)

    def numbers(self, adapter: str) -> frozenset[int]:
        """The numbers of the versions of an adapter that there are, also of forgotten ones that are still leased."""
        with self._lock:
            return frozenset(ref.version for ref in self._versions if ref.name == adapter)

    def set_history(self, versions: Sequence[Version]) -> None:
        """Makes the last of these versions of one adapter live, as if they had been live in this order."""
        with self._lock:
            self._live[versions[-1].ref.name] = [*versions]

    def last_live(self, adapter: str) -> tuple[Version, ...]:
        """The version that a rollback would make live, if there is one, and the live version."""
        with self._lock:
            return tuple(self._live.get(adapter, [])[-2:])

    def discard(self, ref: AdapterRef) -> None:
        """Forgets a version and routes that use it, if it is known. If it is live, the one before it is live again."""
        with self._lock:
            version = self._versions.get(ref)
            if version is not None and not version.forgotten:
                self._forget(version)
                self._routes = [route for route in self._routes if all(map(self._find, route))] or [_BASE_ROUTE]

    def rollback(self, adapter: str, available: Callable[[Version], bool]) -> Version:
        """Makes the previously live version live again.

        Raises:
            UnknownModelError: nothing has that name.
            ConflictError: there is no earlier version, or its weights are not `available`.
        """
        with self._lock:
            self.find(adapter)
            live = self._live.get(adapter, [])
            if len(live) < 2:
                raise ConflictError(f"{adapter!r} has no earlier version to go back to.", param="lora_name")
            if not available(live[-2]):
                raise ConflictError(f"The weights of {live[-2].ref} are in no file or memory now.", param="lora_name")
            live.pop()
            self.swaps += 1
            return live[-1]

    def unload(self, selector: str) -> tuple[Version, ...]:
        """Forgets a version, or all versions of a name.

        Raises:
            UnknownModelError: there is no such version.
            ConflictError: the route uses a version to be unloaded, its name is split, or `selector` is one version and
                it is live.
        """
        with self._lock:
            version = self.find(selector)
            if version is self._base:
                raise UnknownModelError("The base model is no adapter; it cannot be unloaded.", param="lora_name")
            whole = selector == version.ref.name
            going = tuple(v for v in self.versions() if v.ref.name == selector) if whole else (version,)
            if version.ref.name in self._splits:
                raise ConflictError(
                    f"versions of {version.ref.name!r} are being compared: use POST /v1/training/compare/stop first.",
                    param="lora_name",
                )
            if set(going) & self._routed():
                raise ConflictError(
                    f"{version.ref.name!r} serves requests that name no adapter: use POST /v1/adapters/route first.",
                    param="lora_name",
                )
            if not whole and version is self.live(version.ref.name):
                raise ConflictError(f"{version.ref} is live; unload {version.ref.name!r} or roll back.", "lora_name")
            for one in going:
                self._forget(one)
            return going

    # -- the route -------------------------------------------------------------------------------

    def route(self) -> Mapping[str, float]:
        """The share of each selector in the requests that name no adapter. The shares add up to 1."""
        return self._routes[-1]

    @property
    def route_changed(self) -> bool:
        """Whether `rollback_route` has something to take back."""
        return len(self._routes) > 1

    def set_route(self, shares: Mapping[str, float]) -> None:
        """Sets the shares. Raises UnknownModelError if a selector has no version."""
        with self._lock:
            for selector in shares:
                self.find(selector)
            if shares != self._routes[-1]:
                self._routes = [*self._routes[-1:], shares]
                self.swaps += 1

    def rollback_route(self) -> Mapping[str, float]:
        """Takes back the last `set_route`. Raises ConflictError if there is none to take back."""
        with self._lock:
            if not self.route_changed:
                raise ConflictError("The route has no earlier state to go back to.")
            for selector in self._routes[0]:
                self.find(selector)
            self._routes.pop()
            self.swaps += 1
            return self._routes[-1]

    def split(self, adapter: str, choose: Split | None) -> None:
        """Requests that mean the adapter by its name get the versions that `choose` says; None: the live version again.
        The caller leases these versions."""
        with self._lock:
            self._splits.pop(adapter, None)
            if choose is not None:
                self._splits[adapter] = choose

    # -- state -----------------------------------------------------------------------------------

    def versions(self) -> tuple[Version, ...]:
        """All versions that are not forgotten, sorted by name and number. Those of checkpoints are added on demand."""
        with self._lock:
            known = [version for version in self._versions.values() if not version.forgotten]
        return tuple(sorted(known, key=lambda version: (version.ref.name, version.ref.version)))

    def needed(self, version: Version) -> bool:
        """Whether the version is leased, is live, is in the route, or would be live after a rollback."""
        with self._lock:
            live_or_next = self._live.get(version.ref.name, [])[-2:]
            return version.leases > 0 or version in live_or_next or version in self._routed()

    def needs_files(self, root: str) -> bool:
        """Whether a version that is needed comes from the files at `root`."""
        with self._lock:
            return any(version.info.root == root and self.needed(version) for version in self._versions.values())

    def check_integrity(self) -> None:
        """Raises AssertionError if names, versions and leases do not agree."""
        with self._lock:
            for ref, version in self._versions.items():
                assert version.ref == ref
                assert ref.version < self._next[ref.name]
                assert version.leases >= version.forgotten
            for name, live in self._live.items():
                assert all(self._versions[v.ref] is v and v.ref.name == name and not v.forgotten for v in live)
            for name in self._splits:
                assert self._live.get(name)

    def _routed(self) -> set[Version]:
        return {version for selector in self._routes[-1] if (version := self._find(selector))}

    def _trim(self, adapter: str) -> None:
        """Forgets versions of the adapter that are neither needed nor among the newest few."""
        for version in [version for version in self.versions() if version.ref.name == adapter][:-KEPT_VERSIONS]:
            if not version.numbered and not self.needed(version):
                self._forget(version)

    def _forget(self, version: Version) -> None:
        """No selector finds the version any more. It is gone when its last lease ends."""
        version.forgotten = True
        live = self._live.get(version.ref.name, [])
        live[:] = [other for other in live if other is not version]
        if not version.leases and self._versions.get(version.ref) is version:
            del self._versions[version.ref]
            self.gone_total += 1
