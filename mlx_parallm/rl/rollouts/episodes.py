"""Groups of episodes: a task is done several times by the rollouts of its environment. EpisodeClient: what the program
of one rollout asks. Its turns are recorded as the trajectories of one episode.

A group is collected as a whole when its last episode has ended, so what a process leaves behind when it ends is a group
or nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StopParams,
    WorkClass,
)
from mlx_parallm.core.splitter import MAX_CALLS_PER_ANSWER, AnswerSyntax, split
from mlx_parallm.core.text import TextTokenizer, Tool, ToolCall
from mlx_parallm.core.tool_text import chat_prompt
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.core.turns import Closers, continued
from mlx_parallm.errors import InvalidRequestError, TrainingFailedError
from mlx_parallm.rl.environments import Answer, EpisodeEnvironment, Message, RolloutError, Task
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.rollouts.answers import (
    Generate,
    OnSampled,
    RolloutResult,
    RolloutSettings,
    all_ended,
    trajectories_of,
)

_MAX_TURNS = 100
"""Turns of an episode. A program that asks for ever must end."""

_CHANGED = "the messages are not those of an earlier turn of its episode, followed by the answer to it"
_RENDERED_ANEW = "the chat template writes the earlier messages differently now"


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answered turn: the conversation with its answer, what the template made of the conversation without it, and
    the sampled tokens."""

    conversation: tuple[Message, ...]
    rendered: tuple[int, ...]
    trajectory: Trajectory


class EpisodeClient:
    """Implements `RolloutClient` for one episode. `ask` is called on the environment's thread; the rest on the event
    loop of the engine, where the client is made.

    Args:
        number: of the task.
        episode: its number in the group, from 0.

    Attributes:
        turns: the trajectories of the turns that were answered, in order.
        group_id, episode_id: of all turns.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: TextTokenizer,
        settings: RolloutSettings,
        adapter: AdapterRef,
        task: Task,
        number: int,
        episode: int,
    ) -> None:
        self.turns: list[Trajectory] = []
        self._generate, self._tokenizer, self._settings = generate, tokenizer, settings
        self._adapter, self._task = adapter, task
        self.group_id = f"rollout-{settings.run}-{number}"
        self.episode_id = f"{self.group_id}-{episode}"
        self._seed = f"{settings.seed}/{number}/{episode}"
        self._loop = asyncio.get_running_loop()
        self._answered: list[_Turn] = []
        self._asked = 0
        self._ended = False
        self._clock = _Clock()
        self._closers = Closers()

    def left_s(self) -> float:
        """The time that the program may still take. The time of the model's answers does not count."""
        return self._settings.timeout_s - self._clock.seconds

    def end(self) -> None:
        """No more turns are answered."""
        self._ended = True

    async def ask(
        self, messages: Sequence[Message], max_tokens: int | None = None, tools: Sequence[Tool] = ()
    ) -> Answer:
        """See `RolloutClient.ask`."""
        conversation = tuple({**message} for message in messages)
        if not conversation or not all(isinstance(each.get("role"), str) for each in conversation):
            raise InvalidRequestError("ask: give a list of messages with role and content", "messages")
        most = self._settings.max_tokens
        stopping = StopParams(most if max_tokens is None else max(1, min(max_tokens, most)))
        rendered = self._render(conversation, tools)
        prompt, unmatched = self._prompt_of(conversation, rendered, tools)
        sampling = asyncio.run_coroutine_threadsafe(
            self._sample(tuple(prompt), stopping, conversation, unmatched, bool(tools)), self._loop
        )
        trajectory = await asyncio.wrap_future(sampling)
        answer = _answer(trajectory, tools, self._tokenizer)
        self._answered.append(_Turn((*conversation, answer.message), tuple(rendered), trajectory))
        return answer

    # -- tokens ----------------------------------------------------------------------------------

    def _prompt_of(
        self, conversation: tuple[Message, ...], rendered: list[int], tools: Sequence[Tool]
    ) -> tuple[list[int], str]:
        """The token ids of a turn's prompt, and why they continue no earlier turn; empty if they do, and for the first
        turn."""
        fitting = [turn for turn in self._answered if conversation[: len(turn.conversation)] == turn.conversation]
        if not fitting:
            return rendered, _CHANGED if self._answered else ""
        turn = max(fitting, key=lambda turn: len(turn.conversation))
        before, answered = turn.conversation[:-1], turn.conversation
        history = self._render(answered, tools, add_generation_prompt=False)
        if tuple(history[: len(turn.rendered)]) != turn.rendered:
            return rendered, _RENDERED_ANEW
        closer = self._closers.find(
            (json.dumps(tools), before[-1]["role"]),
            lambda each: self._render((*before, each), tools, add_generation_prompt=False),
        )
        sampled = turn.trajectory.completion_ids
        ids = continued((*turn.trajectory.prompt_ids, *sampled), len(sampled), history, closer, rendered)
        return (rendered, _RENDERED_ANEW) if ids is None else (ids, "")

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool = True
    ) -> list[int]:
        return chat_prompt(self._tokenizer, messages, tools, add_generation_prompt)

    # -- the engine ------------------------------------------------------------------------------

    async def _sample(
        self,
        prompt: tuple[int, ...],
        stopping: StopParams,
        messages: tuple[Message, ...],
        unmatched: str,
        calls_tools: bool,
    ) -> Trajectory:
        """Samples one turn and records it. On the event loop of the engine."""
        turn, self._asked = self._asked, self._asked + 1
        if self._ended:
            raise RolloutError("the rollout has ended")
        if turn >= _MAX_TURNS:
            raise RolloutError(f"an episode has at most {_MAX_TURNS} turns")
        name = f"{self.episode_id}-{turn}"
        collection = replace(
            self._task.collection,
            messages=messages,
            group_id=self.group_id,
            episode_id=self.episode_id,
            turn=turn,
            unmatched=unmatched,
        )
        request = GenerationRequest(
            request_id=name,
            prompts=(prompt,),
            sampling=SamplingParams(temperature=self._settings.temperature, seed=_seed(f"{self._seed}/{turn}")),
            stopping=stopping,
            adapter=self._adapter,
            work_class=WorkClass.TRAINING,
            visible_specials=self._tokenizer.tool_format.visible_specials if calls_tools else frozenset(),
            collection=collection,
        )
        with self._clock.stopped():
            ((trajectory,),) = await trajectories_of(request, self._generate)
        self.turns.append(trajectory)
        return trajectory


