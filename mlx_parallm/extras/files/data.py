"""The examples of a file: which rows can be used, which are held out, and in which order the others are trained on.

    rows ─▶ read once: forms, questions ─▶ training rows, held-out rows
    step ─▶ the rows of its batch, from the order of its epoch ─▶ tokens

The order of an epoch depends on the seed and its number alone, so a run that is resumed goes on with the same batches.
"""

from __future__ import annotations

import hashlib
import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.files.forms import Example, FileKind, read_example
from mlx_parallm.extras.files.rows import Rows, open_rows

MOST_HELD_OUT = 200
"""Rows that are held out, unless one question has more."""
_LOGGED = 20
_LEAST_USABLE = 0.1
"""A file with a smaller part of usable rows is refused: it has another form than its user thinks."""
_NUMBER_BITS = 48
"""Of a fingerprint as a number that JSON and floats keep exactly."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What is read, and how it becomes batches.

    Attributes:
        name: of the file, or the id of a data set of the hub.
        held_out: a share of the rows, or another file.
        batch_size: rows of an update.
        epochs: how often each row is trained on, if `steps` does not say it.
    """

    kind: FileKind
    name: str
    held_out: float | str = 0.05
    batch_size: int = 8
    epochs: int = 1
    seed: int = 0

    @property
    def flag(self) -> str:
        """What errors name."""
        return f"--{self.kind.value}"


class ExampleFile:
    """The usable rows of a file.

    Attributes:
        trained: numbers of the rows that are trained on.
        left_out: for people, the rows that have none of the forms, the first of them; and `left_out_count`, of all.
    """

    def __init__(self, name: str, kind: FileKind, seed: int, setting: str) -> None:
        """Raises ConfigError: the file cannot be read, or hardly any of its rows can be used."""
        self.name, self.kind, self._setting = name, kind, setting
        self._rows: Rows = open_rows(name, setting)
        self.left_out: list[str] = []
        self.left_out_count = 0
        self._digest = hashlib.blake2b(digest_size=8)
        usable, questions = array("Q"), array("Q")
        key = str(seed).encode()
        for number in range(len(self._rows)):
            example = self._read(number)
            if example is not None:
                found = hashlib.blake2b(example.question.encode(errors="replace"), digest_size=8, key=key).digest()
                self._digest.update(repr(example).encode(errors="replace"))
                usable.append(number)
                questions.append(int.from_bytes(found, "big"))
        self._check_usable(len(usable))
        self.trained: NDArray[np.uint64] = np.array(usable, np.uint64)
        self._questions: NDArray[np.uint64] = np.array(questions, np.uint64)

    def _read(self, number: int) -> Example | None:
        try:
            return read_example(self._rows.read(number), self.kind)
        except (ValueError, RecursionError) as error:
            self.leave_out(number, error)
            return None

    def leave_out(self, number: int, reason: object) -> None:
        """Notes that a row cannot be used. The log names the first ones."""
        self.left_out_count += 1
        message = f"{self.place(number)} is left out: {reason}"
        if self.left_out_count <= _LOGGED:
            self.left_out.append(message)
            _log.warning("%s", message)
        elif self.left_out_count == _LOGGED + 1:
            _log.warning("more rows of %s are left out, which are only counted", self.name)

    def _check_usable(self, usable: int) -> None:
        rows = len(self._rows)
        if not rows:
            raise ConfigError(f"{self._setting}: {self.name} has no rows; name a file that has some")
        if usable <= _LEAST_USABLE * rows:
            first = f"; {self.left_out[0]}" if self.left_out else ""
            raise ConfigError(f"{self._setting}: {usable} of the {rows} rows of {self.name} can be used{first}")

    def hold_out(self, wanted: int) -> NDArray[np.uint64]:
        """Takes about so many rows from those that are trained on, all rows of some questions, and returns them. None
        are taken if each question has many more rows than are wanted."""
        questions, counts = np.unique(self._questions, return_counts=True)
        chosen: list[np.uint64] = []
        total = 0
        for question, count in zip(questions, counts.tolist(), strict=True):
            if total >= wanted:
                break
            if total + count <= 2 * wanted and total + count < len(self.trained):
                chosen.append(question)
                total += count
        is_held = np.isin(self._questions, np.array(chosen, np.uint64))
        held, self.trained = self.trained[is_held], self.trained[~is_held]
        self._questions = self._questions[~is_held]
        return held

    def example(self, number: int) -> Example:
        """Raises ValueError, RecursionError: the file has changed since it was opened."""
        return read_example(self._rows.read(number), self.kind)

    def place(self, number: int) -> str:
        return f"{self._rows.place(number)} of {self.name}"

    @property
    def digest(self) -> bytes:
        """Of its usable rows."""
        return self._digest.digest()


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of an update. `epoch`: from 1 on."""

    rows: Sequence[int]
    epoch: int


class TrainingData:
    """The rows that a run trains on, in order, and those that are held out.

    Attributes:
        file: has the rows that are trained on.
        held_out: rows of `held_out_file`.
    """

    def __init__(self, settings: FileSettings) -> None:
        """Raises ConfigError: see `ExampleFile`; or the batches are too small."""
        if settings.kind is FileKind.KTO and settings.batch_size < 2:
            raise ConfigError("--batch-size: KTO compares an answer with those to other prompts; give 2 at least")
        self.settings = settings
        self.file = ExampleFile(settings.name, settings.kind, settings.seed, settings.flag)
        if isinstance(settings.held_out, str):
            self.held_out_file = ExampleFile(settings.held_out, settings.kind, settings.seed, "--held-out")
            self.held_out = [int(number) for number in self.held_out_file.trained[:MOST_HELD_OUT]]
        else:
            self.held_out_file = self.file
            wanted = min(ceil(settings.held_out * len(self.file.trained)), MOST_HELD_OUT)
            self.held_out = self.file.hold_out(wanted).tolist()
        self._order: tuple[int, array[int]] = (0, array("Q"))

    @property
    def steps_an_epoch(self) -> int:
        return ceil(len(self.file.trained) / self.settings.batch_size)

    @property
    def steps(self) -> int:
        """Of all epochs."""
        return self.steps_an_epoch * self.settings.epochs

    def batch(self, step: int) -> Batch:
        """The rows of step 1, 2, and so on. The batches of an epoch differ by one row at most."""
        epoch, place = divmod(step - 1, self.steps_an_epoch)
        order = self._order_of(epoch + 1)
        start, stop = (at * len(order) // self.steps_an_epoch for at in (place, place + 1))
        return Batch([int(self.file.trained[at]) for at in order[start:stop]], epoch + 1)

    def _order_of(self, epoch: int) -> array[int]:
        if self._order[0] != epoch:
            order = array("Q", range(len(self.file.trained)))
            random.Random(f"{self.settings.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    @property
    def fingerprint(self) -> float:
        """A number that changes with the rows, and with what decides which of them a step has."""
        parts: list[Any] = [self.settings.kind.value, self.settings.batch_size, self.settings.seed]
        files = self.file.digest + self.held_out_file.digest
        digest = hashlib.blake2b(repr(parts).encode() + files, digest_size=_NUMBER_BITS // 8)
        digest.update(np.asarray(self.held_out, np.uint64).tobytes())
        return float(int.from_bytes(digest.digest(), "big"))

    def held_out_examples(self) -> Iterator[tuple[int, Example]]:
        for number in self.held_out:
            yield number, self.held_out_file.example(number)
