"""Fits a conversation to the chat template. Clients send system messages anywhere, and several messages of one role in
a row. Some templates take a system message only at the beginning, and the others only in turns of user and
assistant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.tool_text import TemplateMessage
from mlx_parallm.errors import InvalidRequestError

Turns = Sequence[TemplateMessage]


def fitted(
    turns: Turns, tokenizer: TextTokenizer, template: str | None, render: Callable[[Turns], list[int]]
) -> list[int]:
    """What `render` makes of the messages. If the template refuses them, or leaves out system messages that come later,
    it makes it of the same texts `in_place`, and if these are refused too, of those `merged`.

    Raises:
        InvalidRequestError: the template refuses these too.
    """
    placed = in_place(turns)
    forms = [placed]
    if placed != tuple(turns) and _writes_later_system(tokenizer, template):
        forms.insert(0, tuple(turns))
    joined = tuple(merged(placed))
    for form in forms if joined != placed else forms[:-1]:
        with suppress(InvalidRequestError):
            return render(form)
    return render(joined)


def in_place(turns: Turns) -> tuple[TemplateMessage, ...]:
    """The messages without system messages after the beginning. Each is a part of the message before it, if the user or
    a tool wrote that, or else a message of the user. So the prompt stays as it was up to there, and the prefix cache
    has it."""
    placed: list[TemplateMessage] = []
    for turn in turns:
        if turn["role"] != "system" or not placed or placed[-1]["role"] == "system":
            placed.append(turn)
        elif placed[-1]["role"] == "assistant":
            placed.append({**turn, "role": "user"})
        else:
            placed[-1] = _joined(placed[-1], {"content": turn["content"]})
    return tuple(placed)


def merged(messages: Iterable[TemplateMessage]) -> Iterator[dict[str, Any]]:
    """Messages of one role and name that follow each other become one, except results of tools."""
    last: dict[str, Any] = {}
    for message in messages:
        if last and _is_continued(last, message):
            last = _joined(last, message)
            continue
        if last:
            yield last
        last = dict(message)
    if last:
        yield last


def _is_continued(before: TemplateMessage, turn: TemplateMessage) -> bool:
    return before["role"] == turn["role"] != "tool" and before.get("name") == turn.get("name")


def _joined(before: TemplateMessage, turn: TemplateMessage) -> dict[str, Any]:
    """Texts are joined by a line break, and lists of calls become one."""
    joined = {**before, **turn}
    for name in ("content", "reasoning_content"):
        if texts := [each[name] for each in (before, turn) if each.get(name)]:
            joined[name] = "\n".join(texts)
    if calls := [*before.get("tool_calls", ()), *turn.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _writes_later_system(tokenizer: TextTokenizer, template: str | None) -> bool:
    """Whether the template writes a system message that comes after another message."""
    user = {"role": "user", "content": "x"}
    try:
        one, other = (
            tokenizer.apply_chat_template([user, {"role": "system", "content": text}], template=template)
            for text in ("a", "b")
        )
    except InvalidRequestError:
        return False
    return one != other
