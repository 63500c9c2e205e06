"""Scorers by name: the built-in ones, those of packages, and weighted sums such as `0.8*exact + 0.2*regex`.

Loading a scorer runs its code, so only child processes do it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import FrameType
from typing import Any

from mlx_parallm.errors import InvalidRequestError, shown
from mlx_parallm.extras import MATH, Extra
from mlx_parallm.rl.scoring import gym, reward_models, sample
from mlx_parallm.rl.scoring.sample import Metadata, Scorer, ScorerInput

GROUP = "mlx_parallm.scorers"
"""Entry points of a user's package: name = "module:callable"."""

PARAM = "scoring_function"

NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}(?::[A-Za-z0-9_.-]{1,64})?"
_WEIGHT = r"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*\*\s*"
_MAX_CHARACTERS = 512
_MAX_TERMS = 16

_MATH_LIMIT_S = 2.0
"""Processor time for one answer to mathematics. An expression that takes longer is wrong. math-verify's own limits are
off: they count the time of a busy machine, and raise their exception wherever the main thread is."""

_MATH_MARKS = ("$", "\\(", "\\[", "\\boxed")


# ---- names ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    weight: float
    scorer: str


def terms(text: str) -> tuple[Term, ...]:
    """The terms of one scorer's name, or of a weighted sum of names.

    `exact` is one term of weight 1. Every term of a sum is written weight*name, with any finite weight.

    Raises:
        InvalidRequestError: the text is neither a name nor a sum.
    """
    found = split_terms(text, NAME, _MAX_CHARACTERS)
    if found is None:
        raise _malformed(text)
    return found


def split_terms(text: str, name: str, most: int) -> tuple[Term, ...] | None:
    """The terms of a text whose names match the regular expression `name`. None: it is no sum, or has more than `most`
    characters."""
    if len(text) > most:
        return None
    if re.fullmatch(name, text):
        return (Term(1.0, text),)
    term, found, at = re.compile(rf"{_WEIGHT}({name})\s*"), [], 0
    while match := term.match(text, at):
        found.append(Term(float(match[1]), match[2]))
        at = match.end()
        if at == len(text) or text[at] != "+":
            break
        at += 1
    if not match or at != len(text) or len(found) > _MAX_TERMS or not all(math.isfinite(t.weight) for t in found):
        return None
    return tuple(found)


def _malformed(text: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{PARAM}: {shown(text)} cannot be read: give one name, or up to {_MAX_TERMS} terms with finite weights "
        "such as '0.8*exact + 0.2*regex'",
        PARAM,
    )


# ---- built-in scorers ----------------------------------------------------------------------------
# They return 0 to 1, and those that need a complete answer return 0 if it was cut off.


def exact(completion: ScorerInput) -> float:
    """1 if the stripped text equals the stripped `metadata.answer` and the sequence ended by itself."""
    return float(completion.ended and completion.text.strip() == sample.answer(completion.metadata).strip())


def regex(completion: ScorerInput) -> float:
    r"""1 if `metadata.pattern` is found anywhere in the text (`re.search`), even if the text was cut off.

    `\A` and `\Z` anchor the pattern to the whole text.
    """
    return float(sample.pattern(completion.metadata).search(completion.text) is not None)


