"""Chat: a harness of verifiers for tasks that are conversations, with tools or without.

It does what verifiers' harness `null` does, but in this process: `null` starts a program for every turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["Chat"]


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks until an answer calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> Any:
        """See `verifiers.v1.Harness.launch`. Raises HTTPStatusError: a request was not answered."""
        messages = self._opening(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            http = await stack.enter_async_context(
                httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=None, trust_env=False, verify=False
                )
            )
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                response = await http.post(f"{endpoint}/chat/completions", json=body)
                response.raise_for_status()
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    content = await _result(call["function"], dispatch, connections)
                    result = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                    messages.append(bound_tool_message({**result, "content": content}))

    def _opening(self, data: Any) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *map(message_to_wire, prompt or ())]


def _loopback_client(secret: str) -> httpx.AsyncClient:
    """Without certificates, which take a quarter of a second to load, and without a proxy."""
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, verify=False)


async def _result(function: Mapping[str, str], dispatch: Any, connections: Any) -> Any:
    """What a tool returns, or a text that tells the model what is wrong with its call."""
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: the arguments are not JSON ({error})"
    if name not in dispatch or not isinstance(arguments, dict):
        return f"error: there is no tool {name}" if name not in dispatch else "error: the arguments are not an object"
    return await call_mcp(connections, dispatch, name, arguments)
