"""Policy: the client of verifiers that asks the adapter in training, and how each episode gets its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect

from mlx_parallm.core import FinishReason, Tool, ToolCall
from mlx_parallm.rl.environments.protocol import Answer, Message, RolloutClient, message_of

MODEL = "mlx-parallm"
"""The name by which verifiers knows the adapter in training."""

CLIENT = vf.TrainClientConfig(base_url="http://127.0.0.1:1", api_key_var="NONE")
"""Stands for the adapter in training in a configuration of verifiers. Nothing is sent there. With a configuration of
this type, verifiers asks for whole answers and streams them itself to programs that want a stream."""

_POLICY: ContextVar[Policy] = ContextVar("policy")


class Policy(vf.Client):
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
