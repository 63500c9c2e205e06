"""Built-in scorers: for each a function of one completion, what it reads of the request's metadata, and its limits.

To add one, write its function and a row of BUILTINS.
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
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import Any

from mlx_parallm.errors import shown
from mlx_parallm.optional_packages import MATH, Extra
from mlx_parallm.rl.scoring.sample import Metadata, Scorer, ScorerInput, json_object, present, refused

_MATH_LIMIT_S = 2.0
"""Processor time for one answer to mathematics. An expression that takes longer is wrong. math-verify's own limits are
off: they count the time of a busy machine, and raise their exception wherever the main thread is."""

_MATH_MARKS = ("$", "\\(", "\\[", "\\boxed")

_NUMBER = re.compile(r"(?:(?<![\w).])[-+])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
"""A sign after a digit is that of a difference."""
_MAX_PATTERN = 4096
_MAX_SCHEMA = 2**16


# ---- what they read ------------------------------------------------------------------------------
# Each function reads one key of the metadata, and raises InvalidRequestError if it is missing or cannot be used. Those
# whose name ends in `_text` check only type and size, so they take no time whatever a client sends.


def answer(metadata: Metadata) -> str:
    """`answer`: a number, or text that is not blank."""
    value = present(metadata, "answer")
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise refused("answer", "must be text or a number")
    return str(value)


def number(metadata: Metadata) -> str:
    """`answer` as gsm8k has it: a number, or a solution that ends with `#### 42`. Returned without commas and $."""
    text = answer(metadata).rpartition("####")[2].strip()
    if not _NUMBER.fullmatch(text):
        raise refused("answer", f"must be a number, or end with '#### ' and one, not {shown(text)}")
    return _plain(text)


def last_number(text: str) -> float | None:
    """The last number in a text; None if it has none."""
    found = _NUMBER.findall(text)
    return float(_plain(found[-1])) if found else None


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")


def pattern_text(metadata: Metadata) -> str:
    """`pattern`: text of bounded length."""
    value = present(metadata, "pattern")
    if not isinstance(value, str) or len(value) > _MAX_PATTERN:
        raise refused("pattern", f"must be text of at most {_MAX_PATTERN} characters")
    return value


def pattern(metadata: Metadata) -> re.Pattern[str]:
    """`pattern` as a regular expression of Python's `re`. Compiling it may take long."""
    try:
        return re.compile(pattern_text(metadata))
    except (re.error, RecursionError, OverflowError) as error:
        raise refused("pattern", f"is not a regular expression: {error}") from error


def schema_text(metadata: Metadata) -> str:
    """`schema`: an object, or its JSON text; returned as JSON of bounded length."""
    text = json.dumps(json_object(metadata, "schema"))
    if len(text) > _MAX_SCHEMA:
        raise refused("schema", f"must have at most {_MAX_SCHEMA} characters as JSON")
    return text


def schema(metadata: Metadata) -> Any:
    """The validator of the JSON schema `schema`, which fetches no remote references. Checking it may take long."""
    return _validator(schema_text(metadata))


@lru_cache(maxsize=16)
def _validator(text: str) -> Any:
    """Cached, because all samples of a group have the same schema."""
    import jsonschema  # only requests with this scorer pay for it
    from jsonschema_specifications import REGISTRY

    value = json.loads(text)
    try:
        kind = jsonschema.validators.validator_for(value, default=jsonschema.Draft202012Validator)
        kind.check_schema(value)
    except Exception as error:  # a client's schema may make the library raise anything
        raise refused("schema", f"is not a JSON schema: {shown(str(getattr(error, 'message', error)))}") from error
    return kind(value, registry=REGISTRY)


def target_length(metadata: Metadata) -> float:
    """`target_length`: a number of tokens, at least 1."""
    value = present(metadata, "target_length")
    try:
        length = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        length = math.nan
    if not 1 <= length < math.inf:
        raise refused("target_length", "must be a number of tokens, at least 1")
    return length


# ---- built-in scorers ----------------------------------------------------------------------------
# They return 0 to 1, and those that need a complete answer return 0 if it was cut off.


def exact(completion: ScorerInput) -> float:
    """1 if the stripped text equals the stripped `metadata.answer` and the sequence ended by itself."""
    return float(completion.ended and completion.text.strip() == answer(completion.metadata).strip())


def regex(completion: ScorerInput) -> float:
    r"""1 if `metadata.pattern` is found anywhere in the text (`re.search`), even if the text was cut off.

    `\A` and `\Z` anchor the pattern to the whole text.
    """
    return float(pattern(completion.metadata).search(completion.text) is not None)


def json_schema(completion: ScorerInput) -> float:
    """1 if the whole text is JSON that is valid under `metadata.schema`, and the sequence ended by itself."""
    validator = schema(completion.metadata)
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
    target = target_length(completion.metadata)
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
    gold, text = number(completion.metadata), completion.text.rpartition("####")[2]
    if MATH.installed:
        return _equal(completion, gold, text)
    return float(completion.ended and last_number(text) == float(gold))


def mathematics(completion: ScorerInput) -> float:
    """1 if the text is `metadata.answer`, or if its expression equals that of `metadata.answer`.

    `metadata.answer` is a number or LaTeX, with or without $.
    """
    gold = answer(completion.metadata)
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
            found = _parsed(text) or _parsed_as_math(text)
            return float(math_verify.verify(wanted, found, timeout_seconds=None))
    except TooSlowError:
        return 0.0


def _parsed_as_math(text: str) -> list[Any]:
    """Parses a text. If it has no marks of mathematics, such as $, the whole text is read as LaTeX."""
    return _parsed(text if any(mark in text for mark in _MATH_MARKS) else f"${text.strip()}$")


def _parsed(text: str) -> list[Any]:
    """The expressions in the text, and after them the texts that they come from; empty if there are none."""
    import math_verify

    return list(math_verify.parse(text, parsing_timeout=None))


# ---- limits ------------------------------------------------------------------------------------


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


# ---- the table ---------------------------------------------------------------------------------


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
        """The scorer with its limit: it raises TooSlowError if a completion takes too long."""
        if self.imports and find_spec(self.imports) is not None:
            import_module(self.imports)
        limit_s = self.limit_s
        if limit_s is None:
            return self.scorer

        def score(completion: ScorerInput) -> float:
            with cpu_limit(limit_s):
                return self.scorer(completion)

        return score


BUILTINS: Mapping[str, Builtin] = {
    "exact": Builtin("answer", answer, exact),
    "gsm8k": Builtin("answer", number, gsm8k, limit_s=None, imports="math_verify"),
    "json_schema": Builtin("schema", schema_text, json_schema, schema, imports="jsonschema"),
    "length": Builtin("target_length", target_length, length),
    "math": Builtin("answer", answer, mathematics, limit_s=None, imports="math_verify", needs=MATH),
    "regex": Builtin("pattern", pattern_text, regex, pattern),
}
"""These names take precedence over entry points."""
