"""The command line that started this server, as a person can give it again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mlx_parallm.config import KEYS

_SECRETS = frozenset(name for key in KEYS.values() if key.secret for name in key.flags)
"""Flags whose values are secrets. `--print-config` masks the same ones."""

_MASK = "***"
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""The user and the password of a URL."""


def command_line(
    argv: Sequence[str] | None = None, interpreter: str | None = None, environ: Mapping[str, str] = os.environ
) -> str:
    """The command, begun as the user began it: by `uv run`, `uvx`, `python -m`, a name or a path. Empty if this process
    is no script of this package, such as a program that embeds the server. Secrets are masked."""
    script, *arguments = sys.argv if argv is None else argv
    path = Path(script)
    if path.name == "__main__.py" and path.parent.name == "mlx_parallm":
        began = [_typed(sys.orig_argv[0] if interpreter is None else interpreter), "-m", "mlx_parallm"]
    elif re.match("mlx[-_]parallm", path.name):
        began = [_typed(script)]
    else:
        return ""
    if "UV_RUN_RECURSION_DEPTH" in environ:
        began = ["uv", "run", *began]
    elif "UV" in environ:
        began = ["uvx", *began]
    return shlex.join([*began, *_masked(arguments)])


def _typed(program: str) -> str:
    """Its name, if that is enough to find it."""
    name = os.path.basename(program)
    found = shutil.which(name)
    return name if found and os.path.abspath(found) == os.path.abspath(program) else program


def _masked(arguments: Sequence[str]) -> Iterator[str]:
    is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_secret:
            is_secret = False
            yield _MASK
        elif name in _SECRETS:
            is_secret = not equals
            yield f"{name}={_MASK}" if equals else name
        else:
            yield _USER.sub(_MASK, argument)
