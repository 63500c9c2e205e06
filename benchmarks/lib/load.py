"""A client that takes little processor time: streaming completions and chat completions over plain sockets.

It speaks HTTP/1.0 with one connection per request, so both servers answer without chunked encoding and close.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
REQUEST_LIMIT_S = 180
LOAD_LIMIT_S = 600
RETRY_AFTER_S = 0.05
LINE_LIMIT = 2**20

Body = Mapping[str, Any]


class BadAnswerError(OSError):
    """The response is an error, or it stopped before its end."""


class Stream:
    """One streaming completion, of a chat if its body has messages. `arrivals` has the time of each event with text or
    tokens so far.

    Times are `time.perf_counter` seconds. `usage` is the server's own count, which comes at the end. `key`: the API key
    to send; empty for none.
    """

    def __init__(self, port: int, body: Body, key: str = "") -> None:
        self.port = port
        self.body = body
        self.key = key
        self.sent = 0.0
        self.arrivals: list[float] = []
        self.text = ""
        self.usage: dict[str, Any] = {}

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server says it took from its prefix cache."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent

    async def run(self) -> None:
        """Runs to the end, without a time limit. Raises OSError (such as BadAnswerError) if the answer is not
        complete."""
        path = "/v1/chat/completions" if "messages" in self.body else "/v1/completions"
        self.sent = time.perf_counter()
        reader, writer = await asyncio.open_connection(HOST, self.port, limit=LINE_LIMIT)
        try:
            writer.write(_http("POST", path, json.dumps(self.body).encode(), self.key))
            await _headers(reader)
            await self._read(reader)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                self._take(json.loads(line[6:]), time.perf_counter())
        raise BadAnswerError("the stream stopped before its end")

    def _take(self, event: Body, now: float) -> None:
        if "error" in event:
            raise BadAnswerError(str(event["error"]))
        text = "".join(_text(choice) for choice in event["choices"])
        if text or any(choice.get("token_ids") for choice in event["choices"]):
            self.arrivals.append(now)
        self.text += text
        self.usage = event.get("usage") or self.usage


@dataclass(slots=True)
class Load:
    """The results of a group of clients. `resets` counts failed attempts that were retried."""

    streams: list[Stream] = field(default_factory=list)
    resets: int = 0
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    client_cpu: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    @property
    def rate(self) -> float:
        """Delivered tokens per second."""
        return self.tokens / self.wall_s


async def closed_loop(port: int, bodies: Sequence[Body], clients: int, attempts: int = 1) -> Load:
    """Runs `clients` clients, each sending its next request when its last one has finished, until `bodies` are used up.

    A request is tried `attempts` times before it counts as an error. The call ends within `LOAD_LIMIT_S` seconds.
    """
    load, waiting = Load(), deque(bodies)
    started, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.timeout(LOAD_LIMIT_S):
            await asyncio.gather(*(_client(port, waiting, attempts, load) for _ in range(clients)))
    except TimeoutError:
        load.errors.append(f"unfinished after {LOAD_LIMIT_S} s")
    load.wall_s = time.perf_counter() - started
    load.client_cpu = (time.process_time() - cpu) / load.wall_s
    return load


def greedy(max_tokens: int) -> Body:
    """A greedy streaming request with a token count at the end, but without its prompt or messages."""
    return {"max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


async def get_json(port: int, path: str) -> Any:
    """The JSON answer to a GET request. Raises OSError if its status is not 200."""
    return json.loads(await get(port, path))


async def get(port: int, path: str) -> bytes:
    """The answer to a GET request. Raises OSError if its status is not 200."""
    async with asyncio.timeout(REQUEST_LIMIT_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(_http("GET", path))
            await _headers(reader)
            return await reader.read()
        finally:
            writer.close()


async def post_json(port: int, path: str, body: Body) -> Any:
    """The JSON answer to a POST request. Raises OSError if its status is not 200."""
    async with asyncio.timeout(LOAD_LIMIT_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(_http("POST", path, json.dumps(body).encode()))
            await _headers(reader)
            return json.loads(await reader.read())
        finally:
            writer.close()


async def _client(port: int, waiting: deque[Body], attempts: int, load: Load) -> None:
    while waiting:
        await _deliver(port, waiting.popleft(), attempts, load)


async def _deliver(port: int, body: Body, attempts: int, load: Load) -> None:
    """Delivers one request. The time to the first token counts from the attempt that succeeds, which favours a server
    that fails often."""
    for left in reversed(range(attempts)):
        stream = Stream(port, body)
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                await stream.run()
        except OSError as error:
            if left == 0:
                load.errors.append(f"{type(error).__name__}: {error}")
                return
            load.resets += 1
            await asyncio.sleep(RETRY_AFTER_S)
        else:
            load.streams.append(stream)
            return


def _text(choice: Mapping[str, Any]) -> str:
    """The text of one event, of a completion or of a chat."""
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def _http(method: str, path: str, body: bytes = b"", key: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.0\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _headers(reader: asyncio.StreamReader) -> None:
    status = await reader.readline()
    if b" 200 " not in status:
        raise BadAnswerError(f"{status.decode().strip() or 'connection closed'} {(await reader.read())[-300:]!r}")
    while (await reader.readline()).strip():
        pass
