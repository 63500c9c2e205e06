#!/usr/bin/env python
"""Counts the functions that requests, a trajectory, a decode step and a start pass on their way through the package.

    uv run --group dev scripts/trace_path.py              # the bundled model; a minute and a half
    uv run --group dev scripts/trace_path.py --model DIR  # any model folder
    uv run --group dev scripts/trace_path.py --record     # writes the counts that trace_path.json does not have yet

Starts `RLIntegratedServer` in this process, with a profile function in every thread, and sends it requests over HTTP.

- completion: from the bytes of the request's body on the socket to its row in the KV pool.
- trajectory: from the last token of a collected group to the adapter version that was trained on it and is live.
  Left out are `server/`, which sends the HTTP response meanwhile, the modules that compute forwards and losses, and
  functions that an uncollected request calls too (the device loop and its scheduler). Of this path the record types
  are counted too: the dataclasses and named tuples of which objects are made. Those that only `train/` passes on, from
  a batch of samples to the outcome of its update, are counted apart.
- chat: from the bytes of a chat request's body on the socket to the engine's `generate`.
- update: from the bytes of `POST /v1/training/update` on the socket to training's `update`.
- start: from `RLIntegratedServer` to a server that listens, with one model and training. It has one round.
- decode: one turn of the engine's thread, from the beginning of a decode step to the next one's, without statistics.
  Four rows decode: greedily and with top-p, each with the base model and with the trained adapter.

Each is measured in several rounds. A function counts when every round called it, so what happened to run at the same
time (a timer, a statistics snapshot) drops out. Of these, the way passes the functions that call another one of the
package; functions that call none (properties, checks, small helpers) are listed with a dot and not counted. Lambdas,
comprehensions and generated code (`__init__` of a dataclass) are no functions here.

trace_path.json keeps the first count of each path, and the table shows it beside the present one. It is never
overwritten. If what counts as a path changes, delete its entry.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx_parallm
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.core.requests import RequestFinished

PACKAGE = str(Path(mlx_parallm.__file__).parent) + os.sep
FIRST_COUNTS = Path(__file__).with_suffix(".json")
ROUNDS = 5
LIMIT_S = 120.0
GROUP = 8
ADAPTER = "default"
IDLE_S = 1.2
"""Longer than the device loop sleeps when it is idle."""
DECODED = 64

Marker = Callable[[CodeType], bool]


def function(path: str, name: str) -> Marker:
    """Matches a function by its name and the start of its file's path within the package."""
    return lambda code: code.co_name == name and code.co_filename.startswith(PACKAGE + path)


REACHES_THE_POOL = function("kv/cache.py", "open")
LEFT_OUT = (
    "server/",
    "model/",
    "batch/",
    "train/model.py",
    "train/forwards.py",
    "train/attention.py",
    "train/data.py",
    "train/losses.py",
)
RECORDS_LEFT_OUT = ("server", "model", "batch")
RECORDS_OF_UPDATES = ("train.",)
BATCHES_AND_OUTCOMES = "train.data"
REACHES_THE_ENGINE = function("engine/thread.py", "generate")
REACHES_TRAINING = function("rl/service.py", "update")
LISTENS = function("app/serve.py", "_started")
GOES_LIVE = function("adapters/", "flip")
DRAWS_THE_LAST_TOKEN = RequestFinished.__init__.__code__
STEPS = function("engine/thread.py", "step")
TAKES_STATISTICS = function("engine/thread.py", "_refresh")


def record_made_by(frame: FrameType) -> type | None:
    """The record type of the package of which this frame makes an object: a dataclass or a named tuple."""
    code = frame.f_code
    if not code.co_argcount or code.co_name not in ("__init__", "<lambda>"):
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    if code.co_name == "__init__" and is_dataclass(type(first)):
        made = type(first)
    elif code.co_name == "<lambda>" and isinstance(first, type) and issubclass(first, tuple):
        made = first
    else:
        return None
    package, _, module = made.__module__.partition(".")
    return made if package == mlx_parallm.__name__ and not module.startswith(RECORDS_LEFT_OUT) else None


