"""Clients of a cluster that ask without a pause, and note how each of their requests ended."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.lib.cluster.crew import ADAPTER, Crew
from benchmarks.lib.load import HOST

ANSWERED, HUNG = "", "hung"
_HANGS_S = 60.0
_PAUSE_S = 0.3
_SAME = 1e-4
"""Log-probabilities of one version on two nodes differ by less."""
_PROMPTS = ("The quick brown fox", "Once upon a time", "Name a colour:")
_KINDS = ("whole", "whole", "stream", "stream", "collect", "collect", "own")


@dataclass(slots=True)
class Asked:
    """One request. `end`: ANSWERED, HUNG, or the code or name of its error. `began` and `ended`: on the monotonic
    clock."""

    kind: str
    began: float
    ended: float = 0.0
    end: str = ANSWERED
    ends: int = 0


@dataclass(slots=True)
class Answer:
    """What an answer says: its version, and the tokens with their log-probabilities."""

    version: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Traffic:
    """Requests of all kinds.

    `whole` and `stream` go to the head, for the base model and for the adapter in turn; `collect` too, to be trained
    on; `own` goes to the second replica.

    Attributes:
        asked: all requests so far.
        acknowledged: ids of answers that the head has kept for the trainer.
        wrong: how many answers were not those of the version that they name.
    """

    def __init__(self, crew: Crew, seed: int) -> None:
        self.asked: list[Asked] = []
        self.acknowledged: list[str] = []
        self.wrong = 0
        self._crew = crew
        self._dice = random.Random(seed)
        self._known: dict[tuple[str, str], Answer] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._client(number, kind)) for number, kind in enumerate(_KINDS)]
            yield
            for client in clients:
                client.cancel()

    def between(self, began: float, ended: float) -> list[Asked]:
        """Requests that were under way at some time between the two."""
        return [each for each in self.asked if each.began < ended and (not each.ended or each.ended > began)]

    async def _client(self, number: int, kind: str) -> None:
        port = (self._crew.replicas[1] if kind == "own" else self._crew.head).port
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=None, trust_env=False) as http:
            turn = number
            while True:
                turn += 1
                asked = Asked(kind, time.monotonic())
                self.asked.append(asked)
                try:
                    async with asyncio.timeout(_HANGS_S):
                        await self._ask(http, asked, turn)
                except TimeoutError:
                    asked.end = HUNG
                except httpx.TransportError as error:
                    asked.end = type(error).__name__
                asked.ended = time.monotonic()
                await asyncio.sleep(_PAUSE_S * self._dice.uniform(0.5, 1.5))

    async def _ask(self, http: httpx.AsyncClient, asked: Asked, turn: int) -> None:
        if asked.kind == "collect":
            await self._collect(http, asked)
            return
        prompt, model = _PROMPTS[turn % len(_PROMPTS)], (ADAPTER, "base-model")[turn % 2]
        body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        answer = Answer()
        if asked.kind == "stream":
            async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                if not response.is_success:
                    asked.end = _code(json.loads(await response.aread()), response.status_code)
                    return
                async for line in response.aiter_lines():
                    self._event(asked, answer, line)
            if asked.ends != 1:
                asked.end = asked.end or f"{asked.ends} ends"
        else:
            response = await http.post("/v1/completions", json=body)
            _take(answer, response.json()) if response.is_success else None
            asked.end = ANSWERED if response.is_success else _code(response.json(), response.status_code)
        if asked.end == ANSWERED:
            self._check(answer, prompt)

    def _event(self, asked: Asked, answer: Answer, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            asked.end, asked.ends = _code(event, 0), asked.ends + 1
            return
        asked.ends += sum(choice["finish_reason"] is not None for choice in event["choices"])
        _take(answer, event)

    async def _collect(self, http: httpx.AsyncClient, asked: Asked) -> None:
        body = {
            "model": ADAPTER if any(version for version, _ in self._known) else "base-model",
            "prompt": f"{self._dice.random()}",
            "max_tokens": 8,
            "n": 2,
            "collect_trajectory": True,
            "scoring_function": "reward",
        }
        response = await http.post("/v1/completions", json=body)
        if not response.is_success:
            asked.end = _code(response.json(), response.status_code)
        elif "trajectory_warning" in response.json():
            asked.end = "not kept"
        else:
            self.acknowledged += response.json()["trajectory_ids"]

    def _check(self, answer: Answer, prompt: str) -> None:
        """Compares an answer with the first one of its version. They may part where two tokens are equally likely."""
        first = self._known.setdefault((answer.version, prompt), answer)
        self.wrong += not _agree(answer, first)

    def pairs(self) -> tuple[int, int]:
        """How often two successive versions have answered the same prompt, and how often their answers agree, so that
        `wrong` would not show that one was used in place of the other."""
        answers = {
            (prompt, int(version.rpartition("@")[2])): answer
            for (version, prompt), answer in self._known.items()
            if version
        }
        found = [
            _agree(answer, answers[prompt, number - 1])
            for (prompt, number), answer in answers.items()
            if (prompt, number - 1) in answers
        ]
        return len(found), sum(found)


def _agree(one: Answer, other: Answer) -> bool:
    """Whether two answers may be of one version. They may part where two tokens are equally likely."""
    for mine, its, token, theirs in zip(one.logprobs, other.logprobs, one.tokens, other.tokens, strict=False):
        if abs(mine - its) > _SAME:
            return False
        if token != theirs:
            break
    return True


def _take(answer: Answer, body: dict[str, Any]) -> None:
    answer.version = body.get("lora_adapter") or answer.version
    for choice in body["choices"]:
        if found := choice.get("logprobs"):
            answer.tokens += found["tokens"]
            answer.logprobs += found["token_logprobs"]


def _code(body: dict[str, Any], status: int) -> str:
    error = body.get("error") or {}
    return str(error.get("code") or error.get("type") or status)


def errors_of(asked: list[Asked]) -> Counter[str]:
    """How requests failed, with how often."""
    return Counter(f"{each.kind}: {each.end}" for each in asked if each.end != ANSWERED)
