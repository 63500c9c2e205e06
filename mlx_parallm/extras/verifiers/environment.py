"""Verifiers: an environment of the package verifiers as one of ours. PolicyClient: the client of verifiers that asks
the adapter in training, and how each episode gets its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect

from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.text import Tool, ToolCall
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.verifiers.settings import Settings, named, read_settings
from mlx_parallm.rl.environments.protocol import Answer, Message, RolloutClient, RolloutError, Task, message_of

MODEL = "mlx-parallm"
"""The name by which verifiers knows the adapter in training."""

CLIENT = vf.TrainClientConfig(base_url="http://127.0.0.1:1", api_key_var="NONE")
"""Stands for the adapter in training in a configuration of verifiers. Nothing is sent there. With a configuration of
this type, verifiers asks for whole answers and streams them itself to programs that want a stream."""

_POLICY: ContextVar[PolicyClient] = ContextVar("policy")


class PolicyClient(vf.Client):
    """Answers the requests of one episode.

    Args:
        client: asks the model.

    Attributes:
        fault: the last error of a request; None after one that was answered.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._answered = 0
        self.fault: Exception | None = None

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Inside, all that the current task opens with `CLIENT` is answered by this policy."""
        token = _POLICY.set(self)
        try:
            yield
        finally:
            _POLICY.reset(token)

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """See `verifiers.v1.Client.get_response`. Only `max_tokens` of the sampling is read: the others are the run's.

        Raises:
            ProviderError: the request cannot be answered.
        """
        try:
            answer = await self._ask(dialect, body, turn)
        except Exception as error:  # whatever it is, the episode fails with it
            self.fault = error
            raise vf.ProviderError(f"{type(error).__name__}: {error}", status_code=400) from error
        self.fault = None
        self._answered += 1
        return self._response(answer)

    async def _ask(self, dialect: Any, body: dict[str, Any], turn: Any) -> Answer:
        if not isinstance(dialect, ChatDialect):
            raise NotImplementedError(f"{dialect.upstream_path} is not served here, only chat completions are")
        request = turn if turn is not None else dialect.parse_request(body)
        messages = [_message(each) for each in (turn.prompt if turn is not None else request.messages)]
        tools = [_tool(each) for each in request.tools or ()]
        return await self._client.ask(messages, body.get("max_completion_tokens") or body.get("max_tokens"), tools)

    def _response(self, answer: Answer) -> Any:
        calls = [
            vf.ToolCall(id=call.call_id, name=call.name, arguments=call.arguments or "{}") for call in answer.tool_calls
        ]
        called = bool(calls) and answer.finish_reason is FinishReason.STOP
        response = vf.Response(
            id=f"answer-{self._answered}",
            created=0,
            model=MODEL,
            message=vf.AssistantMessage(content=answer.text or None, tool_calls=calls or None),
            finish_reason="tool_calls" if called else answer.finish_reason.value,
            usage=vf.Usage(prompt_tokens=answer.prompt_tokens, completion_tokens=len(answer.token_ids)),
        )
        response.raw = serialize_completion(response, MODEL)
        return response


class PolicyInterception:
    """An interception of verifiers whose sessions are answered by the policy of the episode that opened them. Those of
    agents with a client of their own keep it."""

    def __init__(self, interception: Any) -> None:
        self._interception = interception

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        async with self._interception.acquire(session) as slot:
            if session.ctx.client == CLIENT:
                session.client = _POLICY.get()
            yield slot


# ---- messages of verifiers as chat templates take them ---------------------------------------------


def _message(message: Any) -> Message:
    fields: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    if message.role == "assistant" and message.tool_calls:
        fields["tool_calls"] = [message_of(ToolCall(call.name, call.arguments, call.id)) for call in message.tool_calls]
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id
        fields |= {"name": message.name} if message.name else {}
    return fields


def text_of(content: Any) -> str:
    """The text of a message's content.

    Raises:
        NotImplementedError: it has a part that is not text.
    """
    if not isinstance(content, list):
        return content or ""
    if any(part.type != "text" for part in content):
        raise NotImplementedError("the environment shows the model an image; only text is supported")
    return "\n".join(part.text for part in content)


def _tool(tool: Any) -> Tool:
    if tool.type != "function" or tool.namespace:
        raise NotImplementedError(f"the tool {tool.name} is of the kind {tool.type}; only functions are supported")
    parameters = json.loads(json.dumps(tool.parameters))
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


_log = logging.getLogger(__name__)

_NOISY = ("verifiers", "aiohttp.access", "httpx", "httpx2")
"""Loggers with lines for each rollout or request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersTask(Task):
    """`source`: verifiers' task."""

    source: Any


