"""reasoning-gym: its tasks, their data sets, and their own scoring. Imported on first use: it takes seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring import fields
from mlx_parallm.rl.scoring.guard import TextAsCodeError, no_code_from_text, refusals
from mlx_parallm.rl.scoring.names import PARAM
from mlx_parallm.rl.scoring.sample import Sample, Scorer

PREFIX = "reasoning_gym:"
NOT_INSTALLED = "reasoning-gym is not installed: `uv sync --extra reasoning-gym` installs it"

_NOT_ALONE = frozenset({"composite"})
"""Cannot be made without a configuration."""
_TUPLES = frozenset({"arc_agi", "rearc"})
"""Compare boards as tuples of tuples, which JSON turned into lists."""

_TRIES = 10


class UnusableTaskError(Exception):
    """Its scoring always runs text as code."""


def installed() -> bool:
    return importlib.util.find_spec("reasoning_gym") is not None


def task_names() -> tuple[str, ...]:
    return tuple(sorted(name for name in _factory().DATASETS if name not in _NOT_ALONE))


def dataset(task: str, **config: Any) -> Any:
    """Entries by index. `config`: fields of the task's configuration: seed, size and its own."""
    return _factory().create_dataset(task, **config)


def entries(data: Any, count: int) -> Iterator[dict[str, Any]]:
    """The first `count`, without those that the task's generator fails to make.

    Raises:
        Exception: what the generator raised, where it made none of them.
    """
    made, fault = 0, Exception("the data set is empty")
    for index in range(min(count, len(data))):
        try:
            entry = data[index]
        except Exception as error:  # noqa: BLE001 - a draw that the generator did not foresee
            fault = error
        else:
            made += 1
            yield entry
    if not made:
        raise fault


def scorer(task: str) -> Scorer:
    """The task's own `score_answer` with `metadata.entry`, of the last <answer></answer>'s content or the whole text.

    A text that was cut off scores 0, and so does one that the task fails to read, if it can read the entry's answer.
    No text is run as code: an answer that would be is a wrong one.

    Raises:
        InvalidRequestError: no such task.
        UnusableTaskError: its scoring always runs text as code.
    """
    if task not in task_names():
        raise InvalidRequestError(f"{PARAM}: reasoning-gym has no task {task}", PARAM)
    data = dataset(task, seed=0)
    _prove(data)
    from reasoning_gym.utils import extract_answer

    def score(sample: Sample) -> float:
        entry = _restored(task, fields.entry(sample.metadata))
        if not sample.ended:
            return 0.0
        answer = extract_answer(sample.text)
        return _score(data, sample.text.strip() if answer is None else answer, entry)

    return score


def _score(data: Any, answer: str, entry: dict[str, Any]) -> float:
    with no_code_from_text():
        try:
            return float(data.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 - the answer is at fault, or the entry
            data.score_answer(entry["answer"], entry)  # raises where the entry is at fault
            return 0.0


def _prove(data: Any) -> None:
    """Scores one of the task's own answers twice; the first time, unguarded, imports what the scoring needs."""
    entry = next(entries(data, _TRIES))
    data.score_answer(entry["answer"], entry)
    before = refusals()
    with contextlib.suppress(TextAsCodeError), no_code_from_text():
        data.score_answer(entry["answer"], entry)
    if refusals() > before:
        raise UnusableTaskError("its scoring runs text as code; choose another task")


def _restored(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "metadata": _tuples(entry["metadata"])} if task in _TUPLES else entry


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _factory() -> Any:
    if not installed():
        raise InvalidRequestError(f"{PARAM}: {NOT_INSTALLED}", PARAM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of one of its dependencies
        import reasoning_gym.factory
    return reasoning_gym.factory
