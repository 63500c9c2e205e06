"""argparse, with this project's errors: a ConfigError, and a suggestion for a mistyped flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from mlx_parallm.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit. Flags are never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse_known_args(  # type: ignore[override]  # argparse's overloads take any namespace class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Subcommands are parsed through here too, so a flag is compared with its own command's."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0].partition("=")[0])
        return parsed, []

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        close = get_close_matches(word, self._option_string_actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"{word}: unknown flag{hint}")