class Verifiers:
    """Plays the tasks of an environment of verifiers, which rewards its own episodes.

    Args:
        environment_id: of a taskset of verifiers.

    Raises:
        ConfigError: it is unknown, cannot be loaded, has no tasks, or needs something that is not given here.
    """

    def __init__(self, environment_id: str) -> None:
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._id = environment_id
        self._settings = read_settings(environment_id)
        self._context = vf.ModelContext(model=MODEL, client=CLIENT)
        self._serving = _Serving(self._settings)
        try:
            self._taskset = self._settings.load().taskset
            self._known = [*(self._taskset if self._taskset.bounded else itertools.islice(self._taskset, 1))]
        except Exception as error:  # a user's environment may raise anything
            raise ConfigError(f"environment: {named(environment_id)} cannot be loaded: {error}") from error
        if not self._known:
            raise ConfigError(f"environment: {named(environment_id)} has no tasks")
        for task in self._known:
            if needs := _what_is_missing(task):
                raise ConfigError(f"environment: {named(environment_id)}: task {task.data.idx} needs {needs}")

    def tasks(self, seed: int) -> Iterator[Task]:
        """The tasks of a finite taskset, each once before any comes again, in an order that depends on the seed; those
        of an endless one in its own order."""
        if not self._taskset.bounded:
            yield from map(self._task, self._taskset)
            return
        for epoch in itertools.count():
            order = random.Random(f"{seed}/{epoch}").sample(self._known, len(self._known))
            yield from map(self._task, order)

    async def rollout(self, client: RolloutClient, task: Task) -> float | None:
        """The episode's reward by the rubric of the task; None if the task has none.

        Raises:
            RolloutError: the episode failed.
            Exception: the last error of the client, if the episode failed with it.
        """
        assert isinstance(task, VerifiersTask)
        environment, policy = await self._serving.environment(), PolicyClient(client)
        with policy.playing():
            episode = await environment.run_episode(_with_system_prompt(task), self._context)
        if not episode.ok:
            raise policy.fault or RolloutError(_fault(episode))
        played = [trace for trace in episode.traces if trace.agent.name == self._settings.agent]
        if len(played) != 1:
            raise RolloutError(
                f"{named(self._id)} ran its agent {len(played)} times in one episode; it must be once, because an "
                "episode has one reward"
            )
        return float(played[0].reward) if any(each is not None for each in played[0].rewards.values()) else None

    def _task(self, source: Any) -> VerifiersTask:
        collection = CollectionSpec(metadata={"environment": named(self._id), "task": source.data.idx})
        return VerifiersTask(_messages(source), collection, source=source)


class _Serving:
    """What all episodes of an environment share while it is served: its tools, and verifiers' interception servers.

    They belong to one event loop, and end with it. A later loop gets others.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._holding: asyncio.Task[None] | None = None

    async def environment(self) -> Any:
        """The environment that is served on the running loop. Raises what its start raises; the next call tries
        again."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._ready is None:
            self._loop, self._ready = loop, loop.create_future()
            self._holding = loop.create_task(self._hold(self._ready))
        return await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Serves until the loop ends, which cancels its tasks."""
        try:
            environment = self._settings.load()
            async with environment.serving():
                environment._interception = PolicyInterception(environment._interception)
                ready.set_result(environment)
                await asyncio.Event().wait()
        except BaseException as error:  # a user's environment may raise anything, SystemExit too
            cancelled = isinstance(error, asyncio.CancelledError)
            if not ready.done():
                known = isinstance(error, Exception)
                ready.set_exception(error if known else RolloutError(f"the environment did not start: {error!r}"))
                ready.exception()  # all that waited for it may be gone, and nothing is to be logged of that
            elif not cancelled:
                _log.warning("environment: %s", error)
            if self._ready is ready:
                self._ready = None
            if cancelled:
                raise


def _messages(source: Any) -> tuple[Message, ...]:
    """What the first prompt is made of. Empty if the environment opens the conversation."""
    data = source.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return (*system, {"role": "user", "content": data.prompt})
    return (*system, *({"role": each.role, "content": text_of(each.content)} for each in data.prompt or ()))


def _with_system_prompt(task: VerifiersTask) -> Any:
    """verifiers' task, with the system prompt of the run if that was put before its messages."""
    if len(task.messages) > len(_messages(task.source)):
        return task.source.with_system_prompt(task.messages[0]["content"])
    return task.source


def _what_is_missing(task: Any) -> str:
    """What a task needs that is not given here, in words; empty if it can be played."""
    data = task.data
    if data.image is not None or task.NEEDS_CONTAINER:
        return (
            f"a container{'' if data.image is None else f' of the image {data.image}'}; containers are not given here"
        )
    if data.skills:
        return "skills, which its harness does not support here"
    if "*" not in data.network_allow or data.network_block:
        return "limits on the network, which are not enforced here"
    try:
        _messages(task)
    except NotImplementedError:
        return "images; only text is supported"
    return ""


def _fault(episode: Any) -> str:
    """Why an episode failed, in one line."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed without an error"
