"""Scorers by name. Loading one runs its code, which is for the child process alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import SupportsFloat

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring import fields, gym, texts
from mlx_parallm.rl.scoring.names import PARAM, terms
from mlx_parallm.rl.scoring.sample import Metadata, Scorer

GROUP = "mlx_parallm.scorers"
"""Entry points of a user's package: name = "module:callable"."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """`read`: raises InvalidRequestError where the metadata lacks what the scorer reads."""

    read: Callable[[Metadata], object]
    load: Callable[[], Scorer]


def _gsm8k() -> Scorer:
    from mlx_parallm.rl.scoring.mathematics import gsm8k  # sympy takes seconds to import

    return gsm8k


def _math() -> Scorer:
    from mlx_parallm.rl.scoring.mathematics import mathematics

    return mathematics


BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin(fields.answer, lambda: texts.exact),
    "gsm8k": Builtin(fields.number, _gsm8k),
    "json_schema": Builtin(fields.schema, lambda: texts.json_schema),
    "length": Builtin(fields.target_length, lambda: texts.length),
    "math": Builtin(fields.answer, _math),
    "regex": Builtin(fields.pattern, lambda: texts.regex),
}
"""These names win over entry points."""


@lru_cache(maxsize=64)
def load(name: str) -> Scorer:
    """The scorer of a name, or of a weighted sum of names.

    Raises:
        Exception: whatever its package raised on import.
    """
    parts = [(term.weight, load_one(term.scorer)) for term in terms(name)]
    return lambda sample: math.fsum(weight * as_number(scorer(sample)) for weight, scorer in parts)


def load_one(name: str) -> Scorer:
    if name in BUILTINS:
        return BUILTINS[name].load()
    if name.startswith(gym.PREFIX):
        return gym.scorer(name.removeprefix(gym.PREFIX))
    for point in entry_points(group=GROUP, name=name):
        scorer: Scorer = point.load()
        return scorer
    raise InvalidRequestError(f"{PARAM}: {name} is unknown", PARAM)


def as_number(value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"gave {type(value).__name__}, not a number")
    return float(value)
