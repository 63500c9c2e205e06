"""The turns of episodes: a history that a client sends back as messages becomes the tokens that were sampled.

See `core.turns`. A history that was changed, or that the chat template writes differently now, is not continued: its
tokens are those of the template, and the answer says why.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, cast

from mlx_parallm.core.requests import Event, GenerationRequest, RequestFinished, SequenceOutput
from mlx_parallm.core.splitter import AnswerSyntax, split
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.turns import Closers, continued
from mlx_parallm.server.api.answer import cut_off
from mlx_parallm.server.api.conversation import Conversation, GivenCall, GivenFunction, Message

MAX_TOKENS = 8_000_000
"""Token ids that are kept for all episodes together. Of the API key that has the most, the episodes that were used
least recently are forgotten."""

CHANGED = "the messages are not those of an earlier turn of its episode, followed by the answer to it"
RENDERED_ANEW = "the chat template writes the earlier messages differently now"

EpisodeKey = tuple[str, str, str]
"""The name of the API key, and the ids of the group (or empty) and of the episode."""


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """One finished turn. Messages are kept as digests only.

    Attributes:
        variables: digest of the variables of the chat template.
        messages: digests of the messages that the prompt was rendered from, in order.
        rendered: number and digest of the tokens that the template made of them.
        tokens: the tokens of the prompt, and those that were sampled.
        drawn: how many tokens were drawn.
        answer: digest of the answer as a message.
    """

    variables: bytes
    messages: tuple[bytes, ...]
    rendered: tuple[int, bytes]
    tokens: array[int]
    drawn: int
    answer: bytes


@dataclass(slots=True)
class PlannedTurn:
    """A turn that is to be generated.

    Attributes:
        rendered: the token ids that the chat template makes of the conversation.
        syntax: the parts that the answer may contain.
    """

    key: EpisodeKey
    conversation: Conversation
    rendered: Sequence[int]
    syntax: AnswerSyntax
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cut: bool = False

    def add(self, output: SequenceOutput) -> None:
        self.token_ids += output.token_ids
        self.texts.append(output.text)
        self.cut = cut_off(output)

    def finished(self, prompt_ids: Sequence[int]) -> DrawnTurn:
        answer = self.conversation.with_answer(_message("".join(self.texts), self.syntax, self.cut))
        digests = tuple(map(_digest, answer.turns))
        return DrawnTurn(
            _digest(self.conversation.variables),
            digests[:-1],
            (len(self.rendered), _digest_ids(self.rendered)),
            array("I", [*prompt_ids, *self.token_ids]),
            len(self.token_ids),
            digests[-1],
        )


class EpisodeHistories:
    """The turns of episodes, of the chats that the server has answered. Safe to use from any thread."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._episodes: dict[str, OrderedDict[EpisodeKey, list[DrawnTurn]]] = {}
        """By the name of the API key, the least recently used first."""
        self._tokens: Counter[str] = Counter()
        """How many are kept, by the name of the API key."""
        self._lock = Lock()
        self._closers = Closers()

    def prompt_of(
        self, key: EpisodeKey, conversation: Conversation, tokenizer: TextTokenizer, rendered: list[int]
    ) -> tuple[list[int], str]:
        """The prompt of a turn: it continues the tokens of an earlier turn if the conversation does.

        Args:
            rendered: the token ids that the chat template makes of the conversation.

        Returns:
            Its token ids, and why they are those of the template; empty for the first turn of an episode.
        """
        with self._lock:
            turns = list(self._episodes.get(key[0], OrderedDict()).get(key, ()))
        if not turns:
            return rendered, ""
        turn = _longest(turns, conversation)
        if turn is None:
            return rendered, CHANGED
        ids = self._continued(turn, conversation, tokenizer, rendered)
        return (rendered, RENDERED_ANEW) if ids is None else (ids, "")

    def _continued(
        self, turn: DrawnTurn, conversation: Conversation, tokenizer: TextTokenizer, rendered: list[int]
    ) -> list[int] | None:
        """The tokens of `turn`, and those of what follows its answer. None: the template writes the turn differently
        now, so nothing says which of its tokens follow the answer."""
        before, answered = conversation.first(len(turn.messages)), conversation.first(len(turn.messages) + 1)
        history = answered.render(tokenizer, add_generation_prompt=False)
        length, digest = turn.rendered
        if _digest_ids(history[:length]) != digest:
            return None
        key = (tokenizer, conversation.template, turn.variables, before.turns[-1]["role"])
        closer = self._closers.find(
            key, lambda answer: before.with_answer(answer).render(tokenizer, add_generation_prompt=False)
        )
        return continued(turn.tokens.tolist(), turn.drawn, history, closer, rendered)

    async def recorded(
        self, turn: PlannedTurn, request: GenerationRequest, events: AsyncIterator[Event]
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of a request, and keeps its turn when it finishes."""
        async with aclosing(cast(AsyncGenerator[Event, None], events)):  # `core` requires that events have aclose()
            async for event in events:
                if isinstance(event, SequenceOutput):
                    turn.add(event)
                elif isinstance(event, RequestFinished):
                    self._keep(turn.key, turn.finished(request.prompts[0]))
                yield event

    def _keep(self, key: EpisodeKey, turn: DrawnTurn) -> None:
        with self._lock:
            episodes = self._episodes.setdefault(key[0], OrderedDict())
            episodes.setdefault(key, []).append(turn)
            episodes.move_to_end(key)
            self._tokens[key[0]] += len(turn.tokens)
            while self._tokens.total() > self._max_tokens:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forgets the oldest episode of the API key that has the most tokens, or the oldest turn of its only one."""
        [(name, _)] = self._tokens.most_common(1)
        episodes = self._episodes[name]
        key, turns = next(iter(episodes.items()))
        forgotten = turns[:1] if len(episodes) == 1 else [*turns]
        del turns[: len(forgotten)]
        self._tokens[name] -= sum(len(each.tokens) for each in forgotten)
        if not turns:
            del episodes[key]


def _longest(turns: Sequence[DrawnTurn], conversation: Conversation) -> DrawnTurn | None:
    """The longest turn that the conversation continues; of equal ones, the newest."""
    variables, digests = _digest(conversation.variables), tuple(map(_digest, conversation.turns))
    fitting = [
        turn
        for turn in reversed(turns)
        if turn.variables == variables and digests[: len(turn.messages) + 1] == (*turn.messages, turn.answer)
    ]
    return max(fitting, key=lambda turn: len(turn.messages), default=None)


def _message(text: str, syntax: AnswerSyntax, cut: bool) -> Mapping[str, Any]:
    """The answer as the message that the client has got, as chat templates take it."""
    joined = split(text, syntax, cut)
    calls = [
        GivenCall(id=part.call_id or "", function=GivenFunction(name=part.name or "", arguments=part.arguments))
        for part in joined.calls
    ]
    message = Message(
        role="assistant", content=joined.content, reasoning_content=joined.reasoning or None, tool_calls=calls
    )
    return message.for_template()


def _digest(value: Mapping[str, Any]) -> bytes:
    """The digest of a message or of variables. The ids of calls do not count, because they are random."""
    text = json.dumps(dict(_without_call_ids(value)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _without_call_ids(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, field_value in value.items():
        if name == "tool_calls":
            yield name, [{key: part for key, part in call.items() if key != "id"} for call in field_value]
        else:
            yield name, field_value


def _digest_ids(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(array("I", ids).tobytes()).digest()
