"""Checks names of adapters, tags of checkpoints, and paths of adapter directories that clients send."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.errors import InvalidRequestError

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")
_RULE = "use 1 to 64 letters, digits, '.', '_' and '-', not starting with '.'"
_SHOWN_CHARACTERS = 160
_MAX_PATH = 4096


def check_name(name: str, param: str = "lora_name") -> str:
    """Returns `name` if an adapter can have it: a plain name that is not reserved.

    Raises:
        InvalidRequestError: it has other characters, is too long, or is reserved.
    """
    return _checked(name, param, frozenset({"base", "base-model", "latest", "best", "route", "rollback"}))


def name_of_folder(folder: Path) -> str:
    """The name of the adapter in `folder` if nobody gives it one: plain, and different for every folder."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', folder.name)[:48]}.{digest}"


def check_tag(tag: str) -> str:
    """Returns `tag` if a user may give it to a checkpoint. The tag `best` is allowed.

    Raises:
        InvalidRequestError: it has other characters, is too long, or is reserved.
    """
    return _checked(tag, "tags", frozenset({"base", "latest"}))


def shown(text: str) -> str:
    """The text as quoted ASCII of limited length, safe to put in a message."""
    return ascii(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


def _checked(name: str, param: str, reserved: frozenset[str]) -> str:
    if not _PLAIN.fullmatch(name):
        raise InvalidRequestError(f"{param}: {shown(name)} is not a plain name: {_RULE}", param)
    if name in reserved or _CHECKPOINT.fullmatch(name):
        raise InvalidRequestError(f"{param}: {shown(name)} is reserved: choose another name", param)
    return name


class AdapterRoots:
    """The directories under which adapters may be read. Symlinks are resolved before a path is checked."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(Path(os.path.realpath(root.expanduser())) for root in roots)

    def resolve(self, path: str) -> Path:
        """The real path of an adapter's directory. A relative `path` is tried against each root in turn, then against
        the working directory.

        Raises:
            InvalidRequestError: there is no root, or no such directory inside one. The message does not reveal
                whether `path` exists outside the roots.
        """
        if not self._roots:
            raise InvalidRequestError(
                "no directory is allowed: start the server with --allowed-adapter-roots", "lora_path"
            )
        for start in (*self._roots, Path.cwd()):
            real = _real_directory(start, path)
            if real is not None and self.inside(real):
                return real
        raise InvalidRequestError(
            f"{shown(path)} is no directory inside the allowed roots: name one that is there, absolute, relative to a "
            "root of --allowed-adapter-roots, or relative to the server's working directory",
            "lora_path",
        )

    def inside(self, path: Path) -> bool:
        """Whether the path, with symlinks resolved, is a root or lies under one."""
        try:
            real = Path(os.path.realpath(path))
        except (OSError, ValueError):  # the path has a NUL or a lone surrogate
            return False
        return any(real.is_relative_to(root) for root in self._roots)


def _real_directory(start: Path, path: str) -> Path | None:
    if not 0 < len(path) <= _MAX_PATH:
        return None
    try:
        real = os.path.realpath(start / path)
        return Path(real) if os.path.isdir(real) else None
    except (OSError, ValueError):
        return None