@dataclass
class Way:
    """The functions called between two moments, in the order of their first calls, with their numbers of calls."""

    name: str
    begins: Marker
    ends: Marker
    leaves_out: tuple[str, ...] = ()
    calls: Counter[CodeType] = field(default_factory=Counter)
    callers: set[CodeType] = field(default_factory=set)
    records: Counter[type] = field(default_factory=Counter)
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
            elif (record := record_made_by(frame)) is not None:
                self.records[record] += 1
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


@dataclass
class Steps:
    """What each step of the engine's thread calls, until the next one begins or statistics are taken."""

    ways: list[Way] = field(default_factory=list)
    thread: int | None = None

    def see(self, frame: FrameType) -> None:
        if STEPS(frame.f_code):
            self.thread = threading.get_ident()
            self.ways.append(Way("decode: one step of the engine's thread", STEPS, lambda code: False))
        elif TAKES_STATISTICS(frame.f_code):
            self.thread = None
        if self.thread == threading.get_ident():
            self.ways[-1].see(frame)


class Tracer:
    """Shows every call of every thread to what is being recorded, if anything is."""

    def __init__(self) -> None:
        self._way: Way | Steps | None = None

    def install(self) -> None:
        """Covers this thread, and all that are started from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def recording(self, way: Way | Steps) -> Iterator[None]:
        self._way = way
        try:
            yield
        finally:
            self._way = None

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (way := self._way) is not None:
            way.see(frame)


class Client:
    """Plain HTTP to the server in this process."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(self, path: str = "/v1/completions", **body: object) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
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
    return ended(way)


def chat(tracer: Tracer, client: Client, number: int) -> Way:
    way = Way("chat: from the socket to the engine", lambda code: True, REACHES_THE_ENGINE)
    time.sleep(IDLE_S)
    messages = [{"role": "user", "content": f"Tell me a story, number {number}"}]
    with tracer.recording(way):
        client.post("/v1/chat/completions", messages=messages, max_tokens=2, temperature=0)
    return ended(way)


def update(tracer: Tracer, client: Client, number: int) -> Way:
    way = Way("update: from the socket to training", lambda code: True, REACHES_TRAINING)
    time.sleep(IDLE_S)
    given = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4 + number], "group_id": f"group {number}"}
    with tracer.recording(way):
        client.post("/v1/training/update", trajectories=[{**given, "reward": reward} for reward in (0, 1)])
    return ended(way)


def ended(way: Way) -> Way:
    """The way, whose end must have been seen."""
    if not way.ended.wait(LIMIT_S):
        raise RuntimeError(f"nothing was called that is taken for the end of {way.name}")
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
    for record in ordinary.records:
        del way.records[record]
    return way


def decode(tracer: Tracer, client: Client) -> list[Way]:
    """The steps in the middle of four rows' lives, where nothing but decoding happens."""
    base = client.post(prompt="Once", max_tokens=1)["model"]
    shared = {"prompt": "Once upon a time", "max_tokens": DECODED, "ignore_eos": True, "seed": 0}
    samplings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "top_p": 0.9}]
    rows = [{"model": model, **shared, **sampling} for model in (base, ADAPTER) for sampling in samplings]
    steps = Steps()
    with tracer.recording(steps), ThreadPoolExecutor(len(rows)) as pool:
        list(pool.map(lambda row: client.post(**row), rows))
    middle = len(steps.ways) // 2
    return steps.ways[middle : middle + ROUNDS]


@dataclass
class Passed:
    """The functions that all rounds called, in the order of the first; `callers` are those that count. And the records
    of which all rounds made objects."""

    calls: dict[CodeType, int]
    callers: set[CodeType]
    records: dict[type, int]


