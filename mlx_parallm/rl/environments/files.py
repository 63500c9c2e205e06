"""Tasks of a file: prompts with their answers and other columns, for rollouts and for requests that leave them out.

{"id": "sum-1", "prompt": "2 + 2 =", "answer": "4", "scoring_function": "exact"}
{"question": "How many legs have 3 dogs?", "answer": "3 dogs have 3 * 4 = 12 legs.\\n#### 12"}
{"messages": [{"role": "user", "content": "2 + 2 ="}], "ground_truth": 4, "level": "easy"}

The second row has gsm8k's own form. Only a prompt is always needed; without a configured reward, an answer is too.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.rl.environments.protocol import Message, Task
from mlx_parallm.rl.scoring import builtin
from mlx_parallm.rl.scoring.scorers import ANSWER, REWARD, terms
from mlx_parallm.rl.task_files import find_file, read_conversation, read_rows

PROBLEM_ID = "problem_id"
"""The key of a request's `metadata` for the id of a task."""

_PROMPTS = ("prompt", "question", "messages")
_ANSWERS = (ANSWER, "ground_truth", "solution")
_OWN = frozenset({"prompt", "messages", "id", "scoring_function"})
_MAX_COLUMNS = 64 * 1024
"""Bytes of a row's columns as JSON, as of the metadata of a request."""

_MAX_LEVEL = 64
"""Characters of a level's name; the rest is cut off."""


class FileTasks:
    """The tasks of a file: an environment of one answer, whose tasks are found by their id or their prompt."""

    def __init__(self, rows: Sequence[Task] = (), by_id: Mapping[str, Task] | None = None) -> None:
        self.rows = tuple(rows)
        self._by_id = by_id or {}
        self._by_text: dict[str | None, Task | None] = {}
        for task in rows:
            known = self._by_text.setdefault(_text(task), task)
            if known is not None and _answer_of(known) != _answer_of(task):  # conversations that only end alike
                self._by_text[_text(task)] = None

    def tasks(self, seed: int) -> Iterator[Task]:
        """Each task once before any comes again, in an order that depends on the seed."""
        for epoch in itertools.count():
            yield from random.Random(f"{seed}/{epoch}").sample(self.rows, len(self.rows))

    def find(self, problem_id: object, prompt: str | None) -> Task | None:
        """The task with this id, else the task with exactly this prompt, or with it as the user's last message."""
        by_id = self._by_id.get(str(problem_id)) if isinstance(problem_id, str | int) else None
        return by_id or (self._by_text.get(prompt) if prompt else None)


def _text(task: Task) -> str | None:
    """The prompt, or the last message of the user."""
    return next((turn["content"] for turn in reversed(task.messages) if turn["role"] == "user"), None)


def _answer_of(task: Task) -> Any:
    return task.collection.metadata.get(ANSWER)


def find_tasks(name: str, rewarded: bool = False) -> FileTasks | None:
    """The tasks of a file, or of a data set of the hub, which is downloaded unless it is in the cache.

    Args:
        rewarded: the configured reward scores the tasks, so that they need no answer.

    Returns:
        None if `name` is neither the path of a file nor the id of a data set.

    Raises:
        ConfigError: the file or the data set cannot be used.
    """
    file = find_file(name)
    return None if file is None else read_tasks(file, rewarded)


def read_tasks(file: Path, rewarded: bool = False) -> FileTasks:
    """Reads a file. A row that cannot be used is left out, and a line of the log says which.

    Raises:
        ConfigError: the file cannot be read, is too large, has no task, or has two tasks with one id.
    """
    answers: dict[str, Any] = {}

    def read(row: Mapping[str, Any]) -> tuple[str | None, Task]:
        number = _id(row)
        task = _task(row, number, rewarded)
        prompt = json.dumps([task.collection.prompt_text, task.messages])
        if answers.setdefault(prompt, _answer_of(task)) != _answer_of(task):
            raise ValueError("an earlier one has the same prompt and another answer")
        return number, task

    found, _ = read_rows(file, read)
    place_of_id: dict[str, str] = {}
    for place, (number, _) in found.items():
        if number is not None and (first := place_of_id.setdefault(number, place)) != place:
            raise ConfigError(f"environment: {first} and {place} of {file} have the same id; change one")
    if not found:
        needs = "a prompt (or question, or messages)" + ("" if rewarded else " and an answer")
        raise ConfigError(f"environment: {file} has no task; each row needs {needs}")
    by_id = {number: task for number, task in found.values() if number is not None}
    return FileTasks([task for _, task in found.values()], by_id)


def _id(row: Mapping[str, Any]) -> str | None:
    number = row.get("id")
    if number is not None and (not isinstance(number, str | int) or isinstance(number, bool)):
        raise ValueError("id must be text or a whole number")
    return None if number is None else str(number)


def _task(row: Mapping[str, Any], number: str | None, rewarded: bool) -> Task:
    """The task of a row, with the scorer that the row names, else gsm8k for a number and math for other text; or the
    configured reward. What scorers read are the answer and the id, as far as there are any; for a configured reward,
    all other columns too.

    Raises:
        ValueError, RecursionError, InvalidRequestError: the row lacks something, or it has the wrong type.
    """
    prompt, columns = _prompt(row), {key: column for key, column in row.items() if key not in _OWN}
    answer = _answer(row, rewarded)
    scorer = REWARD if rewarded else row.get("scoring_function") or ("gsm8k" if _is_number(answer) else "math")
    if not isinstance(scorer, str):
        raise ValueError("scoring_function must be text")
    terms(scorer)
    if (size := len(json.dumps(columns))) > _MAX_COLUMNS:
        raise ValueError(f"its columns have {size} bytes as JSON; at most {_MAX_COLUMNS} are kept")
    metadata = {
        **(columns if rewarded else {}),
        **({} if answer is None else {ANSWER: answer}),
        **({} if number is None else {PROBLEM_ID: number}),
    }
    if isinstance(prompt, str):
        collection = CollectionSpec(scorer, metadata, prompt_text=prompt)
        return Task(({"role": "user", "content": prompt},), collection, _level(row))
    return Task(prompt, CollectionSpec(scorer, metadata), _level(row))


def _prompt(row: Mapping[str, Any]) -> str | tuple[Message, ...]:
    value = next((row[key] for key in _PROMPTS if row.get(key) is not None), None)
    messages = read_conversation(value)
    if messages is not None:
        if messages[-1]["role"] == "assistant":
            raise ValueError("the last message is the assistant's; the model answers the user")
        return messages
    if not isinstance(value, str) or not value.strip():
        raise ValueError("prompt (or question, or messages) must be text that is not empty, or a list of messages")
    return value


def _answer(row: Mapping[str, Any], rewarded: bool) -> Any:
    """The answer; of a text that ends with `#### 42`, only 42. A configured reward may have none, and gets any other
    JSON value as it is."""
    value = next((row[key] for key in _ANSWERS if row.get(key) is not None), None)
    if rewarded and not isinstance(value, str):
        return value
    try:
        answer = builtin.answer({ANSWER: value}).rpartition("####")[2].strip()
    except InvalidRequestError:
        answer = ""
    if not answer and not rewarded:
        raise ValueError("answer must be text or a number")
    return answer


def _level(row: Mapping[str, Any]) -> str | None:
    level = row.get("level")
    usable = isinstance(level, str | int | float) and not isinstance(level, bool)
    return str(level).strip()[:_MAX_LEVEL] or None if usable else None


def _is_number(answer: object) -> bool:
    try:
        builtin.number({ANSWER: answer})
    except InvalidRequestError:
        return False
    return True
