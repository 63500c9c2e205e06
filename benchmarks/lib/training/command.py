"""Runs `mlx_parallm_train` as a user runs it: in a folder of its own, on a file of tasks and a file of rewards."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.training.learning_tasks import HELD_OUT, Question, questions

SPLIT = 16
"""Adjectives of each class that are trained on; the others are held out."""

POLL_S = 1.0
STOPPED = 128 + signal.SIGTERM
"""Exit code of `mlx_parallm_train` after SIGTERM. What it has learnt is saved."""

SHARE_OF_WORDS = '''\
import re


def score(sample):
    """The right word's share of the answer: 1 if it is the only word; half of it if the answer was cut off."""
    words, answer = re.findall("[a-z]+", sample.text.lower()), sample.metadata["answer"]
    wrong = {"positive": "negative", "negative": "positive"}[answer]
    if answer not in words or wrong in words:
        return 0.0
    return (1.0 if sample.finish_reason == "stop" else 0.5) / len(words)
'''
"""A file of rewards."""

_ENDED = -signal.SIGTERM
"""Exit code after SIGTERM that came when everything was done, and Python was ending."""

Line = Mapping[str, Any]


def prepare(folder: Path, config: str, rewards: str, tasks: Iterable[Line], held_out: Sequence[Line] = ()) -> None:
    """Writes the files that `train` names. Most runs have no held-out tasks."""
    (folder / "config.yaml").write_text(config)
    (folder / "rewards.py").write_text(rewards)
    _write(folder / "tasks.jsonl", tasks)
    _write(folder / "held_out.jsonl", held_out)


def row(question: Question, **columns: Any) -> dict[str, Any]:
    """A question as a line of a file of tasks."""
    return {"prompt": question.text, "answer": question.kind, **columns}


def held_out_rows(count: int = HELD_OUT, **columns: Any) -> list[dict[str, Any]]:
    """Some of the questions whose adjectives are not trained on."""
    return random.Random(0).sample([row(question, **columns) for question in questions(slice(SPLIT, None))], count)


def train(
    folder: Path,
    flags: Mapping[str, object],
    until: Callable[[Sequence[Line]], bool] | None = None,
) -> int:
    """Trains in a folder that `prepare` has filled, and goes on where an earlier call has ended.

    Args:
        flags: besides those that name the files, and the length of answers.
        until: asked about once a second with the lines of the log so far; when it returns true, SIGTERM ends the run.

    Returns:
        The exit code: `STOPPED` if the run was stopped.
    """
    files = {"config": "config.yaml", "environment": "tasks.jsonl", "checkpoint-dir": "run", "log": "metrics.jsonl"}
    command = [sys.executable, "-m", "mlx_parallm", "train"]
    for flag, value in {**files, "max-tokens": 12, **flags}.items():
        command += [f"--{flag}", str(value)]
    process = subprocess.Popen(command, cwd=folder)
    try:
        while process.poll() is None:
            if until is not None and until(logged(folder)):
                process.terminate()
                return process.wait()
            time.sleep(POLL_S)
        return process.returncode
    finally:
        process.kill()
        process.wait()


def checked(exit_code: int) -> None:
    """Raises RuntimeError: the run has failed."""
    if exit_code not in (0, STOPPED, _ENDED):
        raise RuntimeError(f"mlx_parallm_train ended with exit code {exit_code}")


def logged(folder: Path) -> list[Line]:
    """The lines of the log that are complete; none before there is a log."""
    log = folder / "metrics.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _write(file: Path, tasks: Iterable[Line]) -> None:
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
