"""PEFT's rank_pattern and alpha_pattern: regular expressions that must match a module path's whole tail."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mlx_parallm.adapters.files.disk import CONFIG_FILE, problem
from mlx_parallm.adapters.names import shown

Value = TypeVar("Value", int, float)

_LONGEST = 256
_MANY = 4096
_PLAIN = re.compile(r"[\w.\-^$\\]*", re.ASCII)
# What is left after these bounds backtracks in some thousand steps at most, whoever wrote the file.
_MANY_COMPLEX = 16
_MOST = {"*+?": 3, "|": 8, "(": 2, "{": 0}
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\(\?")


class Patterns(Generic[Value]):
    """Values by pattern; the first pattern that matches counts.

    Raises:
        AdapterFileError: not an object, a value or pattern is malformed, or a pattern is too complex to be safe.
    """

    def __init__(self, key: str, patterns: Any, value_of: Callable[[Any, str], Value]) -> None:
        patterns = patterns or {}
        if not isinstance(patterns, dict) or len(patterns) > _MANY:
            raise problem(f"{CONFIG_FILE}: {key} must be an object of at most {_MANY} patterns")
        if sum(not _PLAIN.fullmatch(text) for text in patterns) > _MANY_COMPLEX:
            raise problem(f"{CONFIG_FILE}: {key} has over {_MANY_COMPLEX} regular expressions: use plain module names")
        self._patterns: list[tuple[re.Pattern[str], Value]] = [
            (_compiled(key, text), value_of(value, f"{key}.{shown(text)}")) for text, value in patterns.items()
        ]

    def find(self, path: str, default: Value) -> Value:
        """The value for a module path as the file spells it."""
        return next((value for pattern, value in self._patterns if pattern.match(path)), default)


def _compiled(key: str, text: str) -> re.Pattern[str]:
    too_many = any(sum(map(text.count, characters)) > most for characters, most in _MOST.items())
    if len(text) > _LONGEST or too_many or _REPEATED_GROUP.search(text):
        raise problem(f"{CONFIG_FILE}: the pattern {shown(text)} of {key} is too complex: use plain module names")
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise problem(f"{CONFIG_FILE}: the pattern {shown(text)} of {key} is no regular expression: {error}") from error
