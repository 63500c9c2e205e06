"""Rollouts of an environment over a model that answers as a function says: `from rl.rollout_rig import rig`."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SequenceOutput,
)
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.model.tools.formats import HERMES
from mlx_parallm.rl.environments import Environment, Task, is_of_episodes
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.rollouts.answers import Rollouts, RolloutSettings
from mlx_parallm.rl.rollouts.episodes import Episodes

LIVE = AdapterRef("math", 3)
END = 0
"""The token that ends an answer. All others are characters."""


class Tokenizer:
    """One token a character; `<role>text` and END for each message. Its template does not support tools."""

    tool_format = HERMES

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, at_most: int | None = None
    ) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [*map(ord, f"<{message['role']}>{message['content']}"), END, ord("\n")]
        return [*ids, *map(ord, "<assistant>")] if add_generation_prompt else ids


class Engine:
    """Answers a request with what `answer` returns for it. A text that ends with … is cut off."""

    def __init__(self, answer: Callable[[GenerationRequest], str]) -> None:
        self.answer = answer
        self.requests: list[GenerationRequest] = []
        self.running = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        self.running += 1
        try:
            await asyncio.sleep(0)
            for index in range(request.n):
                text = self.answer(request)
                cut = text.endswith("…")
                ids = (*map(ord, text), *(() if cut else (END,)))
                reason = FinishReason.LENGTH if cut else FinishReason.STOP
                logprobs = tuple(-0.1 for _ in ids)
                yield SequenceOutput(index, ids, text, finish_reason=reason, sampling_logprobs=logprobs)
            yield RequestFinished(1, request.n, 0, 0, 0, 1)
        finally:
            self.running -= 1


class Leases:
    """`held`: the leases of LIVE at the moment."""

    held = 0

    @contextmanager
    def lease(self, selector: str | None, key: str | None = None):
        assert selector == "math"
        self.held += 1
        try:
            yield LIVE
        finally:
            self.held -= 1


class Rig:
    """`groups`: the groups that were collected, with their rewards. `ended`: answers and episodes, by task."""

    def __init__(self, environment: Environment, answer: Callable[[GenerationRequest], str], **settings: Any) -> None:
        self.engine, self.thread, self.leases = Engine(answer), EnvironmentThread(), Leases()
        self.groups: list[tuple[Sequence[Trajectory], Mapping[str, float]]] = []
        self.ended: Counter[int] = Counter()
        options = RolloutSettings(**{"group_size": 2, "max_tokens": 9, "run": "r", "timeout_s": 5.0, **settings})
        draw, generate = None, lambda request: self.engine.generate(request)  # as it is then
        if is_of_episodes(environment):
            draw = Episodes(environment, self.thread, generate, self._collect, Tokenizer(), options, self._count).sample
        tasks = itertools.islice(environment.tasks(options.seed), options.taken, None)
        self.rollouts = Rollouts(generate, self.leases, Tokenizer(), tasks, options, self._count, draw)

    async def draw(self, groups: int = 1):
        return await self.rollouts.sample(groups, "math")

    async def _collect(self, turns: Sequence[Trajectory], rewards: Mapping[str, float]) -> str:
        self.groups.append((turns, rewards))
        return ""

    def _count(self, number: int, ended: int) -> None:
        self.ended[number] += ended


@asynccontextmanager
async def rig(environment: Environment, answer: Callable[[GenerationRequest], str], **settings: Any):
    one = Rig(environment, answer, **settings)
    try:
        yield one
    finally:
        one.thread.close()


class Guess:
    """Two turns: a number, and one more guess after a wrong one."""

    def tasks(self, seed: int):
        for number in itertools.count():
            yield Task(({"role": "user", "content": f"{number}?"},), CollectionSpec(metadata={"answer": str(number)}))

    async def rollout(self, client, task: Task) -> float | None:
        right = task.collection.metadata["answer"]
        first = await client.ask(task.messages)
        if first.text == right:
            return 1.0
        second = await client.ask([*task.messages, first.message, {"role": "user", "content": f"no: {right}"}])
        return 0.5 if second.text == right else 0.0


def last_message(request: GenerationRequest) -> str:
    return str(request.collection.messages[-1]["content"])


def episode_of(request: GenerationRequest) -> int:
    return int(request.collection.episode_id.rpartition("-")[2])


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))
