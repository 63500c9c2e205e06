"""What an environment is: tasks, and how a model is asked to do one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.text import Tool, ToolCall

Message = Mapping[str, Any]
"""A message as chat templates take it, with `role` and `content`.

The assistant's may have `tool_calls`, `{"id", "type": "function", "function": {"name", "arguments": an object}}`, whose
results follow as messages of the role `tool` with a `tool_call_id`.
"""


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation to be continued (dicts with `role` and `content`), and how the answers are scored.

    The rollouts of an environment that rewards its own episodes need no scoring function: `collection.scorer` is None.
    `level`: tasks of one level are about as hard as each other; a curriculum samples levels by their success.
    """

    messages: tuple[Message, ...]
    collection: CollectionSpec
    level: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model has answered.

    Attributes:
        finish_reason: `stop` if the model ended its answer, `length` if it was cut off.
        token_ids: as they were sampled, with the end-of-sequence token if the model has sampled it.
        text: without the calls of tools.
        tool_calls: of the tools that were offered, each with its id. If the answer was cut off, the last one may be
            incomplete.
        prompt_tokens: number of tokens of the prompt.
    """

    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int = 0

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        calls = [message_of(call) for call in self.tool_calls]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


def message_of(call: ToolCall) -> dict[str, Any]:
    """A call as the assistant's message has it. Arguments that are no JSON object stay text."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


class RolloutClient(Protocol):
    """Asks the adapter in training during one rollout."""

    async def ask(
        self, messages: Sequence[Message], max_tokens: int | None = None, tools: Sequence[Tool] = ()
    ) -> Answer:
        """The model's answer to a conversation: one turn of the episode.

        If the messages are those of an earlier turn followed by its answer, its prompt continues the very tokens of
        that turn, so that both are one sample.

        Args:
            max_tokens: of the answer, at most those of the run; None: those of the run.
            tools: that the model may call. Its chat template describes them, or else the system message does. No
                grammar enforces the form of a call.

        Raises:
            RequestError: the messages cannot be answered; for example, they are too long.
            RolloutError: the rollout has ended, or has asked too often.
        """


class Environment(Protocol):
    """Tasks to train on. Without a method `rollout`, each answer to a task is scored as its `collection` says.

    One may also have a method `examples(seed)`: an endless iterator of conversations, each a tuple of messages with the
    assistant's at its end, which a warm-up imitates before the first task.
    """

    def tasks(self, seed: int) -> Iterator[Task]:
        """An endless stream of tasks: the same for the same seed, and different for other seeds if possible."""


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


def is_of_episodes(environment: Environment) -> TypeGuard[EpisodeEnvironment]:
    """Whether an environment has rollouts of its own."""
    return hasattr(environment, "rollout")


def with_system_prompt(task: Task, system_prompt: str | None) -> tuple[Message, ...]:
    """The messages of the task, after the system prompt if they have no system message of their own."""
    if system_prompt is None or any(message["role"] == "system" for message in task.messages):
        return task.messages
    return ({"role": "system", "content": system_prompt}, *task.messages)


class RolloutError(Exception):
    """A rollout cannot go on."""
