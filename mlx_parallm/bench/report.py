"""The report: the machine, the model, and each section with how it ended. Its file is whole at any moment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlx_parallm.atomic import replace_file
from mlx_parallm.bench.comparison import Comparison
from mlx_parallm.errors import ConfigError, StorageError

FORMAT = 2
"""Raised when a key of the file changes its meaning."""


class Status(StrEnum):
    """How a section ended, or where it is."""

    NOT_BEGUN = "not begun"
    RUNNING = "running"
    """In a finished file: the process ended in it."""
    DONE = "done"
    CUT = "cut"
    """The time budget ended first, so that measurements are missing."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """It ended with an error, or a check did not pass."""


@dataclass(slots=True)
class ReportSection:
    """One part of the report.

    Attributes:
        share: of the time that is left when it begins.
        limit_s: the most seconds that it may take, known when it begins.
        problem: why it failed.
        figures: rates of both sides.
        checks: results of the self-test, each with its model's name.
        facts: what else was found, by name.
        state: see `device.state`; at the end of the section.
    """

    name: str
    share: float
    status: Status = Status.NOT_BEGUN
    limit_s: float = 0.0
    seconds: float = 0.0
    problem: str = ""
    figures: list[Comparison] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    async def run(self, work: Awaitable[None]) -> None:
        """Waits for the work, for `limit_s` at most. An error costs this section only; a cancellation is passed on."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.limit_s) as limit:
                await work
            failed = [check["name"] for check in self.checks if not check["passed"]]
            self.problem = f"checks that did not pass: {', '.join(failed)}" if failed else ""
            self.status = Status.FAILED if failed else Status.CUT if self.cut else Status.DONE
        except asyncio.CancelledError:
            self.status = Status.INTERRUPTED
            raise
        except Exception as error:  # noqa: BLE001 - a device may raise anything, and the other sections still run
            self.status = Status.CUT if limit.expired() else Status.FAILED
            self.problem = "" if limit.expired() else _text(error)
        finally:
            self.seconds = time.monotonic() - started

    @property
    def cut(self) -> list[str]:
        """The figures that lack rounds."""
        return [f"{each.name}: {len(each.ours)} of {each.rounds} rounds" for each in self.figures if each.cut]

    def as_json(self) -> dict[str, Any]:
        """For the report's file."""
        return {
            "status": self.status.value,
            "seconds": self.seconds,
            "limit_s": self.limit_s,
            "problem": self.problem or None,
            "cut": self.cut,
            "figures": [each.as_json() for each in self.figures],
            **({"checks": self.checks} if self.checks else {}),
            **({"facts": self.facts} if self.facts else {}),
            "state": self.state,
        }


def _text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):  # of the rows of a batch: report the first error
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".replace(str(Path.home()), "~")  # the report names nobody


@dataclass(slots=True)
class BenchReport:
    """What was measured, and on what.

    Attributes:
        file: where it is written.
        machine: see `selftest.report.describe_machine`.
        model: the model that is measured, by facts.
        setting: how much is measured.
        folder: of the model, if it is a local one. Errors name it; the report does not.
        budget_s: the most seconds that all of it may take.
        interrupted: the signal that ended it; empty if none did.
    """

    file: Path
    machine: dict[str, Any]
    model: dict[str, Any]
    setting: dict[str, Any]
    budget_s: float
    sections: list[ReportSection]
    interrupted: str = ""
    folder: Path | None = None
    _date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._started + self.budget_s - time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether no section failed, and nothing interrupted them."""
        return not self.interrupted and all(section.status is not Status.FAILED for section in self.sections)

    def as_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "format": FORMAT,
            "date": self._date,
            "passed": self.passed,
            "interrupted": self.interrupted or None,
            "seconds": time.monotonic() - self._started,
            "budget_s": self.budget_s,
            "machine": self.machine,
            "model": self.model,
            "setting": self.setting,
            "sections": {section.name: self._without_folder(section.as_json()) for section in self.sections},
        }

    def _without_folder(self, value: Any) -> Any:
        """The same with the model's name in place of its folder."""
        if self.folder is None:
            return value
        match value:
            case str():
                for folder in (self.folder.absolute(), self.folder.resolve()):
                    for text in (str(folder), str(folder).replace(str(Path.home()), "~")):
                        value = value.replace(text, self.model["name"])
                return value
            case dict():
                return {key: self._without_folder(each) for key, each in value.items()}
            case list():
                return [self._without_folder(each) for each in value]
        return value

    def write(self) -> None:
        """Replaces the file.

        Raises:
            ConfigError: it is something else than a file, such as a folder or a device.
            StorageError: it cannot be written.
        """
        try:
            if self.file.exists() and not self.file.is_file():
                raise ConfigError(f"--report: {self.file} is not a file; name one that may be replaced")
            replace_file(self.file, json.dumps(self.as_json(), indent=2, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise StorageError(f"--report: {self.file} cannot be written: {error.strerror}") from error
