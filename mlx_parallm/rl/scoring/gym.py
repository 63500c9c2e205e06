"""Tasks, data sets and scoring of reasoning-gym. While it scores, no text runs as code.

The package takes seconds to import, so it is imported on first use.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from mlx_parallm.optional_packages import REASONING_GYM
from mlx_parallm.rl.scoring.sample import Metadata, Scorer, ScorerError, ScorerInput, json_object, refused, unusable

PREFIX = "reasoning_gym:"

_ENTRY_KEYS = ("question", "answer", "metadata")

_NEEDS_CONFIGURATION = frozenset({"composite"})
_USES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks that compare boards as tuples of tuples, which JSON has turned into lists."""

_TRIES = 10


def task_names() -> tuple[str, ...]:
    return tuple(sorted(name for name in _factory().DATASETS if name not in _NEEDS_CONFIGURATION))


def dataset(task: str, **config: Any) -> Any:
    """A data set, whose entries have indices. `config`: seed, size and other fields of the task's configuration."""
    return _factory().create_dataset(task, **config)


def entries(data: Any, count: int) -> Iterator[dict[str, Any]]:
    """The first `count` entries, without those that the task's generator fails to make.

    Raises:
        Exception: what the generator raised, if it made no entry at all.
    """
    made, fault = 0, Exception("the data set is empty")
    for index in range(min(count, len(data))):
        try:
            one = data[index]
        except Exception as error:  # noqa: BLE001 - random numbers that the generator does not handle
            fault = error
        else:
            made += 1
            yield one
    if not made:
        raise fault


def entry(metadata: Metadata) -> dict[str, Any]:
    """`entry`: one entry of a reasoning-gym data set, as an object or its JSON text."""
    value = json_object(metadata, "entry")
    if missing := [key for key in _ENTRY_KEYS if key not in value]:
        raise refused("entry", f"lacks {', '.join(missing)}: give the entry as the data set has it")
    return value


def scorer(task: str) -> Scorer:
    """A scorer that calls the task's own `score_answer` with the answer in a text and `metadata.entry`.

    The answer is what the last <answer></answer> contains, or else the whole text. A text that was cut off scores 0,
    and so does one that the task cannot read although it can read the entry's answer. No text runs as code, so an
    answer that would run is wrong.

    Raises:
        InvalidRequestError: no such task.
        ScorerError: its scoring always runs text as code.
    """
    if task not in task_names():
        raise unusable(f"reasoning-gym has no task {task}")
    data = dataset(task, seed=0)
    _check_usable(data)
    from reasoning_gym.utils import extract_answer

    def score(completion: ScorerInput) -> float:
        own = _with_tuples(task, entry(completion.metadata))
        if not completion.ended:
            return 0.0
        answer = extract_answer(completion.text)
        return _score(data, completion.text.strip() if answer is None else answer, own)

    return score


def _score(data: Any, answer: str, own: dict[str, Any]) -> float:
    with no_code_from_text():
        try:
            return float(data.score_answer(answer, own))
        except Exception:  # noqa: BLE001 - caused by the answer, or by the entry
            data.score_answer(own["answer"], own)  # raises if the entry is the cause
            return 0.0


def _check_usable(data: Any) -> None:
    """Checks with one of the task's own answers that the scoring does not always run text as code.

    Scores it twice: the first time, without the guard, imports what the scoring needs.

    Raises:
        ScorerError: it does.
    """
    own = next(entries(data, _TRIES))
    data.score_answer(own["answer"], own)
    before = refusals()
    with contextlib.suppress(TextAsCodeError), no_code_from_text():
        data.score_answer(own["answer"], own)
    if refusals() > before:
        raise ScorerError("its scoring runs text as code; choose another task")


def _with_tuples(task: str, own: dict[str, Any]) -> dict[str, Any]:
    return {**own, "metadata": _tuples(own["metadata"])} if task in _USES_TUPLES else own


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _factory() -> Any:
    if not REASONING_GYM.installed:
        raise unusable(REASONING_GYM.missing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies causes it
        import reasoning_gym.factory
    return reasoning_gym.factory


# ---- the guard -----------------------------------------------------------------------------------


class TextAsCodeError(Exception):
    """Something called eval or exec with text."""


class _Guard:
    active = False
    refusals = 0


@contextmanager
def no_code_from_text() -> Iterator[None]:
    """In the block, eval and exec of text raise TextAsCodeError. This holds for the whole process: use one thread only.

    Many tasks evaluate an answer, or a field of the entry, and a client can write both. Code of files still runs, so
    imports work; but a module that defines a dataclass runs text as code, so it must be imported before.
    """
    _install_hook()
    _Guard.active = True
    try:
        yield
    finally:
        _Guard.active = False


def refusals() -> int:
    """How often text was refused so far, even if the library caught the error."""
    return _Guard.refusals


@cache
def _install_hook() -> None:
    sys.addaudithook(_audit)  # an audit hook cannot be removed


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _Guard.active or event != "exec":
        return
    origin = str(getattr(arguments[0], "co_filename", "<unknown>"))
    if origin.startswith("<") and not origin.startswith("<frozen "):
        _Guard.refusals += 1
        raise TextAsCodeError("text is not run as code here")
