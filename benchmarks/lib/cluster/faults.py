"""The faults of a cluster, what each does and undoes, and what clients saw of one.

A partition is between two processes, or between the machine of a node and all others. The head and its NATS server are
on one machine, so there is none between them; replicas and the trainer never speak to each other.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib.cluster.crew import CLOCK, READY_S, VERSION, Crew, Process, until
from benchmarks.lib.cluster.links import Cut
from benchmarks.lib.cluster.traffic import ANSWERED, HUNG, Asked, Traffic, errors_of
from benchmarks.lib.machine import resident_bytes

HOLD_S = 5.0
"""How long most faults last: longer than a lease. Those of NATS last until the head has done something about them."""
_MOMENT_S = 1.5
REFUSED = 2
"""The exit code of a node that may not join."""

Step = Callable[[Crew], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """`begin` makes it, `end` undoes it after `hold_s`. `spared`: the kinds of requests that it must not fail, except
    streams that have begun."""

    name: str
    begin: Step
    end: Step
    hold_s: float = HOLD_S
    spared: tuple[str, ...] = ("whole", "collect", "own")


@dataclass
class Seen:
    """One fault, and what clients saw of it, with times in seconds.

    Attributes:
        requests: those under way between its begin and the recovery.
        failed: how they failed, with how often.
        broken: those that the fault must not fail.
        slowest: the longest answer by kind of request.
        silence: the longest time without an answer of the head.
        recovered: from the end of the fault until all nodes serve the same version. A server that is started again is
            counted from when it answers.
        published: from then until they serve a newer one.
        descriptors: of the head and the second replica, at the end. `resident`: their memory, in MB.
        lost, twice: acknowledged answers that the trainer did not get, and those in two updates, of all faults in one
            life of the cluster. The last one has them.
        pairs, alike: see `Traffic.pairs`; the last one has these too.
    """

    fault: str
    time: int
    requests: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    hung: int = 0
    wrong: int = 0
    slowest: dict[str, float] = field(default_factory=dict)
    silence: float = 0.0
    recovered: float | None = None
    published: float | None = None
    descriptors: dict[int, int] = field(default_factory=dict)
    resident: dict[int, float] = field(default_factory=dict)
    problem: str = ""
    acknowledged: int = 0
    lost: int = 0
    twice: int = 0
    pairs: int = 0
    alike: int = 0


async def suffer(crew: Crew, traffic: Traffic, fault: Fault, number: int, dice: random.Random) -> Seen:
    """Makes the fault once, at a random moment, and returns when the cluster is whole again and has learnt something
    new."""
    seen, wrong = Seen(fault.name, number), traffic.wrong
    await asyncio.sleep(dice.uniform(0, _MOMENT_S))
    began, acknowledged = time.monotonic(), len(traffic.acknowledged)
    try:
        await fault.begin(crew)
        await asyncio.sleep(fault.hold_s)
        await fault.end(crew)
        seen.recovered = await until(partial(_serves, crew, 0), READY_S)
        number_then = await crew.live() or 0
        seen.published = await until(partial(_serves, crew, number_then + 1), READY_S)
    except (TimeoutError, AssertionError) as error:
        seen.problem = f"{type(error).__name__}: {error}"
    over = time.monotonic()
    await _note(seen, fault, began, traffic.between(began, over))
    seen.wrong, seen.acknowledged = traffic.wrong - wrong, len(traffic.acknowledged) - acknowledged
    for process in (crew.head, crew.replicas[1]):
        seen.descriptors[process.pid] = len(os.listdir(f"/proc/{process.pid}/fd")) if Path("/proc").exists() else 0
        seen.resident[process.pid] = resident_bytes(process.pid) / 1e6
    return seen


async def _serves(crew: Crew, least: int) -> bool:
    live = await crew.live()
    return live is not None and live >= least


async def _note(seen: Seen, fault: Fault, began: float, asked: list[Asked]) -> None:
    with suppress(TimeoutError):
        await until(partial(_all_ended, asked), 90)
    seen.requests = len(asked)
    seen.failed = dict(errors_of(asked))
    seen.hung = sum(each.end == HUNG or not each.ended for each in asked)
    seen.broken = sum(each.end != ANSWERED and each.kind in fault.spared for each in asked)
    for kind in sorted({each.kind for each in asked}):
        seen.slowest[kind] = max(each.ended - each.began for each in asked if each.kind == kind)
    ends = sorted([began, *(each.ended for each in asked if each.end == ANSWERED and each.kind != "own")])
    seen.silence = max((after - before for before, after in pairwise(ends)), default=0.0)


async def _all_ended(asked: list[Asked]) -> bool:
    return all(each.ended for each in asked)


def as_record(seen: Seen) -> dict[str, Any]:
    return asdict(seen)


# -- the faults ----------------------------------------------------------------------------------


def all_faults() -> list[Fault]:
    return [*_of_processes(), *_of_links(), *_of_nodes(), Fault("disk of the head full", _fill, _empty, 14.0, _SERVED)]


_SERVED = ("whole", "own")


def _of_processes() -> list[Fault]:
    kinds: dict[str, tuple[Callable[[Crew], Process], float, tuple[str, ...]]] = {
        "head": (lambda crew: crew.head, HOLD_S, ("own",)),
        "replica": (lambda crew: crew.replicas[0], HOLD_S, ("whole", "collect", "own")),
        "trainer": (lambda crew: crew.trainer, 12.0, ("whole", "stream", "collect", "own")),
    }
    faults = []
    for name, (which, stopped_s, spared) in kinds.items():
        faults.append(Fault(f"{name} killed", partial(_kill, which), partial(_start, which), 0.5, spared))
        stop, go_on = partial(_send, which, signal.SIGSTOP), partial(_send, which, signal.SIGCONT)
        faults.append(Fault(f"{name} stopped", stop, go_on, stopped_s, spared))
    everything = ("whole", "stream", "own")
    faults.append(Fault("NATS killed", partial(_signal_nats, signal.SIGKILL), _nothing, 2.0, everything))
    faults.append(Fault("NATS stopped", partial(_signal_nats, signal.SIGSTOP), _nothing, 10.0, everything))
    return faults


def _of_links() -> list[Fault]:
    pairs = {
        "replica | head": ("replica1-head", "head-replica1"),
        "replica | NATS": ("replica1-nats",),
        "replica | all": ("replica1-head", "head-replica1", "replica1-nats"),
        "trainer | head": ("trainer-head",),
        "trainer | NATS": ("trainer-nats",),
        "trainer | all": ("trainer-head", "trainer-nats"),
    }
    return [
        Fault(f"{name}, {how}", partial(_cut, links, how), partial(_mend, links), 12.0 if "trainer" in name else HOLD_S)
        for name, links in pairs.items()
        for how in Cut
    ]


def _of_nodes() -> list[Fault]:
    return [
        Fault("a replica of another version joins", _stranger, _nothing, 0.0, ("whole", "stream", "collect", "own")),
        *(
            Fault(f"a {name}'s clock is wrong by an hour", partial(_restart, which, hours), partial(_restart, which, 0))
            for name, which, hours in (("replica", _replica, 1), ("trainer", _trainer, -1))
        ),
    ]


def _replica(crew: Crew) -> Process:
    return crew.replicas[0]


def _trainer(crew: Crew) -> Process:
    return crew.trainer


async def _nothing(crew: Crew) -> None:
    pass


async def _kill(which: Callable[[Crew], Process], crew: Crew) -> None:
    which(crew).kill()


async def _start(which: Callable[[Crew], Process], crew: Crew) -> None:
    await which(crew).start_and_wait()


async def _send(which: Callable[[Crew], Process], number: signal.Signals, crew: Crew) -> None:
    which(crew).signal(number)


async def _signal_nats(number: signal.Signals, crew: Crew) -> None:
    os.kill(crew.nats, number)


async def _cut(links: tuple[str, ...], how: Cut, crew: Crew) -> None:
    for name in links:
        crew.links[name].cut(how)


async def _mend(links: tuple[str, ...], crew: Crew) -> None:
    for name in links:
        await crew.links[name].mend()


async def _restart(which: Callable[[Crew], Process], hours: int, crew: Crew) -> None:
    """Kills a process and starts it with a clock that is wrong by so many hours. Returns when the cluster is whole."""
    which(crew).kill()
    await which(crew).start_and_wait(**({CLOCK: str(3600 * hours)} if hours else {}))
    await until(partial(_serves, crew, 0), READY_S)


async def _stranger(crew: Crew) -> None:
    """Starts one more replica, of another version, which must end and say why."""
    like = crew.replicas[0]
    folder = like.folder / "stranger"
    command = tuple(str(folder) if part == str(like.folder / "replica1") else part for part in like.command)
    command = tuple("0" if part == str(like.port) else part for part in command)
    stranger = Process("stranger", command, like.folder)
    stranger.log.unlink(missing_ok=True)
    stranger.start(**{VERSION: "0.0.0"})
    assert stranger.process is not None
    try:
        code = await asyncio.wait_for(asyncio.to_thread(stranger.process.wait), 60)
    finally:
        stranger.kill()
    said = stranger.log.read_text()
    assert code == REFUSED, f"it ended with {code}"
    assert "install the same" in said, said[-300:]


async def _fill(crew: Crew) -> None:
    await asyncio.to_thread(_fill_disk, crew.disk / "filler")


def _fill_disk(file: Path) -> None:
    with open(file, "wb", buffering=0) as opened, suppress(OSError):
        while opened.write(bytes(1 << 20)):
            pass
    with open(file, "ab", buffering=0) as opened, suppress(OSError):
        while opened.write(bytes(512)):
            pass


async def _empty(crew: Crew) -> None:
    (crew.disk / "filler").unlink()
