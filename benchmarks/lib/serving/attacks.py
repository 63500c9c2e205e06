"""Requests with which one client could keep others waiting, and a process that sends them.

The bodies are built before the process reports that it is ready, so building them takes no processor time from the
server while other requests are timed.
"""

import asyncio
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.lib.load import HOST

WORDS = "hello world, how are you? "
SIZE = 16 * 2**20 - 1024
READY_LIMIT_S, END_LIMIT_S = 60, 120


@dataclass(frozen=True, slots=True)
class Attack:
    """The `requests` are sent together, and again when all are answered. `limit` bounds the 95th percentile of another
    client's request time during the attack, as a multiple of that on a quiet server."""

    name: str
    path: str
    bodies: tuple[bytes, ...]
    limit: float


def attacks() -> Iterator[Attack]:
    """Yields the attacks one by one, because they are large."""
    text = (WORDS * (SIZE // len(WORDS)))[: SIZE - 100]
    refused, compiled, answered = 2.0, 4.0, 4.0
    yield Attack("16 MB prompt", "/v1/completions", (_json(prompt=text, max_tokens=1),), refused)
    yield Attack(
        "16 MB message", "/v1/chat/completions", (_json(messages=[{"role": "user", "content": text}]),), refused
    )
    yield Attack("16 MB to /tokenize", "/tokenize", (_json(prompt=text),), refused)
    ids = b'{"max_tokens":1,"prompt":[' + b",".join([b"1"] * (SIZE // 2 - 50)) + b"]}"
    yield Attack("16 MB of ids", "/v1/completions", (ids,), refused)
    yield Attack(
        "16 MB of ids to /detokenize", "/detokenize", (ids.replace(b'"max_tokens":1,"prompt"', b'"tokens"'),), refused
    )
    stops = b'{"max_tokens":1,"prompt":"x","stop":[' + b",".join([b'"a"'] * (SIZE // 4 - 50)) + b"]}"
    yield Attack("16 MB of stop strings", "/v1/completions", (stops,), refused)
    bombs = tuple(_json(prompt="x", max_tokens=4, guided_regex="a{1000}{1000}{1000}" + "b" * n) for n in range(60))
    yield Attack("60 grammars that take for ever", "/v1/completions", bombs, compiled)
    scored = {"prompt": WORDS * 150, "max_tokens": 0, "echo": True, "logprobs": 20}
    yield Attack("logprobs of 20 for a long prompt", "/v1/completions", (_json(**scored),), answered)


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@contextmanager
def sending(attack: Attack, port: int) -> Iterator[Counter[str]]:
    """Repeats the attack from another process while the block runs. Yields the count of answers by status."""
    context = multiprocessing.get_context("spawn")
    ready, stop, results = context.Event(), context.Event(), context.SimpleQueue()
    process = context.Process(target=_send, args=(attack, port, ready, stop, results), daemon=True)
    counts: Counter[str] = Counter()
    process.start()
    try:
        if not ready.wait(READY_LIMIT_S):
            raise TimeoutError("the attacking process did not start")
        yield counts
        stop.set()
        process.join(END_LIMIT_S)
        counts.update(results.get())
    finally:
        process.kill()


def _send(attack: Attack, port: int, ready: Event, stop: Event, results: Any) -> None:
    results.put(asyncio.run(_send_all(attack, port, ready, stop)))


async def _send_all(attack: Attack, port: int, ready: Event, stop: Event) -> Counter[str]:
    counts: Counter[str] = Counter()
    ready.set()
    while not stop.is_set():
        counts.update(await asyncio.gather(*(_one(attack.path, body, port) for body in attack.bodies)))
    return counts


async def _one(path: str, body: bytes, port: int) -> str:
    """Sends one request. Returns the status of the answer."""
    head = (
        f"POST {path} HTTP/1.0\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(head.encode() + body)
            status = (await reader.readline()).split()[1].decode()
            await reader.read()
            return status
        finally:
            writer.close()
    except OSError as error:
        return type(error).__name__
