"""Tasks of a JSONL file: prompts with their answers, for rollouts and for requests whose metadata has no answer.

{"id": "sum-1", "prompt": "2 + 2 =", "answer": "4", "scoring_function": "exact"}
{"question": "How many legs have 3 dogs?", "answer": "3 dogs have 3 * 4 = 12 legs.\\n#### 12"}

The second line has gsm8k's own form. `id` and `scoring_function` are optional.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.rl.scoring import sample
from mlx_parallm.rl.scoring.registry import terms

MAX_FILE_BYTES = 64 * 1024 * 1024
PROBLEM_ID = "problem_id"
"""The key of a request's `metadata` for the id of a task."""

_HUB_ID = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_LOGGED_LINES = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileTask:
    """One line of a file. `scorer`: the one that the line names, else gsm8k for a number and math for other text."""

    prompt: str
    answer: str
    scorer: str
    id: str | None = None


class FileTasks:
    """The tasks of a file, which are found by their id or their prompt."""

    def __init__(self, tasks: Sequence[FileTask] = ()) -> None:
        self.tasks = tuple(tasks)
        self._by_id = {task.id: task for task in tasks if task.id is not None}
        self._by_prompt = {task.prompt: task for task in tasks}

    def answer(self, problem_id: object, prompt: str | None) -> str | None:
        """The answer of the task with this id, else of the task with exactly this prompt. None: there is neither."""
        by_id = self._by_id.get(str(problem_id)) if isinstance(problem_id, str | int) else None
        task = by_id or self._by_prompt.get(prompt or "")
        return task.answer if task else None


def find_tasks(name: str) -> FileTasks | None:
    """The tasks of a JSONL file, or of a data set of the hub, which is downloaded unless it is in the cache.

    Returns:
        None if `name` is neither the path of a file nor the id of a data set.

    Raises:
        ConfigError: the file or the data set cannot be used.
    """
    path = Path(os.path.expanduser(name))
    if name.endswith(".jsonl") or path.is_file():
        return read_tasks(path)
    return read_tasks(_download(name)) if _HUB_ID.fullmatch(name) else None


def read_tasks(file: Path) -> FileTasks:
    """Reads a JSONL file. A line that cannot be used is left out, and a line of the log gives its number.

    Raises:
        ConfigError: the file cannot be read, is too large, has no task, or has two tasks with one id.
    """
    tasks, unusable = [], []
    line_of_id: dict[str, int] = {}
    answers: dict[str, str] = {}
    for number, line in enumerate(_read(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            task = _task(json.loads(line.decode("utf-8-sig")))
            if answers.setdefault(task.prompt, task.answer) != task.answer:
                raise ValueError("an earlier line has the same prompt and another answer")
        except (ValueError, RecursionError, InvalidRequestError) as error:
            unusable.append(f"line {number} of {file} is left out: {error}")
            continue
        if task.id is not None and (first := line_of_id.setdefault(task.id, number)) != number:
            raise ConfigError(f"environment: lines {first} and {number} of {file} have the same id; change one")
        tasks.append(task)
    for message in unusable[:_LOGGED_LINES]:
        _log.warning("%s", message)
    if others := unusable[_LOGGED_LINES:]:
        _log.warning("%d more lines of %s are left out", len(others), file)
    if not tasks:
        raise ConfigError(f"environment: {file} has no task; each line needs a prompt (or question) and an answer")
    return FileTasks(tasks)


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"environment: {file} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"environment: {file} has more than {MAX_FILE_BYTES // 2**20} MiB; give a part of it")
    return content


def _task(line: object) -> FileTask:
    """Raises ValueError or InvalidRequestError: the line lacks something, or it has the wrong type."""
    if not isinstance(line, dict):
        raise ValueError("it is not a JSON object")
    prompt = line.get("prompt", line.get("question"))
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("prompt (or question) must be text")
    answer = _answer(line)
    scorer = line.get("scoring_function") or ("gsm8k" if _is_number(answer) else "math")
    if not isinstance(scorer, str):
        raise ValueError("scoring_function must be text")
    terms(scorer)
    number = line.get("id")
    if number is not None and (not isinstance(number, str | int) or isinstance(number, bool)):
        raise ValueError("id must be text or a whole number")
    return FileTask(prompt, answer, scorer, None if number is None else str(number))


def _answer(line: Mapping[str, Any]) -> str:
    """The answer; of a solution that ends with `#### 42`, only 42."""
    try:
        answer = sample.answer(line).rpartition("####")[2].strip()
    except InvalidRequestError:
        answer = ""
    if not answer:
        raise ValueError("answer must be text or a number")
    return answer


def _is_number(answer: str) -> bool:
    try:
        sample.number({"answer": answer})
    except InvalidRequestError:
        return False
    return True


def _download(name: str) -> Path:
    """The JSONL file of a data set: `train.jsonl`, or its only one."""
    from huggingface_hub import snapshot_download  # takes long to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    advice = "download the JSONL file and give its path"
    try:
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns="*.jsonl"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"environment: no file, and no data set {name!r} of the hub ({error}); {advice}") from error
    files = list(folder.rglob("*.jsonl"))
    chosen = [file for file in files if file.name == "train.jsonl"] or files
    if len(chosen) != 1:
        raise ConfigError(f"environment: the data set {name!r} has {len(chosen)} JSONL files to choose from; {advice}")
    return chosen[0]
