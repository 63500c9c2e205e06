"""Lessons: prompts and a rule for the reward that a client gives while the server runs.

cards      what a client asks for, and what a lesson has taught
rules      what scores the answers of a rule, and the tasks of a lesson
examples   what is imitated first, if hardly any answer earns a reward
progress   what a lesson has taught so far, and when it ends
record     the last lesson of a run, in a file of the run's folder
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.adapters.cards import KeptPart
    from mlx_parallm.app.build import Served
    from mlx_parallm.config import Config
    from mlx_parallm.extras.lessons.service import Lessons
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.backend import Backend


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.lessons import route

    return (route,)


def install(config: Config, served: Served, training: TrainingService) -> None:
    from mlx_parallm.extras.lessons.record import install as drop_earlier

    drop_earlier(training)


def serve(config: Config, served: Served, training: TrainingService) -> Lessons:
    from mlx_parallm.extras.lessons.service import Lessons

    lessons = Lessons(config, served, training)
    training.hooks.ending.append(lessons.close)
    return lessons


def kept(run: Path, adapter: str) -> Iterator[KeptPart]:
    from mlx_parallm.adapters.cards import KeptPart
    from mlx_parallm.extras.lessons.record import FILE, read_lesson

    lesson = read_lesson(run)
    yield KeptPart("lesson", str(run / FILE), int(lesson is not None and lesson.adapter == adapter))


def forget(run: Path, adapter: str) -> None:
    from mlx_parallm.extras.lessons.record import forget_lesson

    forget_lesson(run, adapter)