def json_schema(completion: ScorerInput) -> float:
    """1 if the whole text is JSON that is valid under `metadata.schema`, and the sequence ended by itself."""
    validator = sample.schema(completion.metadata)
    try:
        value = json.loads(completion.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return float(completion.ended and validator.is_valid(value))


def length(completion: ScorerInput) -> float:
    """exp(-ln²(n / target)) for n completion tokens: 1 at `metadata.target_length`, 0.62 at half and at twice that.

    0 if the sequence was cut off: its length is not its own choice.
    """
    if not completion.ended or not completion.completion_tokens:
        return 0.0
    target = sample.target_length(completion.metadata)
    return math.exp(-(math.log(completion.completion_tokens / target) ** 2))


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# ---- mathematics, by math-verify -----------------------------------------------------------------
# A text's answer is its \boxed{} expression, or else its last one. math-verify evaluates numbers and operators only.


def gsm8k(completion: ScorerInput) -> float:
    """1 if the text's number equals that of `metadata.answer`.

    The number is the one after the last `####`, or else the last one in the text. With math-verify, it may be an
    expression too, such as a fraction.
    """
    gold, text = sample.number(completion.metadata), completion.text.rpartition("####")[2]
    if MATH.installed:
        return _equal(completion, gold, text)
    return float(completion.ended and sample.last_number(text) == float(gold))


def mathematics(completion: ScorerInput) -> float:
    """1 if the text is `metadata.answer`, or if its expression equals that of `metadata.answer`.

    `metadata.answer` is a number or LaTeX, with or without $.
    """
    gold = sample.answer(completion.metadata)
    if completion.ended and completion.text.strip() == gold.strip():
        return 1.0
    return _equal(completion, gold, completion.text)


def _equal(completion: ScorerInput, gold: str, text: str) -> float:
    import math_verify  # takes seconds: it imports sympy

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    try:
        with cpu_limit(_MATH_LIMIT_S):
            wanted = _parsed_as_math(gold)
            if not wanted:
                raise ValueError("metadata.answer is no mathematical expression that math-verify can read")
            if not completion.ended:
                return 0.0
            given = _parsed(text) or _parsed_as_math(text)
            return float(math_verify.verify(wanted, given, timeout_seconds=None))
    except TooSlowError:
        return 0.0


def _parsed_as_math(text: str) -> list[Any]:
    """Parses a text. If it has no marks of mathematics, such as $, the whole text is read as LaTeX."""
    return _parsed(text if any(mark in text for mark in _MATH_MARKS) else f"${text.strip()}$")


def _parsed(text: str) -> list[Any]:
    """The expressions in the text, and after them the texts that they come from; empty if there are none."""
    import math_verify

    return list(math_verify.parse(text, parsing_timeout=None))


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in scorer, which reads `metadata[key]`.

    Attributes:
        bound: raises InvalidRequestError if the value is missing, of the wrong type or too large. It takes no time.
        read: raises InvalidRequestError if the value cannot be used. It may take long. None: `bound` checks everything.
        limit_s: processor time for one completion, in seconds; None: the scorer has a time limit of its own.
        imports: a module that takes long to import, so that loading the scorer imports it, not the first completion.
            It need not be installed.
        needs: the optional package that the scorer uses.
    """

    key: str
    bound: Callable[[Metadata], object]
    scorer: Scorer
    read: Callable[[Metadata], object] | None = None
    limit_s: float | None = 1.0
    imports: str | None = None
    needs: Extra | None = None

    def load(self) -> Scorer:
        if self.imports and find_spec(self.imports) is not None:
            import_module(self.imports)
        return self.scorer


BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin("answer", sample.answer, exact),
    "gsm8k": Builtin("answer", sample.number, gsm8k, limit_s=None, imports="math_verify"),
    "json_schema": Builtin("schema", sample.schema_text, json_schema, sample.schema, imports="jsonschema"),
    "length": Builtin("target_length", sample.target_length, length),
    "math": Builtin("answer", sample.answer, mathematics, limit_s=None, imports="math_verify", needs=MATH),
    "regex": Builtin("pattern", sample.pattern_text, regex, sample.pattern),
}
"""These names take precedence over entry points."""


# ---- loading -------------------------------------------------------------------------------------


def load_one(name: str) -> Scorer:
    """The scorer of a name that a request may give: a built-in one, a task of reasoning-gym, a reward model, or a
    package's own.

    Raises:
        Exception: a package's scorer may raise anything when it is imported.
    """
    if name in BUILTINS:
        return _limited(BUILTINS[name])
    if name.startswith(gym.PREFIX):
        return gym.scorer(name.removeprefix(gym.PREFIX))
    if name.startswith(reward_models.PREFIX):
        return reward_models.scorer(name)
    for point in entry_points(group=GROUP, name=name):
        scorer: Scorer = point.load()
        return scorer
    raise InvalidRequestError(f"{PARAM}: {name} is unknown", PARAM)


def _limited(entry: Builtin) -> Scorer:
    """The scorer, which raises TooSlowError if a completion takes too long."""
    scorer, limit_s = entry.load(), entry.limit_s
    if limit_s is None:
        return scorer

    def score(completion: ScorerInput) -> float:
        with cpu_limit(limit_s):
            return scorer(completion)

    return score


class TooSlowError(BaseException):
    """Not an Exception, so that no library catches it as one of its own."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises TooSlowError in the block when it has used this much processor time. Main thread only.

    Processor time is counted, so that a busy machine costs nobody a reward. The limit interrupts Python code and `re`,
    which checks for signals while it matches.
    """

    def expired(signal_number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, expired)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
