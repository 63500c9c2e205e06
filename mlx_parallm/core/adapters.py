"""Adapters as the other packages see them: names, and the protocol that manages them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

from mlx_parallm.core.json_values import ShownAs
from mlx_parallm.errors import InvalidRequestError, shown

if TYPE_CHECKING:
    from mlx_parallm.adapters.cards import AdapterCard, AdapterStats, CheckpointCard, KeptPart


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable version of one adapter."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


AdapterText = Annotated[AdapterRef, ShownAs(str, str)]
"""A version that answers show as `name@version`."""

BASE_ADAPTER = AdapterRef("base", 0)
"""The base model without an adapter: slot 0 of the bank."""

BEST = "best"
"""The tag of the checkpoint of the best version."""

INCUMBENT = "incumbent"
"""The tag of the checkpoint of the version that an automatic comparison began from, or that has won the last one."""


_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MOST_DIGITS = 9
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")
_RULE = "use 1 to 64 letters, digits, '.', '_' and '-', not starting with '.'"


def check_name(name: str, param: str = "lora_name") -> str:
    """Returns `name` if an adapter can have it: a plain name that is not reserved.

    Raises:
        InvalidRequestError: it has other characters, is too long, or is reserved.
    """
    return _checked(name, param, frozenset({"base", "base-model", "latest", BEST, "route", "rollback", "delete"}))


def check_tag(tag: str) -> str:
    """Returns `tag` if a user may give it to a checkpoint. The tag `best` is allowed.

    Raises:
        InvalidRequestError: it has other characters, is too long, or is reserved.
    """
    return _checked(tag, "tags", frozenset({"base", "latest"}))


def _checked(name: str, param: str, reserved: frozenset[str]) -> str:
    if not _PLAIN.fullmatch(name):
        raise InvalidRequestError(f"{param}: {shown(name)} is not a plain name: {_RULE}", param)
    if name in reserved or _CHECKPOINT.fullmatch(name):
        raise InvalidRequestError(f"{param}: {shown(name)} is reserved: choose another name", param)
    return name


def name_and_step(name: str) -> tuple[str, int | None]:
    """The adapter's name and the version's number in a name to load, which is `name` (the number is None) or
    `name@number`.

    Raises:
        InvalidRequestError: it is neither, or the name is not plain or reserved.
    """
    plain, at, number = name.partition("@")
    if at and not (number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS):
        raise InvalidRequestError(
            f"lora_name: after '@' comes the number of a version, of at most {_MOST_DIGITS} digits, and not "
            f"{shown(number)}",
            "lora_name",
        )
    return check_name(plain), int(number) if at else None


class AdapterClient(Protocol):
    """The asyncio interface of the adapters, used on the event loop's thread only.

    A *selector* names a version: `name` (its live version), `name@version`, or a checkpoint of the default adapter
    (`checkpoint-<step>`, a tag, or `latest`). `base` is the base model. The *route* decides which versions serve
    requests that name no adapter. Every method with a selector or name raises UnknownModelError if it is unknown.
    """

    def lease(self, selector: str | None, key: str | None = None) -> AbstractContextManager[AdapterRef]:
        """Gives the version that `selector` means now (None: one that the route draws), kept until the block ends.

        `key`: the user, session or group of a request. While versions of the adapter are compared, requests with the
        same key get the same one of them. None: the live version.
        """

    def find(self, selector: str) -> AdapterCard:
        """The card of a version. `base` has none."""

    def cards(self) -> tuple[AdapterCard, ...]:
        """All versions that can be requested, sorted by name and version."""

    async def load(self, name: str, path: str, replace: bool, base: str | None = None) -> AdapterCard:
        """Loads an adapter from disk and makes it the live version of `name`.

        If the live version has the same content already, no new version is made. `name@number` gives the version this
        number, which must be higher than that of any version that the name has had. It is then kept until it is
        unloaded. `base` is the name of its base model; None: the one that its files name, or else the first one.

        Raises:
            InvalidRequestError: the name is not plain, or it exists and `replace` is false; the path is outside the
                allowed roots; the files are not an adapter that fits this model, or may mean several base models.
            ConflictError: a version of that number has other content, or the number is too low.
        """

    async def folder_of(self, path: str) -> str:
        """The directory of the adapter that a path means, which may be a run, or name a checkpoint by a tag.

        Raises:
            InvalidRequestError: there is none inside the allowed roots, or it is a run with several adapters.
        """

    async def load_folder(self, path: str) -> str:
        """The name of the adapter in a directory. It is loaded first if no live version was read from there, and again
        if its files have been written since.

        Raises:
            InvalidRequestError: the path is outside the allowed roots; the files are not an adapter that fits this
                model.
        """

    async def loaded_folder(self, path: str) -> str | None:
        """The name of the adapter whose live version was read from a directory; None if there is none. No file is read,
        so the adapter's may have been written since."""

    @property
    def has_default_folder(self) -> bool:
        """Whether `default_name` can be anything but None."""

    async def default_name(self) -> str | None:
        """The name of the adapter that requests without one get because of `adapters.serve_folder`, loaded as
        `load_folder` does. None: the route says what they get, because there is no such folder or no adapter in it yet.

        Raises:
            InvalidRequestError: the files are not an adapter that fits this model.
        """

    async def unload(self, selector: str, base: str | None = None) -> tuple[AdapterRef, ...]:
        """Removes all versions of a name, or one version. Running sequences continue to their end. `base` is the name
        of its base model; None: whichever has it.

        Raises:
            UnknownModelError: there is no such adapter, or it is one of another base model.
            ConflictError: the version is the live one of its name, or the route uses it.
        """

    async def delete(self, name: str, dry_run: bool) -> tuple[KeptPart, ...]:
        """Removes an adapter, and all that the server has kept of it on the disk and in memory, also its subfolder of
        the adapter folder. Requests under way with it run to their end. The adapter must not be in training.

        Args:
            dry_run: nothing is removed.

        Returns:
            What is removed.

        Raises:
            UnknownModelError: there is no such adapter, and nothing is kept of one.
            ConflictError: the route uses it, or its versions are being compared.
            StorageError: something could not be removed.
        """

    def route(self) -> Mapping[str, float]:
        """The share of requests without an adapter that each selector gets. The shares sum to 1."""

    async def set_route(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Stages the selected versions, and then distributes requests without an adapter in proportion to `weights`.

        Raises:
            InvalidRequestError: no weight is above 0.
        """

    async def rollback(self, name: str | None) -> tuple[AdapterRef, Mapping[str, float]]:
        """Makes the previous version of `name` live again. None restores the previous route.

        Returns:
            The version that is live now (for None, the version with the largest share), and the route.

        Raises:
            ConflictError: there is nothing to go back to.
        """

    def checkpoints(self) -> tuple[CheckpointCard, ...]:
        """The checkpoints on disk, oldest first. Empty without a checkpoint folder."""

    async def save_checkpoint(
        self, selector: str | None, step: int | None, tags: Sequence[str], metrics: Mapping[str, float]
    ) -> CheckpointCard:
        """Writes a version to disk as a checkpoint.

        Args:
            selector: None is the live version of the default adapter.
            step: None is the next free step.

        Raises:
            InvalidRequestError: no checkpoint folder is configured, or a tag is not a plain name.
            ConflictError: there is a checkpoint of that step with different content.
        """

    def stats(self) -> AdapterStats:
        """The current counters and gauges. Never waits for the device."""
