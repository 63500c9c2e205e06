"""Names of scorers, and weighted sums of them: `0.8*exact + 0.2*regex`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mlx_parallm.adapters.names import shown
from mlx_parallm.errors import InvalidRequestError

PARAM = "scoring_function"

_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}(?::[A-Za-z0-9_.-]{1,64})?"
_PLAIN = re.compile(_NAME)
_TERM = re.compile(rf"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*\*\s*({_NAME})\s*")
_MOST_CHARACTERS = 512
_MOST_TERMS = 16


@dataclass(frozen=True, slots=True)
class Term:
    weight: float
    scorer: str


def terms(text: str) -> tuple[Term, ...]:
    """`exact` is one term of weight 1; in a sum every term is written weight*name, the weight any finite number.

    Raises:
        InvalidRequestError: it reads otherwise.
    """
    if _PLAIN.fullmatch(text):
        return (Term(1.0, text),)
    if len(text) > _MOST_CHARACTERS:
        raise _malformed(text)
    found, at = [], 0
    while match := _TERM.match(text, at):
        found.append(Term(float(match[1]), match[2]))
        at = match.end()
        if at == len(text) or text[at] != "+":
            break
        at += 1
    if not match or at != len(text) or len(found) > _MOST_TERMS or not all(math.isfinite(t.weight) for t in found):
        raise _malformed(text)
    return tuple(found)


def _malformed(text: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{PARAM}: {shown(text)} cannot be read: give one name, or up to {_MOST_TERMS} terms with finite weights "
        "such as '0.8*exact + 0.2*regex'",
        PARAM,
    )
