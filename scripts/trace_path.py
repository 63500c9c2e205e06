#!/usr/bin/env python
"""Counts the functions that a completion request and a trajectory pass on their way through the package.

    uv run --group dev scripts/trace_path.py              # the bundled model; about a minute
    uv run --group dev scripts/trace_path.py --model DIR  # any model folder

Starts `RLIntegratedServer` in this process, with a profile function in every thread, and sends it requests over HTTP.

- completion: from the bytes of the request's body on the socket to its row in the KV pool.
- trajectory: from the last token of a collected group to the adapter version that was trained on it and is live.
  Left out are `server/`, which sends the HTTP response meanwhile, the modules that compute forwards and losses, and
  functions that an uncollected request calls too (the device loop and its scheduler).

Each is measured in several rounds. A function counts when every round called it, so what happened to run at the same
time (a timer, a statistics snapshot) drops out. Of these, the way passes the functions that call another one of the
package; functions that call none (properties, checks, small helpers) are listed with a dot and not counted. Lambdas,
comprehensions and generated code (`__init__` of a dataclass) are no functions here.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx_parallm
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.core import RequestFinished

PACKAGE = str(Path(mlx_parallm.__file__).parent) + os.sep
ROUNDS = 5
LIMIT_S = 120.0
GROUP = 8
IDLE_S = 1.2
"""Longer than the device loop sleeps when it is idle."""

Marker = Callable[[CodeType], bool]


def function(path: str, name: str) -> Marker:
    """Matches a function by its name and the start of its file's path within the package."""
    return lambda code: code.co_name == name and code.co_filename.startswith(PACKAGE + path)


REACHES_THE_POOL = function("batch/kv/cache.py", "open")
LEFT_OUT = (
    "server/",
    "model/",
    "batch/",
    "rl/learn/model.py",
    "rl/learn/forwards.py",
    "rl/learn/attention.py",
    "rl/objectives/samples.py",
    "rl/objectives/losses.py",
)
GOES_LIVE = function("adapters/", "flip")
DRAWS_THE_LAST_TOKEN = RequestFinished.__init__.__code__


@dataclass
class Way:
    """The functions called between two moments, in the order of their first calls, with their numbers of calls."""

    name: str
    begins: Marker
    ends: Marker
    leaves_out: tuple[str, ...] = ()
    calls: Counter[CodeType] = field(default_factory=Counter)
    callers: set[CodeType] = field(default_factory=set)
    begun: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def see(self, frame: FrameType) -> None:
        code = frame.f_code
        if not self.begun:
            self.begun = self.begins(code)
        if self.begun and not self.ended.is_set():
            if self._counts(code):
                self.calls[code] += 1
                self._note_caller(frame)
            if self.ends(code):
                self.ended.set()

    def _note_caller(self, frame: FrameType) -> None:
        """The nearest function of the package that is below this one on the stack."""
        below = frame.f_back
        while below is not None and not self._counts(below.f_code):
            below = below.f_back
        if below is not None and below.f_code is not frame.f_code:
            self.callers.add(below.f_code)

    def _counts(self, code: CodeType) -> bool:
        file = code.co_filename
        return (
            file.startswith(PACKAGE)
            and not code.co_name.startswith("<")
            and not file.removeprefix(PACKAGE).startswith(self.leaves_out)
        )


class Tracer:
    """Shows every call of every thread to the way that is being recorded, if any."""

    def __init__(self) -> None:
        self._way: Way | None = None

    def install(self) -> None:
        """Covers this thread, and all that are started from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def recording(self, way: Way) -> Iterator[Way]:
        self._way = way
        try:
            yield way
        finally:
            self._way = None

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (way := self._way) is not None:
            way.see(frame)


class Client:
    """Plain HTTP to the server in this process."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(self, **body: object) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {answer}")
        return answer

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise TimeoutError(f"the server was not ready after {LIMIT_S:.0f} s")


def completion(tracer: Tracer, client: Client, number: int) -> Way:
    way = Way("completion: from the socket to the pool", lambda code: True, REACHES_THE_POOL)
    time.sleep(IDLE_S)
    with tracer.recording(way):
        client.post(prompt=f"Once upon a time {number}", max_tokens=2, temperature=0)
    if not way.ended.is_set():
        raise RuntimeError("the request was answered, but no function that is taken for the pool's was called")
    return way


def trajectory(tracer: Tracer, client: Client, number: int) -> Way:
    """One group whose samples differ in reward, so that it is trained on at once."""
    ordinary = Way("an uncollected request", lambda code: True, lambda code: False)
    way = Way(
        "trajectory: from its last token to a live version",
        lambda code: code is DRAWS_THE_LAST_TOKEN,
        GOES_LIVE,
        leaves_out=LEFT_OUT,
    )
    time.sleep(IDLE_S)  # what the last round's update does after its version is live belongs to no ordinary request
    with tracer.recording(ordinary):
        client.post(prompt=f"Once upon a time {number}", max_tokens=2, temperature=0)
        time.sleep(IDLE_S)
    with tracer.recording(way):
        client.post(
            prompt=f"Once upon a time {number}",
            n=GROUP,
            max_tokens=8,
            temperature=1,
            seed=number,
            collect_trajectory=True,
            scoring_function="regex",
            metadata={"pattern": "[aeiou]\\Z|[\\x00-`]\\Z"},
        )
        if not way.ended.wait(LIMIT_S):
            raise RuntimeError("no version went live: all rewards were equal, or the update failed")
    for code in ordinary.calls:
        del way.calls[code]
    return way


@dataclass
class Passed:
    """The functions that all rounds called, in the order of the first; `callers` are those that count."""

    calls: dict[CodeType, int]
    callers: set[CodeType]


def common(ways: list[Way]) -> Passed:
    first = ways[0]
    every = {code: count for code, count in first.calls.items() if all(code in way.calls for way in ways)}
    return Passed(every, {code for code in every if all(code in way.callers or way.ends(code) for way in ways)})


def show(name: str, passed: Passed, brief: bool) -> None:
    files = {code.co_filename for code in passed.callers}
    everything = {code.co_filename for code in passed.calls}
    print(f"{name}: {len(passed.callers)} functions in {len(files)} files")
    print(f"  with those that call no other: {len(passed.calls)} functions in {len(everything)} files")
    for code, count in () if brief else passed.calls.items():
        mark = " " if code in passed.callers else "."
        print(f"  {count:6} {mark} {code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")


def measure(tracer: Tracer, client: Client, brief: bool) -> None:
    client.wait_until_ready()
    for way in (completion, trajectory):
        way(tracer, client, 0)  # imports and caches that only a first request fills
        rounds = [way(tracer, client, 1 + number) for number in range(ROUNDS)]
        show(rounds[0].name, common(rounds), brief)


async def serve(model: str | None, folder: str, port: int) -> None:
    server = RLIntegratedServer(
        model,
        LoRAConfig(rank=4),
        RLConfig(batch_size=GROUP),
        server__access_log=False,
        server__kv_cache_memory="128MB",
        checkpointing__checkpoint_dir=folder,
    )
    await asyncio.gather(server.run_inference(port=port), server.run_training_loop())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A model folder. Default: the bundled model.")
    parser.add_argument("--brief", action="store_true", help="Print the totals only.")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tracer, failures = Tracer(), []

    def run_client() -> None:
        try:
            measure(tracer, Client(port), args.brief)
        except Exception as error:  # noqa: BLE001 - reported by the main thread, after the server has stopped
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    tracer.install()
    threading.Thread(target=run_client, name="client").start()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(args.model, folder, port))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
