"""Turns of episodes that come back as text: what is unchanged continues the drawn tokens, and nothing else does."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from chat_templates import WORDS, wrapped
from tool_families import ASKED, TEXTS, TOOLS
from tool_families import FAMILIES as FORMATS

from mlx_parallm.core.requests import (
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.core.splitter import AnswerSyntax
from mlx_parallm.model.tokenizer import Tokenizer
from mlx_parallm.server.api.conversation import Conversation, GivenCall, GivenFunction, Message
from mlx_parallm.server.api.histories import CHANGED, RENDERED_ANEW, EpisodeHistories, PlannedTurn

pytestmark = pytest.mark.ci

FAMILIES = ("chatml", "headers", "inst", "turns", "bars")
"""Templates that write an earlier answer as they began it."""

OPTIONS: dict[str, Any] = {}
FINISHED = RequestFinished(1, 1, 0, 0, 0, 1)


@cache
def tokenizer(family: str) -> Tokenizer:
    return Tokenizer(wrapped(family))


async def replay(events: Sequence[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


@dataclass
class Play:
    """One episode of a client that keeps the messages, and of a server that keeps the tokens."""

    family: str
    rng: random.Random
    histories: EpisodeHistories = field(default_factory=EpisodeHistories)
    messages: list[Message] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    drawn: tuple[int, ...] = ()
    prompt: list[int] = field(default_factory=list)
    key: tuple[str, str, str] = ("", "g", "e")

    def say(self, role: str = "user") -> None:
        text = " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 5)))
        self.messages.append(Message(role=role, content=text))

    async def turn(self, *calls: GivenCall) -> str:
        """Asks for an answer, and adds it to the messages as it came. Returns why the prompt is not continued."""
        coder = tokenizer(self.family)
        conversation = Conversation.of(self.messages, (), coder, self.options)
        rendered = conversation.render(coder)
        self.prompt, why = self.histories.prompt_of(self.key, conversation, coder, rendered)
        plain = [i for i in range(coder.vocab_size) if i not in coder.special_ids]
        ids = self.rng.choices(plain, k=self.rng.randint(1, 9))
        ended = self.rng.random() < 0.7
        self.drawn = tuple(ids + sorted(coder.eos_token_ids)[:1] * ended)
        text = coder.decode(ids)
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        request = GenerationRequest("r", (tuple(self.prompt),), SamplingParams(), StopParams(9))
        planned = PlannedTurn(self.key, conversation, rendered, AnswerSyntax())
        events = [SequenceOutput(0, self.drawn, text, finish_reason=reason), FINISHED]
        assert [event async for event in self.histories.recorded(planned, request, replay(events))] == events
        self.messages.append(Message(role="assistant", content=text, tool_calls=list(calls)))
        return why


def starts_with(prompt: Sequence[int], before: Sequence[int], drawn: Sequence[int]) -> bool:
    return list(prompt[: len(before) + len(drawn)]) == [*before, *drawn]


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_turn_that_comes_back_unchanged_continues_the_drawn_tokens(family: str) -> None:
    different = 0
    for seed in range(200):
        play = Play(family, random.Random(seed))
        play.say()
        assert await play.turn() == ""
        for _ in range(play.rng.randint(1, 4)):
            before, drawn = play.prompt, play.drawn
            play.say()
            assert await play.turn() == ""
            assert starts_with(play.prompt, before, drawn)
            coder = tokenizer(family)
            again = Conversation.of(play.messages[:-1], (), coder, OPTIONS).render(coder)
            assert again[-3:] == play.prompt[-3:], "what follows the history is the template's"
            different += again != play.prompt
    assert different > 100, "encoded again, the texts of random tokens are other tokens"


def edit_a_message(play: Play) -> None:
    place = play.rng.randrange(len(play.messages))
    message = play.messages[place]
    play.messages[place] = message.model_copy(update={"content": f"{message.content}!"})


def drop_the_beginning(play: Play) -> None:
    del play.messages[:2]


def leave_out_the_answer(play: Play) -> None:
    del play.messages[-1]


def cut_the_answer(play: Play) -> None:
    last = play.messages[-1]
    play.messages[-1] = last.model_copy(update={"content": f"…{last.content}"[:-1]})


def other_variables(play: Play) -> None:
    play.options = {"enable_thinking": True}


def claim_a_call(play: Play) -> None:
    call = GivenCall(id="1", function=GivenFunction(name="f", arguments="{}"))
    play.messages[-1] = play.messages[-1].model_copy(update={"tool_calls": [call]})


CHANGES = (edit_a_message, drop_the_beginning, leave_out_the_answer, cut_the_answer, other_variables, claim_a_call)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_changed_history_is_noticed_and_never_continued(family: str) -> None:
    """What comes before the change may still continue an earlier turn."""
    told: Counter[str] = Counter()
    for seed in range(200):
        play = Play(family, random.Random(seed))
        earlier: list[tuple[list[Message], list[int]]] = []
        for _ in range(play.rng.randint(1, 3)):
            play.say()
            await play.turn()
            earlier.append((list(play.messages), [*play.prompt, *play.drawn]))
        play.rng.choice(CHANGES)(play)
        play.say()
        why = await play.turn()
        told[why] += 1
        if why:
            coder = tokenizer(family)
            assert play.prompt == Conversation.of(play.messages[:-1], (), coder, play.options).render(coder)
        else:
            unchanged = [ids for messages, ids in earlier if play.messages[: len(messages)] == messages]
            assert any(play.prompt[: len(ids)] == ids for ids in unchanged)
    assert set(told) == {CHANGED, ""}
    assert told[CHANGED] > 100


async def test_a_template_that_writes_the_beginning_of_an_answer_differently_is_noticed() -> None:
    play = Play("thinking", random.Random(1))
    play.say()
    await play.turn()
    play.say()
    assert await play.turn() == RENDERED_ANEW


async def test_calls_come_back_whatever_their_ids() -> None:
    """The client sends the id that it got, which is random and no part of the drawn tokens."""
    coder, histories = tokenizer("chatml"), EpisodeHistories()
    syntax = AnswerSyntax(calls=FORMATS["json_tools"], tools=TOOLS)
    asked = Message(role="user", content="What is the weather?")
    first = Conversation.of([asked], TOOLS, coder, OPTIONS)
    rendered = first.render(coder)
    ids = tuple(coder.encode(TEXTS["json_tools"], False))
    request = GenerationRequest("r", (tuple(rendered),), SamplingParams(), StopParams(99))
    events = [SequenceOutput(0, ids, TEXTS["json_tools"], finish_reason=FinishReason.STOP), FINISHED]
    planned = PlannedTurn(("", "g", "e"), first, rendered, syntax)
    assert [event async for event in histories.recorded(planned, request, replay(events))] == events
    name, arguments = ASKED
    for sent, why in ((arguments, ""), ({**arguments, "days": 4}, CHANGED)):
        call = GivenCall(id="call-7", function=GivenFunction(name=name, arguments=json.dumps(sent)))
        answer = Message(role="assistant", content=None, tool_calls=[call])
        result = Message(role="tool", content="rain", tool_call_id="call-7")
        second = Conversation.of([asked, answer, result], TOOLS, coder, OPTIONS)
        prompt, told = histories.prompt_of(("", "g", "e"), second, coder, second.render(coder))
        assert told == why
        assert starts_with(prompt, rendered, ids) is not bool(why)


@pytest.mark.parametrize(("name", "is_kept"), [("", False), ("another key", True)])
async def test_what_a_key_has_used_least_recently_is_forgotten(name: str, is_kept: bool) -> None:
    """Of the key that has the most: the turns of another key stay."""
    histories = EpisodeHistories(max_tokens=150)
    play = Play("chatml", random.Random(4), histories)
    play.say()
    await play.turn()
    before, drawn = play.prompt, play.drawn
    for number in range(9):
        other = Play("chatml", random.Random(number), histories, key=(name, "g", str(number)))
        other.say()
        await other.turn()
    play.say()
    await play.turn()
    assert starts_with(play.prompt, before, drawn) is is_kept
