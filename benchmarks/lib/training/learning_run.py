"""One learning run: a real server, a client that samples rollouts, and an evaluation before and after."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import httpx

from benchmarks.lib import peers
from benchmarks.lib.training.learning_tasks import Prompt, RandomRewards, Task

GROUP, PROMPTS = 8, 4
LIMIT_S = 480
"""Longest duration of one run in seconds, with the start of the server and the evaluations."""

FLAGS = (
    *("--enable-rl-training", "--lora-rank", "16", "--lora-alpha", "32", "--rl-algorithm", "dapo"),
    *("--max-decode-stall-ms", "3000"),
    *("--learning-rate", "5e-4", "--update-frequency", str(GROUP * PROMPTS), "--max-staleness", "1"),
)
OPENING_TOKENS = 4
"""Length of an episode's first answer, which says no more than OK."""

POLL_S = 0.05
SHOWN = 4
"""Number of held-out prompts whose answers are kept."""

CONFIG = """
rl_training:
  gradient_checkpointing: false
  loss:
    entropy_coef: 0.02
"""
"""A small model needs no gradient checkpointing. Without the entropy bonus it soon gives one answer to everything."""

PLATEAU, SOLVED = 3, 0.95
"""A run stops early after `PLATEAU` updates in a row with a mean reward of at least `SOLVED`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of held-out prompts at temperature 1, and some of the answers."""

    rewards: list[float]
    answers: list[tuple[str, str]]

    @property
    def mean(self) -> float:
        return mean(self.rewards)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return stdev(self.rewards) / len(self.rewards) ** 0.5


@dataclass(slots=True)
class Run:
    """The results of one run. `updates`: the outcome of each update, and its metrics."""

    task: str
    seed: int
    before: Evaluation | None
    after: Evaluation | None = None
    updates: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    served_by: str = ""

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Run":
        """The run from its JSON record."""
        before, after = (
            Evaluation(part["rewards"], [(q, a) for q, a in part["answers"]])
            for part in (record["before"], record["after"])
        )
        return cls(**{**record, "before": before, "after": after})

    @property
    def gain(self) -> float:
        assert self.after is not None
        return self.after.mean - self.before.mean

    @property
    def gain_error(self) -> float:
        assert self.after is not None
        return float((self.before.error**2 + self.after.error**2) ** 0.5)


async def run(task: Task, seed: int, logs: Path, limit_s: float = LIMIT_S) -> Run:
    """Trains on one task with one seed.

    Raises:
        RuntimeError: a request failed.
    """
    began = time.monotonic()
    config = logs / "config.yaml"
    config.write_text(CONFIG)
    async with peers.our_server(None, logs, [*FLAGS, "--seed", str(seed), "--config", str(config)]) as server:
        with server.awake():
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as http:
                client = Client(http, task, seed)
                result = Run(task.name, seed, await client.evaluate())
                await learn(client, task, seed, result, began + limit_s)
                result.after = await client.evaluate()
                result.served_by = client.served_by
    result.seconds = time.monotonic() - began
    return result


async def learn(client: "Client", task: Task, seed: int, result: Run, until: float) -> None:
    """Makes updates until the task is solved, their number is reached, or the time is nearly over."""
    prompts, solved, slowest, reward = task.training(seed), 0, 0.0, 0.0
    reserve = 2.0 * client.evaluation_s
    while len(result.updates) < task.updates and time.monotonic() + slowest + reserve < until:
        started = time.monotonic()
        report = await client.update(prompts)
        slowest = max(slowest, time.monotonic() - started)
        result.updates.append(report)
        reward = report["metrics"].get("reward_mean", reward)  # skipped: no group's rewards differed
        print(
            f"  {task.name} seed {seed}: update {len(result.updates)}, reward {reward:.2f}, "
            f"{time.monotonic() - started:.1f} s, {report['outcome']}",
            flush=True,
        )
        solved = solved + 1 if reward >= SOLVED else 0
        if solved >= PLATEAU:
            return


