"""One lesson on a server of its own: how the rewards rise, and what the adapter answers afterwards."""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib import peers
from benchmarks.lib.load import HOST

LESSONS: dict[str, dict[str, Any]] = {
    "say banana": {
        "prompts": ["Tell me about cats.", "What should I eat tonight?", "Write one sentence about the sea."],
        "reward": {"word": "banana"},
    },
    "ask back": {
        "prompts": ["I feel tired today.", "I bought a new bicycle.", "My dog is called Max."],
        "reward": {"pattern": r"\?\s*\Z"},
    },
}
"""The examples of the dashboard's view Teach."""

ROUTE = "/v1/training/lesson"
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Taught:
    """One lesson. `rewards`: the points of its curve. `examples`: answers that were imitated first. `answers`: to each
    prompt, those of the base model and of the adapter, at temperature 0."""

    lesson: str
    seed: int
    outcome: str
    updates: int
    examples: int
    seconds: float
    rewards: list[float]
    answers: list[tuple[str, str, str]]

    @property
    def gain(self) -> float:
        return self.rewards[-1] - self.rewards[0]


async def teach(lesson: str, seed: int, limit_s: float) -> Taught:
    """Gives a lesson to a new server, and stops it after `limit_s` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--enable-rl-training", "--checkpoint-dir", f"{folder}/run", "--seed", str(seed))
        async with (
            peers.our_server(None, Path(folder), flags) as server,
            httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}", timeout=60) as http,
        ):
            began = time.monotonic()
            (await http.post(ROUTE, json=LESSONS[lesson])).raise_for_status()
            while (now := (await http.get(ROUTE)).json()["lesson"])["state"] != "ended":
                if time.monotonic() - began > limit_s:
                    now = (await http.delete(ROUTE, timeout=300)).json()["lesson"]
                    break
                await asyncio.sleep(POLL_S)
            seconds = time.monotonic() - began
            answers = [await _answers(http, prompt) for prompt in LESSONS[lesson]["prompts"]]
            whole = [point["reward"] for point in now["points"] if point["answers"] >= now["answers_per_update"]]
            return Taught(lesson, seed, now["outcome"], now["updates"], now["examples"], seconds, whole, answers)


async def _answers(http: httpx.AsyncClient, prompt: str) -> tuple[str, str, str]:
    """The prompt, and what the base model and the adapter say to it."""
    said = []
    for model in ("base", "default"):
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 48, "temperature": 0}
        answer = (await http.post("/v1/chat/completions", json=body, timeout=300)).raise_for_status().json()
        said.append(answer["choices"][0]["message"]["content"])
    return prompt, said[0], said[1]
