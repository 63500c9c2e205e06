"""The processes that send requests to the server of a soak: one of good clients, and one of hostile ones."""

import asyncio
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.soak.asking import GoesOn
from benchmarks.lib.soak.changing import Changes
from benchmarks.lib.soak.good import Clients, Known, Told
from benchmarks.lib.soak.hostile import Done, Hostile

END_LIMIT_S = 180.0
LOOK_S, BEGIN_AGAIN_S = 0.1, 2.0
"""After a pause, clients begin again one after another within so many seconds."""


@dataclass(slots=True)
class Loads:
    """What the processes reported when they had ended. `process`: the number of the server's process, for them.
    `paused`: while it is set, they begin nothing."""

    process: Any
    paused: Any
    good: Told = field(default_factory=Told)
    hostile: Done = field(default_factory=Done)


@contextmanager
def loads(port: int, keys: dict[str, str], known: Sequence[Known], hostile: bool) -> Iterator[Loads]:
    """Runs the processes while the block runs, and then waits for what they have begun."""
    context = multiprocessing.get_context("spawn")
    stop, made = context.Event(), Loads(context.Value("i", 1), context.Event())
    pipes = {"good": context.Pipe(duplex=False), "hostile": context.Pipe(duplex=False)}
    arguments = {"good": (made.paused, keys, known, made.process), "hostile": (made.paused, keys["hostile"])}
    targets: dict[str, Callable[..., None]] = {"good": _good, "hostile": _hostile}
    started = [
        context.Process(target=targets[name], args=(port, stop, pipes[name][1], *arguments[name]), daemon=True)
        for name in (("good", "hostile") if hostile else ("good",))
    ]
    for process in started:
        process.start()
    try:
        yield made
        stop.set()
        for name, _ in zip(pipes, started, strict=False):
            if not pipes[name][0].poll(END_LIMIT_S):
                raise SystemExit(f"the {name} clients did not end")
            setattr(made, name, pipes[name][0].recv())
    finally:
        for process in started:
            process.kill()


def _goes_on(stop: Any, paused: Any) -> GoesOn:
    async def goes_on() -> bool:
        """Whether the load is not over. Waits for the end of a pause."""
        if paused.is_set():
            while paused.is_set() and not stop.is_set():
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(random.uniform(0, BEGIN_AGAIN_S))
        return not stop.is_set()

    return goes_on


def _good(
    port: int, stop: Any, results: Any, paused: Any, keys: dict[str, str], known: Sequence[Known], process: Any
) -> None:
    async def run() -> Told:
        clients = Clients(port, keys["good"], known, lambda: process.value, _goes_on(stop, paused))
        changes = Changes(clients, port, keys["train"], keys["admin"], _goes_on(stop, paused))
        await asyncio.gather(clients.run(), changes.run())
        return clients.told

    results.send(asyncio.run(run()))


def _hostile(port: int, stop: Any, results: Any, paused: Any, key: str) -> None:
    async def run() -> Done:
        hostile = Hostile(port, key, _goes_on(stop, paused))
        await hostile.run()
        return hostile.done

    results.send(asyncio.run(run()))
