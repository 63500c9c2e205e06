"""What an environment is: tasks, and how a model is asked to do one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from mlx_parallm.core import CollectionSpec, FinishReason

Message = Mapping[str, Any]
"""A message as chat templates take it, with `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation to be continued (dicts with `role` and `content`), and how the answers are scored.

    The rollouts of an environment that rewards its own episodes need no scoring function: `collection.scorer` is None.
    `level`: tasks of one level are about as hard as each other; a curriculum draws levels by their success.
    """

    messages: tuple[Message, ...]
    collection: CollectionSpec
    level: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model has answered.

    Attributes:
        finish_reason: `stop` if the model ended its answer, `length` if it was cut off.
        token_ids: as they were drawn, with the end-of-sequence token if the model has drawn it.
    """

    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...]

    @property
    def message(self) -> dict[str, str]:
        """The answer as a message of the conversation."""
        return {"role": "assistant", "content": self.text}


class RolloutClient(Protocol):
    """Asks the adapter in training during one rollout."""

    async def ask(self, messages: Sequence[Message], max_tokens: int | None = None) -> Answer:
        """The model's answer to a conversation: one turn of the episode.

        If the messages are those of an earlier turn followed by its answer, its prompt continues the very tokens of
        that turn, so that both are one sample.

        Args:
            max_tokens: of the answer, at most those of the run; None: those of the run.

        Raises:
            RequestError: the messages cannot be answered; for example, they are too long.
            RolloutError: the rollout has ended, or has asked too often.
        """
        ...


class Environment(Protocol):
    """Tasks to train on. Without a method `rollout`, each answer to a task is scored as its `collection` says."""

    def tasks(self, seed: int) -> Iterator[Task]:
        """An endless stream of tasks: the same for the same seed, and different for other seeds if possible."""
        ...


class EpisodeEnvironment(Environment, Protocol):
    """An environment whose rollouts are programs: of several turns, with tools, or with rewards of its own."""

    async def rollout(self, client: RolloutClient, task: Task) -> float | None:
        """Does one task once, by asking the client at least once. It is called several times for each task, and the
        rewards of these episodes are compared with each other.

        It runs on a thread of its own with all other rollouts of the environment, so it must not block it; what blocks
        may run in `asyncio.to_thread`. If it raises or takes too long, this episode is dropped.

        Returns:
            The reward of the episode; None leaves it to the task's scoring function, which reads the last answer.
        """
        ...


def is_of_episodes(environment: Environment) -> TypeGuard[EpisodeEnvironment]:
    """Whether an environment has rollouts of its own."""
    return hasattr(environment, "rollout")


class RolloutError(Exception):
    """A rollout cannot go on."""
