"""Conversations in the rows of files, read as `/v1/chat/completions` reads those of requests.

The ids of calls may be left out here, as data sets do. A row's conversation may be JSON text, as in exports of parquet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlx_parallm.core.tool_text import lost_result, read_arguments
from mlx_parallm.rl.task_files import check_surrogates

Message = Mapping[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = ("name", "refusal", "tool_call_id", "reasoning_content", "reasoning")


def read_conversation(value: object) -> tuple[Message, ...] | None:
    """The messages of a list, or of its JSON text, as chat templates take them. None: the value is neither.

    Raises:
        ValueError: a message cannot be used.
        RecursionError: it is nested too deeply.
    """
    messages = _listed(value) if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        return None
    turns = tuple(map(_message, messages))
    ids = [(turn["role"], _ids(turn), turn.get("tool_call_id")) for turn in turns]
    if (index := lost_result(ids)) is not None:
        raise ValueError(f"no earlier message has the call {ids[index][2]!r}, whose result it has")
    return turns


def _listed(text: str) -> object:
    """The messages whose JSON a text is; None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, list) or not all(isinstance(one, dict) and "role" in one for one in value):
        return None
    check_surrogates(value)
    return value


def _ids(turn: Message) -> list[str]:
    return [call.get("id", "") for call in turn.get("tool_calls", ())]


def _message(given: object) -> Message:
    fields = given if isinstance(given, dict) else {}
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise ValueError(f"each message needs a role, one of {', '.join(_ROLES)}")
    for name in _TEXTS:
        if not isinstance(fields.get(name), str | None):
            raise ValueError(f"{name} of a message must be text")
    given_calls = fields.get("tool_calls") or []
    if not isinstance(given_calls, list):
        raise ValueError("tool_calls of a message must be a list")
    content, calls = _content(fields.get("content")), [*map(_call, given_calls)]
    if role != "assistant" and (content is None or calls):
        raise ValueError(f"a message of the role {role} needs content" if content is None else f"{role} has tool_calls")
    turn = {
        "role": role,
        "content": content or fields.get("refusal") or "",
        "name": fields.get("name"),
        "tool_call_id": fields.get("tool_call_id"),
        "reasoning_content": fields.get("reasoning_content") or fields.get("reasoning"),
        "tool_calls": calls or None,
    }
    return {name: value for name, value in turn.items() if value is not None}


def _content(given: object) -> str | None:
    """The text of a message; of a list of text parts, one part per line."""
    if not isinstance(given, list):
        if not isinstance(given, str | None):
            raise ValueError("the content of a message must be text, or a list of text parts")
        return given
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise ValueError(f"the model reads only text, and a part of the content has the type {kind!r}")
    return "\n".join(part[part["type"]] for part in given)


def _call(given: object) -> dict[str, Any]:
    call = given if isinstance(given, dict) else {}
    function = call.get("function")
    name, arguments = (function.get(key) if isinstance(function, dict) else None for key in ("name", "arguments"))
    if (
        not isinstance(name, str)
        or not isinstance(arguments, str | dict | None)
        or call.get("type") not in ("function", None)
    ):
        raise ValueError("each of tool_calls needs a function with a name, and arguments as JSON text or as an object")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    called = {"type": "function", "function": {"name": name, "arguments": read_arguments(text)}}
    return {"id": call["id"], **called} if isinstance(call.get("id"), str) else called
