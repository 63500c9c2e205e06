"""Names of adapters and tags of checkpoints, and the directories that adapters may be read from."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.errors import InvalidRequestError

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")
_RULE = "use 1 to 64 letters, digits, '.', '_' and '-', not starting with '.'"
_SHOWN_CHARACTERS = 160


def check_name(name: str, what: str = "lora_name") -> str:
    """The name, when it is a plain one and not a selector's.

    Raises:
        InvalidRequestError: other characters, too long, or reserved; `param` is `what`.
    """
    return _checked(name, what, frozenset({"base", "latest", "best", "route", "rollback"}))


def check_tag(tag: str) -> str:
    """The checkpoint tag, when a user may give it; `best` is one.

    Raises:
        InvalidRequestError: other characters, too long, or reserved.
    """
    return _checked(tag, "tags", frozenset({"base", "latest"}))


def shown(text: str) -> str:
    """Quoted ASCII, cut short: fit for a message, whatever the text holds."""
    return ascii(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


def _checked(name: str, what: str, reserved: frozenset[str]) -> str:
    if not _PLAIN.fullmatch(name):
        raise InvalidRequestError(f"{what}: {shown(name)} is not a plain name: {_RULE}", what)
    if name in reserved or _CHECKPOINT.fullmatch(name):
        raise InvalidRequestError(f"{what}: {shown(name)} is reserved: choose another name", what)
    return name


class AdapterRoots:
    """The directories under which adapters may be read. Symlinks count for where they lead."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(Path(os.path.realpath(root.expanduser())) for root in roots)

    def resolve(self, path: str) -> Path:
        """The real path of an adapter's directory; a relative `path` is tried against each root in turn.

        Raises:
            InvalidRequestError: there is no root, or no such directory inside one. The message is the same
                whether or not `path` exists outside.
        """
        if not self._roots:
            raise InvalidRequestError(
                "lora_path: no directory is allowed: start the server with --allowed-adapter-roots", "lora_path"
            )
        for root in self._roots:
            real = _real_directory(root, path)
            if real is not None and self.inside(real):
                return real
        raise InvalidRequestError(
            f"lora_path: {shown(path)} is no directory inside the allowed roots: "
            "name one that is there, absolute or relative to a root of --allowed-adapter-roots",
            "lora_path",
        )

    def inside(self, path: Path) -> bool:
        """Whether the real path is a root or lies under one."""
        try:
            real = Path(os.path.realpath(path))
        except (OSError, ValueError):  # a NUL, a lone surrogate
            return False
        return any(real.is_relative_to(root) for root in self._roots)


def _real_directory(root: Path, path: str) -> Path | None:
    if not path:
        return None
    try:
        real = os.path.realpath(root / path)
        return Path(real) if os.path.isdir(real) else None
    except (OSError, ValueError):
        return None