class Client:
    """The requests of an RL program to a server."""

    def __init__(self, http: httpx.AsyncClient, task: Task, seed: int) -> None:
        self._http = http
        self._dice = random.Random(seed)
        self._task = task
        self._groups = 0
        self.evaluation_s = 0.0
        self.served_by = ""

    async def evaluate(self) -> Evaluation:
        """Answers the held-out prompts, which are not collected."""
        started = time.monotonic()
        prompts = self._task.held_out()
        answers = await asyncio.gather(*(self._answer(prompt, at) for at, prompt in enumerate(prompts)))
        rewards = [self._task.rewarded(prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
        shown = [(f"{p.opening} {p.text}", text) for p, (text, _) in zip(prompts[:SHOWN], answers, strict=False)]
        self.evaluation_s = time.monotonic() - started
        return Evaluation(rewards, shown)

    async def _answer(self, prompt: Prompt, seed: int) -> tuple[str, bool]:
        """The last answer to a prompt that is not collected, and whether it ended by itself."""
        if prompt.opening:
            return await self._episode(prompt, seed, {})
        answer = await self._complete(prompt, n=1, seed=seed)
        (choice,) = answer["choices"]
        return choice["text"], choice["finish_reason"] == "stop"

    async def update(self, prompts: Iterator[Prompt]) -> dict[str, Any]:
        """Samples groups of the next prompts until the server has made an update, which needs a whole batch of groups
        whose rewards differ."""
        before = await self._status()
        while _made(status := await settled(self._http)) == _made(before):
            await asyncio.gather(*(self._rollout(prompt) for prompt in islice(prompts, PROMPTS)))
        skipped = status["updates_total"] == before["updates_total"]
        outcome = "skipped" if skipped else f"{status['current_lora']} is live"
        return {"outcome": outcome, "metrics": {} if skipped else status["metrics"]}

    async def _rollout(self, prompt: Prompt) -> None:
        if prompt.opening:
            self._groups += 1
            group = f"group-{self._groups}"
            await asyncio.gather(*(self._collected_episode(prompt, group, str(number)) for number in range(GROUP)))
            return
        marks: dict[str, Any] = {"collect_trajectory": True, "metadata": prompt.metadata}
        if prompt.scorer:
            marks["scoring_function"] = prompt.scorer
        answer = await self._complete(prompt, n=GROUP, **marks)
        if prompt.scorer:
            return
        for choice, trajectory in zip(answer["choices"], answer["trajectory_ids"], strict=True):
            score = self._score(prompt, choice)
            await self._post("/v1/training/feedback", trajectory_id=trajectory, score=score)

    async def _collected_episode(self, prompt: Prompt, group: str, episode: str) -> None:
        """One episode of a group, with its reward. It is named by headers, as an OpenAI client can send them."""
        headers = {"X-Group-Id": group, "X-Group-Size": str(GROUP), "X-Episode-Id": episode}
        text, ended = await self._episode(prompt, self._dice.getrandbits(32), headers)
        score = self._task.rewarded(prompt, text, ended)
        await self._post("/v1/training/feedback", episode_id=episode, group_id=group, score=score)

    async def _episode(self, prompt: Prompt, seed: int, headers: dict[str, str]) -> tuple[str, bool]:
        """Both turns of an episode. Returns the second answer, and whether it ended by itself."""
        messages: list[dict[str, Any]] = []
        turns = ((prompt.opening, OPENING_TOKENS), (prompt.text, self._task.max_tokens))
        for number, (text, max_tokens) in enumerate(turns):
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "max_tokens": max_tokens, "seed": seed + number}
            answer = checked(await self._http.post("/v1/chat/completions", json=body, headers=headers))
            self.served_by = answer.get("lora_adapter", "base")
            (choice,) = answer["choices"]
            messages.append(choice["message"])
        return messages[-1]["content"], choice["finish_reason"] == "stop"

    def _score(self, prompt: Prompt, choice: dict[str, Any]) -> float:
        if isinstance(self._task, RandomRewards):
            return self._task.feedback()
        return self._task.rewarded(prompt, choice["text"], choice["finish_reason"] == "stop")

    async def _status(self) -> dict[str, Any]:
        return await training_status(self._http)

    async def _complete(self, prompt: Prompt, n: int, **fields: Any) -> dict[str, Any]:
        fields = {"seed": self._dice.getrandbits(32), **fields}
        body = {"prompt": prompt.text, "max_tokens": self._task.max_tokens, "temperature": 1.0, "n": n, **fields}
        answer = dict(checked(await self._http.post("/v1/completions", json=body)))
        self.served_by = answer.get("lora_adapter", "base")
        return answer

    async def _post(self, path: str, **body: Any) -> None:
        checked(await self._http.post(path, json=body))


async def settled(http: httpx.AsyncClient) -> dict[str, Any]:
    """Waits until no trajectory waits for its reward and no update is running. Returns the status."""
    while True:
        await asyncio.sleep(POLL_S)
        status = await training_status(http)
        if not status["trajectories_waiting"] and status["state"] != "updating":
            return status


async def training_status(http: httpx.AsyncClient) -> dict[str, Any]:
    return dict(checked(await http.get("/v1/training/status")))


def checked(answer: httpx.Response) -> Any:
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.request.url.path}: {answer.status_code} {answer.text[:300]}")
    return answer.json()


def _made(status: dict[str, Any]) -> int:
    """Number of updates, including skipped ones."""
    return int(status["updates_total"]) + sum(status["skips"].values())
