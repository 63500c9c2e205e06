"""Tasks of a file: prompts with their answers and other columns, for rollouts and for requests that leave them out.

{"id": "sum-1", "prompt": "2 + 2 =", "answer": "4", "scoring_function": "exact"}
{"question": "How many legs have 3 dogs?", "answer": "3 dogs have 3 * 4 = 12 legs.\\n#### 12"}
{"messages": [{"role": "user", "content": "2 + 2 ="}], "ground_truth": 4, "level": "easy"}

The second row has gsm8k's own form. Only a prompt is always needed; without a configured reward, an answer is too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.rl.conversations import Message, read_conversation
from mlx_parallm.rl.scoring import builtin
from mlx_parallm.rl.scoring.scorers import ANSWER, REWARD, terms
from mlx_parallm.rl.task_files import find_file, read_rows

PROBLEM_ID = "problem_id"
"""The key of a request's `metadata` for the id of a task."""

Prompt = str | tuple[Message, ...]

_PROMPTS = ("prompt", "question", "messages")
_ANSWERS = (ANSWER, "ground_truth", "solution")
_OWN = frozenset({"prompt", "messages", "id", "scoring_function"})
_MAX_COLUMNS = 64 * 1024
"""Bytes of a row's columns as JSON, as of the metadata of a request."""

_MAX_LEVEL = 64
"""Characters of a level's name; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class FileTask:
    """One row of a file.

    Attributes:
        prompt: a text, or the messages of a conversation.
        answer: None if the row has none.
        scorer: the one that the row names, else gsm8k for a number and math for other text; the configured reward, if
            there is one.
        columns: all other columns of the row.
        level: what the curriculum samples it by; None if the row has none that is text or a number.
    """

    prompt: Prompt
    answer: Any
    scorer: str
    id: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    level: str | None = None

    @property
    def text(self) -> str | None:
        """The prompt, or the last message of the user."""
        if isinstance(self.prompt, str):
            return self.prompt
        return next((turn["content"] for turn in reversed(self.prompt) if turn["role"] == "user"), None)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation. A prompt that is a text is one message of the user."""
        return ({"role": "user", "content": self.prompt},) if isinstance(self.prompt, str) else self.prompt

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What a scorer reads: the columns, the answer and the id, as far as there are any."""
        answer = {} if self.answer is None else {ANSWER: self.answer}
        return {**self.columns, **answer, **({} if self.id is None else {PROBLEM_ID: self.id})}


class FileTasks:
    """The tasks of a file, which are found by their id or their prompt."""

    def __init__(self, tasks: Sequence[FileTask] = ()) -> None:
        self.tasks = tuple(tasks)
        self._by_id = {task.id: task for task in tasks if task.id is not None}
        self._by_text: dict[str | None, FileTask | None] = {}
        for task in tasks:
            known = self._by_text.setdefault(task.text, task)
            if known is not None and known.answer != task.answer:  # conversations that only end alike
                self._by_text[task.text] = None

    def find(self, problem_id: object, prompt: str | None) -> FileTask | None:
        """The task with this id, else the task with exactly this prompt, or with it as the user's last message."""
        by_id = self._by_id.get(str(problem_id)) if isinstance(problem_id, str | int) else None
        return by_id or (self._by_text.get(prompt) if prompt else None)


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

    def read(row: Mapping[str, Any]) -> FileTask:
        task = _task(row, rewarded)
        if answers.setdefault(json.dumps(task.prompt), task.answer) != task.answer:
            raise ValueError("an earlier one has the same prompt and another answer")
        return task

    tasks, _ = read_rows(file, read)
    place_of_id: dict[str, str] = {}
    for place, task in tasks.items():
        if task.id is not None and (first := place_of_id.setdefault(task.id, place)) != place:
            raise ConfigError(f"environment: {first} and {place} of {file} have the same id; change one")
    if not tasks:
        needs = "a prompt (or question, or messages)" + ("" if rewarded else " and an answer")
        raise ConfigError(f"environment: {file} has no task; each row needs {needs}")
    return FileTasks([*tasks.values()])


def _task(row: Mapping[str, Any], rewarded: bool) -> FileTask:
    """Raises ValueError, RecursionError or InvalidRequestError: the row lacks something, or it has the wrong type."""
    prompt, columns = _prompt(row), {key: column for key, column in row.items() if key not in _OWN}
    answer = _answer(row, rewarded)
    scorer = REWARD if rewarded else row.get("scoring_function") or ("gsm8k" if _is_number(answer) else "math")
    if not isinstance(scorer, str):
        raise ValueError("scoring_function must be text")
    terms(scorer)
    if (size := len(json.dumps(columns))) > _MAX_COLUMNS:
        raise ValueError(f"its columns have {size} bytes as JSON; at most {_MAX_COLUMNS} are kept")
    number = row.get("id")
    if number is not None and (not isinstance(number, str | int) or isinstance(number, bool)):
        raise ValueError("id must be text or a whole number")
    kept = columns if rewarded else {}
    return FileTask(prompt, answer, scorer, None if number is None else str(number), kept, _level(row))


def _prompt(row: Mapping[str, Any]) -> Prompt:
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