def _answer(trajectory: Trajectory, tools: Sequence[Tool], tokenizer: TextTokenizer) -> Answer:
    """What a turn's trajectory says, with the calls of the tools that were offered."""
    reason = trajectory.finish_reason or FinishReason.STOP
    calls = tokenizer.tool_format if tools else None
    syntax = AnswerSyntax(calls=calls, tools=tuple(tools), max_calls=MAX_CALLS_PER_ANSWER)
    parts = split(trajectory.text, syntax, cut=reason.cut_off)
    return Answer(
        parts.text,
        reason,
        trajectory.completion_ids,
        tuple(ToolCall(call.name or "", call.arguments, call.call_id, call.complete) for call in parts.calls),
        len(trajectory.prompt_ids),
    )


def _seed(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:7])


class _Clock:
    """Seconds since it was made, without those in which it was stopped. Stops may overlap."""

    def __init__(self) -> None:
        self._counted, self._since = 0.0, time.monotonic()
        self._stops = 0

    @property
    def seconds(self) -> float:
        return self._counted + (0.0 if self._stops else time.monotonic() - self._since)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._counted, self._stops = self.seconds, self._stops + 1
        try:
            yield
        finally:
            self._stops -= 1
            self._since = time.monotonic()


CollectEpisodes = Callable[[Sequence[Trajectory], Mapping[str, float]], Awaitable[str]]
"""Keeps the turns of a group's episodes, with rewards by episode id. Returns why they will not be trained on, or ""."""

OWN_REWARD = "environment"
"""In place of a scorer's name, for tasks that name none: the environment gives the rewards."""


class Episodes:
    """Samples groups of episodes. Event loop's thread only.

    Args:
        generate: answers a request without collecting it.
        collect: gets each group once, when all its episodes have ended.
    """

    def __init__(
        self,
        environment: EpisodeEnvironment,
        thread: EnvironmentThread,
        generate: Generate,
        collect: CollectEpisodes,
        tokenizer: TextTokenizer,
        settings: RolloutSettings,
        on_sampled: OnSampled = lambda _, __: None,
    ) -> None:
        self._environment, self._thread = environment, thread
        self._generate, self._collect = generate, collect
        self._tokenizer, self._settings = tokenizer, settings
        self._on_sampled = on_sampled

    async def sample(self, number: int, task: Task, adapter: AdapterRef) -> RolloutResult:
        """Does a task `group_size` times with one version. An episode that fails does not stop the others.

        Raises:
            EngineDeadError: the device thread has stopped.
            TrainingFailedError: all episodes failed; the message is that of the first one.
        """
        if task.collection.scorer is None:
            task = replace(task, collection=replace(task.collection, scorer=OWN_REWARD))
        clients = [
            EpisodeClient(self._generate, self._tokenizer, self._settings, adapter, task, number, episode)
            for episode in range(self._settings.group_size)
        ]
        ended = await all_ended(self._play(client, number, task) for client in clients)
        failures = [result for result in ended if isinstance(result, Exception)]
        if len(failures) == len(clients):
            raise TrainingFailedError(_text(failures[0]))
        turns, rewards = list[Trajectory](), dict[str, float]()
        for client, reward in zip(clients, ended, strict=True):
            if not isinstance(reward, Exception):
                turns += client.turns
                if reward is not None:
                    rewards[client.episode_id] = reward
        fault = await self._collect(turns, rewards)
        if failures:
            fault = f"{len(failures)} of {len(clients)} episodes failed, the first with: {_text(failures[0])}"
        tokens = sum(len(turn.completion_ids) for turn in turns)
        return RolloutResult(tokens, faults=(fault,) if fault else ())

    async def _play(self, client: EpisodeClient, number: int, task: Task) -> float | None:
        reward = await play(self._environment, self._thread, client, task)
        self._on_sampled(number, 1)
        return reward


async def play(
    environment: EpisodeEnvironment, thread: EnvironmentThread, client: EpisodeClient, task: Task
) -> float | None:
    """Does a task once. The turns are in `client` afterwards.

    Returns:
        The reward; None leaves it to the scoring function of the task.

    Raises:
        RolloutError: the episode has failed: it took too long, for example.
        Exception: what the environment raises.
    """
    try:
        reward = await thread.run(lambda: environment.rollout(client, task), client.left_s)
    finally:
        client.end()
    if not client.turns:
        raise RolloutError("the environment ended without asking the model")
    if reward is None:
        if task.collection.scorer in (None, OWN_REWARD):
            raise RolloutError("the environment gave no reward, and the task names no scoring function")
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutError(f"the reward must be a finite number or None, got {reward!r:.100}")
    return float(reward)


def _text(error: BaseException) -> str:
    """A line for people. Errors of an environment may say little without their type."""
    text = str(error)
    return text if isinstance(error, RolloutError) and text else f"{type(error).__name__}: {text}"
