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
from mlx_parallm.rl.scoring.limits import cpu_limit
from mlx_parallm.rl.scoring.names import PARAM, terms
from mlx_parallm.rl.scoring.sample import Metadata, Sample, Scorer

GROUP = "mlx_parallm.scorers"
"""Entry points of a user's package: name = "module:callable"."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """A scorer of ours, which reads `metadata[key]`.

    `bound`: raises InvalidRequestError where that is absent, of the wrong kind or too large; takes no time. `read`:
    raises it where that cannot be used, and may take long; None: `bound` says it all. `limit_s`: processor time for
    one sample; None: it has a limit of its own.
    """

    key: str
    bound: Callable[[Metadata], object]
    load: Callable[[], Scorer]
    read: Callable[[Metadata], object] | None = None
    limit_s: float | None = 1.0


def _gsm8k() -> Scorer:
    from mlx_parallm.rl.scoring.mathematics import gsm8k  # sympy takes seconds to import

    return gsm8k


def _math() -> Scorer:
    from mlx_parallm.rl.scoring.mathematics import mathematics

    return mathematics


def _json_schema() -> Scorer:
    import jsonschema  # noqa: F401 - so that its import is no part of a sample's time

    return texts.json_schema


BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin("answer", fields.answer, lambda: texts.exact),
    "gsm8k": Builtin("answer", fields.number, _gsm8k, limit_s=None),
    "json_schema": Builtin("schema", fields.schema_text, _json_schema, fields.schema),
    "length": Builtin("target_length", fields.target_length, lambda: texts.length),
    "math": Builtin("answer", fields.answer, _math, limit_s=None),
    "regex": Builtin("pattern", fields.pattern_text, lambda: texts.regex, fields.pattern),
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
        return _limited(BUILTINS[name])
    if name.startswith(gym.PREFIX):
        return gym.scorer(name.removeprefix(gym.PREFIX))
    for point in entry_points(group=GROUP, name=name):
        scorer: Scorer = point.load()
        return scorer
    raise InvalidRequestError(f"{PARAM}: {name} is unknown", PARAM)


def _limited(builtin: Builtin) -> Scorer:
    """Raises TooSlowError where a sample takes too long."""
    scorer, limit_s = builtin.load(), builtin.limit_s
    if limit_s is None:
        return scorer

    def score(sample: Sample) -> float:
        with cpu_limit(limit_s):
            return scorer(sample)

    return score


def as_number(value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"gave {type(value).__name__}, not a number")
    return float(value)
