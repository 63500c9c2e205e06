"""A stand-in for the policies behind the Tinker API."""

from __future__ import annotations

import asyncio
from typing import Any

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import UnknownModelError
from mlx_parallm.extras.tinker.records import Layers, PolicyCard, PolicyStep, TokenScores


class FakePolicies:
    """Notes what is asked of each policy, in order. `hold`: `forward_backward` waits until it is set. Every target has
    the logprob -0.5."""

    max_rank = 16

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.steps: dict[str, int] = {}
        self.tags: dict[tuple[str, str], int] = {}
        self.hold = asyncio.Event()
        self.hold.set()
        self.running = 0
        self.head_can_be_trained = True
        self.error: Exception | None = None

    def layers_of(self, targets: Any) -> Layers:
        return Layers()

    async def create(self, name: str, spec: Any) -> PolicyCard:
        self._note("create", name, spec)
        self.steps[name] = 0
        return self.card(name)

    async def create_from(self, name: str, source: str, tag: str, with_optimizer: bool) -> PolicyCard:
        self._note("create_from", name, source, tag, with_optimizer)
        self.steps[name] = self.tags[source, tag]
        return self.card(name)

    def card(self, name: str) -> PolicyCard:
        if name not in self.steps:
            raise UnknownModelError(f"no policy {name!r} is in training")
        return PolicyCard(name, 4, 32.0, ("q_proj",), self.steps[name])

    async def forward(self, name: str, sequences: Any, loss: Any) -> TokenScores:
        self._note("forward", name, sequences, loss)
        return TokenScores(1.5, tuple((-0.5,) * len(each.token_ids) for each in sequences))

    async def forward_backward(self, name: str, sequences: Any, loss: Any) -> TokenScores:
        self._note("forward_backward", name, sequences, loss)
        self.running += 1
        try:
            await self.hold.wait()
        finally:
            self.running -= 1
        return TokenScores(1.5, tuple((-0.5,) * len(each.token_ids) for each in sequences))

    async def step(self, name: str, adam: Any) -> PolicyStep:
        self._note("step", name, adam)
        self.steps[name] += 1
        return PolicyStep(self.steps[name], {"grad_norm": 2.0})

    async def restore(self, name: str, source: str, tag: str, with_optimizer: bool) -> None:
        self._note("restore", name, source, tag, with_optimizer)
        self.steps[name] = self.tags[source, tag]

    async def save(self, name: str, tag: str, overwrite: bool) -> CheckpointCard:
        self._note("save", name, tag, overwrite)
        self.tags[name, tag] = self.steps[name]
        return self.checkpoints(name)[-1]

    async def publish(self, name: str) -> AdapterRef:
        self._note("publish", name)
        return BASE_ADAPTER

    def saved(self, name: str, tag: str) -> AdapterRef:
        if (name, tag) not in self.tags:
            raise UnknownModelError(f"{name!r} has no checkpoint {tag!r}")
        return BASE_ADAPTER

    def checkpoints(self, name: str) -> tuple[CheckpointCard, ...]:
        return tuple(
            CheckpointCard(f"checkpoint-{step}", AdapterRef(name, 1), step, "", 0, (tag,), rank=4)
            for (owner, tag), step in self.tags.items()
            if owner == name
        )

    async def close(self, name: str) -> None:
        self._note("close", name)
        if self.steps.pop(name, None) is None:
            raise UnknownModelError(f"no policy {name!r} is in training")

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    @property
    def kinds(self) -> list[str]:
        return [call[0] for call in self.calls]
