"""One request over a plain socket, and what its answer says, in the form of each API.

An answer is read until the server closes the connection, so a second end of it would be seen.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.load import HOST

LIMIT_S = 120.0
"""Longest time that an answer may take: after it, the request counts as hanging."""

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_TEXT, TOKENS, EMBEDDINGS = "/api/chat", "/api/generate", "/inference/v1/generate", "/v1/embeddings"
DONE = "data: [DONE]"

Body = Mapping[str, Any]
Part = tuple[object, Any, bool]
"""The index of an answer, a piece of its text (or its tokens or vector), and whether this ends it."""
GoesOn = Callable[[], Awaitable[bool]]
"""Whether a client may begin another request. Returns after a pause, so a client asks when it has none under way."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. `status` 0: nothing did, because `error`. `seconds`: until the server closed the connection."""

    status: int
    body: bytes
    sent: float
    seconds: float
    error: str = ""

    @property
    def ended(self) -> float:
        return self.sent + self.seconds

    @property
    def refused(self) -> bool:
        """Whether there was no server to answer, or it said that it would not."""
        return self.status == 503 or (not self.status and self.error != TimeoutError.__name__)

    def json(self) -> Any:
        return json.loads(self.body)

    def about(self, path: str, body: object) -> str:
        """Request and reply, shortened."""
        asked = f"{path} {str(body)[:200]} at {self.sent:.1f}"
        return f"{asked}: {self.status} {self.error} {self.body[:300]!r} after {self.seconds:.1f} s"


@dataclass(slots=True)
class Answer:
    """What a reply says. `ends`: how often each part of it ended. `content`: by the index of an answer."""

    ends: Counter[object] = field(default_factory=Counter)
    content: dict[object, Any] = field(default_factory=dict)
    version: str = ""
    top_two: list[float] = field(default_factory=list)
    """For each token, the difference of the best two log-probabilities, where the request wanted them."""


def head(method: str, path: str, length: int, key: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.0", f"Host: {HOST}", f"Authorization: Bearer {key}", *more]
    return "\r\n".join([*lines, "Content-Type: application/json", f"Content-Length: {length}", "", ""]).encode()


async def ask(port: int, path: str, body: Body | None = None, key: str = "") -> Reply:
    """Sends a POST with the body, or a GET without one."""
    sent = b"" if body is None else json.dumps(body).encode()
    return await exchange(port, head("GET" if body is None else "POST", path, len(sent), key) + sent)


async def exchange(port: int, request: bytes) -> Reply:
    """Sends the bytes, and reads until the server closes the connection."""
    began, raw, error, writer = time.monotonic(), b"", "", None
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(request)
            while piece := await reader.read(2**16):
                raw += piece
    except (OSError, TimeoutError) as caught:
        error = type(caught).__name__
    finally:
        if writer is not None:
            writer.close()
    top, _, body = raw.partition(b"\r\n\r\n")
    status = int(top.split()[1]) if top.startswith(b"HTTP/") else 0
    return Reply(status, body, began, time.monotonic() - began, error)


def read(path: str, raw: bytes, streamed: bool) -> Answer:
    """Raises ValueError if the answer is an error or is not in the form of its API."""
    answer, text = Answer(), raw.decode()
    if path in (COMPLETIONS, CHAT) and streamed:
        answer.ends["stream"] = text.count(DONE)
    for each in _objects(text, streamed):
        if each.get("error") or each.get("type") in ("error", "response.failed"):
            raise ValueError(f"an error: {json.dumps(each)[:300]}")
        inner = each.get("message")
        answer.version = each.get("lora_adapter") or (inner or {}).get("lora_adapter") or answer.version
        answer.top_two += _top_two(each)
        for index, piece, ended in _parts(path, each):
            answer.content[index] = answer.content[index] + piece if index in answer.content else piece
            answer.ends[index] += ended
    return answer


def _objects(text: str, streamed: bool) -> Iterator[dict[str, Any]]:
    if not streamed:
        yield json.loads(text)
        return
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)
        elif line.startswith("data: ") and not line.startswith(DONE):
            yield json.loads(line[6:])


def _parts(path: str, each: dict[str, Any]) -> Iterator[Part]:
    kind = each.get("type", "")
    if path in (COMPLETIONS, CHAT):
        for choice in each["choices"]:
            said = choice.get("message") or choice.get("delta") or {}
            yield choice["index"], choice.get("text") or said.get("content") or "", choice["finish_reason"] is not None
    elif path == TOKENS:
        yield from ((choice["index"], choice["token_ids"], True) for choice in each["choices"])
    elif path == EMBEDDINGS:
        yield from ((one["index"], one["embedding"], True) for one in each["data"])
    elif path == RESPONSES and not kind:
        yield 0, "".join(part["text"] for item in each["output"] for part in item["content"]), True
    elif path == RESPONSES:
        text = each["delta"] if kind == "response.output_text.delta" else ""
        yield 0, text, kind in ("response.completed", "response.incomplete")
    elif path == MESSAGES and kind == "message":
        yield 0, "".join(block["text"] for block in each["content"]), each["stop_reason"] is not None
    elif path == MESSAGES:
        yield 0, each["delta"]["text"] if kind == "content_block_delta" else "", kind == "message_stop"
    else:
        yield 0, each.get("response") or each.get("message", {}).get("content", ""), each["done"]


def _top_two(each: dict[str, Any]) -> Iterator[float]:
    for choice in each.get("choices", ()):
        logprobs = choice.get("logprobs") or {}
        tops = [list(top.values()) for top in logprobs.get("top_logprobs") or ()]
        tops += [[one["logprob"] for one in entry["top_logprobs"]] for entry in logprobs.get("content") or ()]
        yield from (top[0] - top[1] for top in tops if len(top) > 1)
