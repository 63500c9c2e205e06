"""`truncation: "auto"` of the Responses API: what does not fit the context is left out from the beginning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from mlx_parallm.errors import ContextLengthError
from mlx_parallm.server.wire.chat import ChatBody

ROOM = 4
"""One part in so many of the context is left for an answer whose length is not given."""


def shortened(chat: ChatBody, prompt: Callable[[ChatBody], list[int]], context: int) -> ChatBody:
    """`chat` where it fits the context, else without its oldest messages, as few as possible.

    System messages at the beginning stay, and so does the last message; a tool's result goes with its call. Where even
    these do not fit, what is left is still too long. Renders a number of prompts logarithmic in the messages.
    """

    def fits(start: int, answer: int) -> bool:
        try:
            return len(prompt(_from(chat, kept, start))) + answer <= context
        except ContextLengthError:
            return False

    kept = next((i for i, message in enumerate(chat.messages) if message.role not in ("system", "developer")), 0)
    starts = [i for i in range(kept + 1, len(chat.messages)) if chat.messages[i].role != "tool"]
    if not starts or fits(kept, chat.max_completion_tokens or 1):
        return chat
    answer = chat.max_completion_tokens or context // ROOM
    fitting = bisect_left(starts, True, key=lambda start: fits(start, answer))
    return _from(chat, kept, starts[min(fitting, len(starts) - 1)])


def _from(chat: ChatBody, kept: int, start: int) -> ChatBody:
    """The first `kept` messages, and those from `start` on."""
    return chat.model_copy(update={"messages": [*chat.messages[:kept], *chat.messages[start:]]})