def common(ways: list[Way]) -> Passed:
    first = ways[0]
    every = {code: count for code, count in first.calls.items() if all(code in way.calls for way in ways)}
    callers = {code for code in every if all(code in way.callers or way.ends(code) for way in ways)}
    records = {record: count for record, count in first.records.items() if all(record in way.records for way in ways)}
    return Passed(every, callers, records)


def counts(passed: Passed) -> dict[str, int]:
    return {
        "functions": len(passed.callers),
        "files": len({code.co_filename for code in passed.callers}),
        "functions, with those that call no other": len(passed.calls),
        "files, with those that call no other": len({code.co_filename for code in passed.calls}),
        "record types": sum(not is_of_updates(record) for record in passed.records),
        "record types, with those of updates on the device": len(passed.records),
    }


def is_of_updates(record: type) -> bool:
    """Whether only the trainer uses records of this type."""
    module = record.__module__.partition(".")[2]
    return module.startswith(RECORDS_OF_UPDATES) and module != BATCHES_AND_OUTCOMES


def show(name: str, passed: Passed, brief: bool) -> None:
    functions, files, every, everywhere, records, _ = counts(passed).values()
    print(f"{name}: {functions} functions in {files} files, {records} record types")
    print(f"  with those that call no other: {every} functions in {everywhere} files")
    for record, count in () if brief else passed.records.items():
        print(f"  {count:6}   {record.__module__.partition('.')[2]}.{record.__qualname__}")
    for code, count in () if brief else passed.calls.items():
        mark = " " if code in passed.callers else "."
        print(f"  {count:6} {mark} {code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")


def compare(found: dict[str, dict[str, int]], record: bool) -> None:
    first = json.loads(FIRST_COUNTS.read_text()) if FIRST_COUNTS.exists() else {}
    if record:
        first = {way: now | first.get(way, {}) for way, now in found.items()}
        FIRST_COUNTS.write_text(json.dumps(first, indent=1) + "\n")
    for way, now in found.items():
        for what, count in now.items():
            before = first.get(way, {}).get(what)
            print(f"{way:12}{what:51}{count:5}" + (f"  at first {before}" if before is not None else ""))


def measure(tracer: Tracer, client: Client, start: Way, brief: bool) -> dict[str, dict[str, int]]:
    client.wait_until_ready()
    rounds = {"start": [ended(start)]}
    for way in (completion, chat, update, trajectory):
        way(tracer, client, 0)  # imports and caches that only a first request fills
        rounds[way.__name__] = [way(tracer, client, 1 + number) for number in range(ROUNDS)]
    decode(tracer, client)
    rounds["decode"] = decode(tracer, client)
    passed = {name: common(ways) for name, ways in rounds.items()}
    for name, ways in rounds.items():
        show(ways[0].name, passed[name], brief)
    return {name: counts(each) for name, each in passed.items()}


async def serve(model: str | None, folder: str, port: int) -> None:
    server = RLIntegratedServer(
        model,
        LoRAConfig(rank=4),
        RLConfig(batch_size=GROUP),
        server__access_log=False,
        server__kv_cache_memory="512MB",
        checkpointing__checkpoint_dir=folder,
    )
    await asyncio.gather(server.run_inference(port=port), server.run_training_loop())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A model folder. Default: the bundled model.")
    parser.add_argument("--brief", action="store_true", help="Print the totals only.")
    parser.add_argument("--record", action="store_true", help="Write the counts that trace_path.json does not have.")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tracer, failures = Tracer(), []
    start = Way("start: to a server that listens", function("app/serve.py", "__init__"), LISTENS)

    def run_client() -> None:
        try:
            compare(measure(tracer, Client(port), start, args.brief), args.record)
        except Exception as error:  # noqa: BLE001 - reported by the main thread, after the server has stopped
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    tracer.install()
    threading.Thread(target=run_client, name="client").start()
    with tempfile.TemporaryDirectory() as folder, tracer.recording(start):
        asyncio.run(serve(args.model, folder, port))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
