"""Clients that do everything wrong: bad bodies, garbage, half requests, disconnects, and answers that nobody reads."""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.load import HOST
from benchmarks.lib.soak import asking
from benchmarks.lib.soak.asking import GoesOn, exchange, head

BAD_CLIENTS, BAD_S, GONE_CLIENTS, GONE_S, SLOW_CLIENTS = 2, 0.8, 1, 1.0, 2
"""Clients of each kind, and the seconds from one request of a client to its next one."""
SLOW_TOKENS, SLOW_BYTES, SLOW_READS, SLOW_READ_S, SLOW_BUFFER = 400, 64, 20, 0.5, 4096
RUDE_S = 0.7

_DEEP = "[" * 100_000
_BOMB = "a{1000}{1000}{1000}"
BAD: tuple[tuple[str, Any], ...] = (
    (asking.COMPLETIONS, b'{"prompt": "a", '),
    (asking.COMPLETIONS, b"[1, 2"),
    (asking.COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
    (asking.COMPLETIONS, _DEEP.encode()),
    (asking.COMPLETIONS, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"),
    (asking.COMPLETIONS, {"prompt": "a", "n": 10**6}),
    (asking.COMPLETIONS, {"prompt": "a", "max_tokens": "four"}),
    (asking.COMPLETIONS, {"prompt": "a", "temperature": -1}),
    (asking.COMPLETIONS, {"prompt": "a", "top_p": "x"}),
    (asking.COMPLETIONS, {"prompt": "a", "stop": [""]}),
    (asking.COMPLETIONS, {"prompt": "a", "logprobs": 10**6}),
    (asking.COMPLETIONS, {"prompt": [-1]}),
    (asking.COMPLETIONS, {"prompt": [10**6]}),
    (asking.COMPLETIONS, {"prompt": [5] * 9000}),
    (asking.COMPLETIONS, {"prompt": "a", "model": "no such model"}),
    (asking.COMPLETIONS, {"prompt": "a", "model": "../red"}),
    (asking.COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
    (asking.COMPLETIONS, {"prompt": "a", "guided_regex": _BOMB}),
    (asking.COMPLETIONS, {"prompt": "a", "collect_trajectory": True}),
    (asking.CHAT, {"messages": []}),
    (asking.CHAT, {"messages": [{"role": "nobody", "content": "a"}]}),
    (asking.CHAT, {"messages": "a"}),
    (asking.CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1/0 }}"}),
    (asking.CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}),
    (asking.RESPONSES, {"input": "a", "previous_response_id": "resp_none"}),
    (asking.RESPONSES, {"input": [{"type": "nothing"}]}),
    (asking.MESSAGES, {"messages": [{"role": "user", "content": "a"}]}),
    (asking.MESSAGES, {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    (asking.OLLAMA_CHAT, {"model": "base", "messages": [{"role": 1}]}),
    (asking.OLLAMA_TEXT, {"model": "none", "prompt": "a"}),
    (asking.EMBEDDINGS, {"input": []}),
    (asking.TOKENS, {"token_ids": []}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "red"}),
    ("/v1/training/update", {}),
    ("/pause", {}),
    ("/v1/nothing", {}),
    ("/pause%0A", {}),
    ("/scored_data", {"tokens": [[1]]}),
    ("/api/v1/asample", {"prompt": {"chunks": []}}),
)
"""Requests of a key that may only ask. Each is answered with a status from 400 to 499."""

RUDE: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\nContent-Le",
    b"POST /v1/completions HTTP/1.1\r\nHost: "
    + HOST.encode()
    + b"\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /login HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\nContent-Length: 4000\r\n\r\nkey=",
)
"""What is sent before the client leaves without reading."""


@dataclass(slots=True)
class Done:
    """What was done, and what must not have come of it."""

    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    refused: list[tuple[float, float, str]] = field(default_factory=list)


class Hostile:
    """All hostile clients of one process."""

    def __init__(self, port: int, key: str, goes_on: GoesOn) -> None:
        self.done = Done()
        self._port, self._key, self._goes_on = port, key, goes_on
        self._dice = random.Random(2)

    async def run(self) -> None:
        await asyncio.gather(
            *(self._every(BAD_S, self._send_bad) for _ in range(BAD_CLIENTS)),
            *(self._every(GONE_S, self._leave) for _ in range(GONE_CLIENTS)),
            *(self._every(0.1, self._read_slowly) for _ in range(SLOW_CLIENTS)),
            self._every(RUDE_S, self._be_rude),
        )

    async def _every(self, seconds: float, act: Callable[[], Any]) -> None:
        while await self._goes_on():
            began = time.monotonic()
            with suppress(OSError):  # the server is free to close what it gets from here
                await act()
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    async def _send_bad(self) -> None:
        path, body = self._dice.choice(BAD)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = self._key if self._dice.randrange(8) else "wrong-key-of-24-characters-or-more"
        reply = await exchange(self._port, head("POST", path, len(raw), key) + raw)
        if reply.refused:
            self.done.refused.append((reply.sent, reply.ended, reply.about(path, raw)))
            return
        self.done.counts["bad requests"] += 1
        self.done.statuses[reply.status] += 1
        if not 400 <= reply.status < 500 or reply.error:
            self.done.faults.append(f"bad input, answered: {reply.about(path, raw)}")

    async def _leave(self) -> None:
        """Leaves while its request waits, is prefilled or is answered, streamed or not."""
        words = self._dice.choice((4, 400, 1500))
        body = {"prompt": "word " * words, "max_tokens": 200, "stream": bool(self._dice.randrange(2)), "model": "red"}
        reader, writer = await self._send(asking.COMPLETIONS, body)
        try:
            async with asyncio.timeout(self._dice.uniform(0.0, 0.6)):
                while await reader.read(2**16):
                    pass
        except TimeoutError:
            self.done.counts["disconnects"] += 1
        finally:
            writer.transport.abort()

    async def _read_slowly(self) -> None:
        """Reads a few bytes now and then, and leaves in the end."""
        body = {"prompt": "word", "max_tokens": SLOW_TOKENS, "stream": True, "ignore_eos": True, "model": "base"}
        reader, writer = await self._send(asking.COMPLETIONS, body, SLOW_BYTES)
        try:
            for _ in range(SLOW_READS):
                if not await reader.read(SLOW_BYTES):
                    break
                await asyncio.sleep(SLOW_READ_S)
            self.done.counts["slow readers"] += 1
        finally:
            writer.transport.abort()

    async def _be_rude(self) -> None:
        _, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(self._dice.choice(RUDE))
            await writer.drain()
            await asyncio.sleep(self._dice.uniform(0.0, 0.5))
            self.done.counts["garbage and half requests"] += 1
        finally:
            writer.transport.abort()

    async def _send(
        self, path: str, body: dict[str, Any], limit: int = 2**16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sent = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(HOST, self._port, limit=limit)
        if limit < SLOW_BUFFER:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        writer.write(head("POST", path, len(sent), self._key) + sent)
        return reader, writer
