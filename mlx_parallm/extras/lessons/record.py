"""The ids of lessons, and lesson.json: the last lesson of a run, in its folder. It is replaced as a whole whenever the
lesson changes."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from mlx_parallm import atomic
from mlx_parallm.adapters.cards import KeptPart
from mlx_parallm.errors import MALFORMED
from mlx_parallm.extras.lessons.cards import LessonCard, LessonOutcome
from mlx_parallm.rl.rollouts.answers import group_prefixes
from mlx_parallm.rl.trajectories import DropReason

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

GROUPS = group_prefixes("lesson")[0]
"""The ids of the groups of every lesson begin with it, because the ids of lessons begin with `lesson-`."""

FILE = "lesson.json"
_LESSON = TypeAdapter(LessonCard)

_log = logging.getLogger(__name__)


def install(training: TrainingService) -> None:
    """Drops what lessons have sampled in earlier processes: a lesson ends with its process."""
    drop = training.trajectories.buffer.drop_own
    training.hooks.begun.append(lambda adapter: drop(adapter, GROUPS, DropReason.STOPPED))


def new_id() -> str:
    """The id of a new lesson."""
    return f"lesson-{secrets.token_hex(4)}"


def write_lesson(folder: Path, card: LessonCard) -> None:
    """Writes the lesson. A fault of the disk is only logged: the updates of the lesson are in the journal."""
    try:
        atomic.replace_file(folder / FILE, json.dumps(asdict(card)).encode())
    except OSError as error:
        _log.warning("%s could not be written: %s", FILE, error.strerror)


def read_lesson(folder: Path) -> LessonCard | None:
    """The last lesson of the run, which has ended. None: there was none, or its file cannot be read."""
    try:
        card = _LESSON.validate_python(_as_now(json.loads((folder / FILE).read_bytes())))
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        _log.warning("%s cannot be read, and is left out: %s", FILE, error)
        return None
    return interrupted(card) if card.is_running else card


def _as_now(record: Any) -> Any:
    """What is in a file, with the names of today. Earlier versions kept the lesson as it was asked for in `spec`.

    Raises:
        LookupError, TypeError: it is no lesson.
    """
    if "spec" not in record:
        return record
    spec = record["spec"]
    prompts = zip(spec["prompts"], record["samples"], strict=True)
    asked = {name: spec[name] for name in ("max_tokens", "group_size", "temperature", "learning_rate")}
    return {
        **record,
        **asked,
        "id": record["lesson_id"],
        "live_lora": record["live"] or None,
        "reward": {spec["rule"]["kind"]: spec["rule"]["text"]},
        "answers_per_update": record["per_update"],
        "most_updates": spec["updates"],
        "prompts": [{"messages": messages, **answers} for messages, answers in prompts],
    }


def forget_lesson(folder: Path, adapter: str) -> None:
    """Removes the last lesson if it was for this adapter. Raises OSError."""
    card = read_lesson(folder)
    if card is not None and card.adapter == adapter:
        (folder / FILE).unlink()


def interrupted(card: LessonCard) -> LessonCard:
    """The lesson, ended with its process."""
    reason = "the server has ended; what the lesson has taught is kept"
    return replace(
        card, state="ended", outcome=LessonOutcome.INTERRUPTED, reason=reason, ended=time.time(), showing=None
    )


def kept(run: Path, adapter: str) -> Iterator[KeptPart]:
    """The last lesson, if it was one of the adapter."""
    lesson = read_lesson(run)
    yield KeptPart("lesson", str(run / FILE), int(lesson is not None and lesson.adapter == adapter))
