"""Fails each write of a round of a client in turn, or looks at the folder at each. What is wrong is collected."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.faults import kept
from benchmarks.lib.faults.disk import FOREVER
from benchmarks.lib.faults.served import Client, WrongAnswerError


@dataclass
class Tried:
    """What came of it.

    Attributes:
        writes: those that were tried, by system call.
        reported: faults after which a request was refused.
        wrong: broken promises, in words.
    """

    writes: Counter[str] = field(default_factory=Counter)
    reported: int = 0
    wrong: list[str] = field(default_factory=list)


def fail_each(client: Client, fault: int, writes: Iterable[int], lasts: bool) -> Tried:
    """One write of a round fails, or with `lasts` all from that one on. Then the disk is well again, and a round must
    succeed. Ends after a round that no fault hit.

    Args:
        writes: which ones, counted from the beginning of a round.
    """
    tried, disk = Tried(), client.server.disk
    for number in writes:
        before = client.refused
        disk.fail(fault, number, FOREVER if lasts else 1)
        wrong = _trouble(client)
        what, was_hit = disk.what, bool(disk.hits)
        disk.heal()
        refused = client.refused - before
        wrong = wrong or _recovery_trouble(client)
        tried.wrong += [f"{number} {what}: {each}" for each in wrong]
        if not was_hit:
            break
        tried.writes[what.partition(" ")[0]] += 1
        tried.reported += refused > 0
    return tried


def restarted(client: Client) -> list[str]:
    """Kills the server, starts it again, and returns what it has lost."""
    client.server.kill()
    client.server.start()
    return client.lost()


@contextmanager
def each_moment(client: Client, image: Path, also: Callable[[int], None] = lambda number: None) -> Iterator[Tried]:
    """While the block runs, the server is held before each write and amid it, and what SIGKILL would leave is compared
    with what it has acknowledged until then.

    Args:
        image: a path for that, where nothing is.
        also: called with the number of the moment, while it is there.
    """
    tried, disk, run = Tried(), client.server.disk, client.server.run

    def look() -> None:
        acknowledged, what = copy.deepcopy(client.acknowledged), disk.what
        shutil.copytree(run, image)
        tried.wrong += [f"{what}: {each}" for each in kept.lost(image, acknowledged, torn=True)]
        also(tried.writes.total())
        shutil.rmtree(image)
        tried.writes[what.rpartition(" ")[0]] += 1

    with disk.watched(look):
        yield tried


def _trouble(client: Client) -> list[str]:
    try:
        client.round()
    except WrongAnswerError as error:
        return [str(error)]
    return []


def _recovery_trouble(client: Client) -> list[str]:
    """What does not work though the disk is well again."""
    before = client.refused
    try:
        client.resume()
        client.round()
    except WrongAnswerError as error:
        return [f"afterwards, {error}"]
    return ["afterwards, something is still refused"] if client.refused > before else []
