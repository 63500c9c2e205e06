"""Clients that do nothing wrong: requests of every API, whose answers are compared with those of a quiet server.

Greedy answers are chosen for which the best two tokens are always further apart than ten times the tolerance of
log-probabilities, so that no other batch may change them; and seeded ones that did not change in a full batch. Answers
of an adapter that is published again and again name the version, and a version has one text for each prompt.
"""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.prompts import WORDS, long_prompt
from benchmarks.lib.soak import asking
from benchmarks.lib.soak.asking import Answer, Body, GoesOn, Reply, ask, read

ADAPTERS = ("red", "blue", "green")
"""Adapters that lie in the server's folder. `SWAPPED` is each of them in turn."""
SWAPPED, TRAINED, GUEST = "swapped", "default", "guest"
PROMPT_WORDS, LENGTHS = (6, 30, 90, 300), (4, 12, 24, 48)
APART = 1e-4
"""Ten times the difference of log-probabilities that other shapes of a batch may make, on a tiny float32 model."""
VECTORS_APART = 1e-4
CLIENTS, EVERY_S = 6, 1.5
"""Clients, each of which begins a request every so many seconds, unless its last one is not answered yet."""
MOST_TRIES = 10
"""Of a request that was answered with 429, as when others compile grammars."""
CANDIDATES, AT_ONCE, CHECKED_AT_ONCE = 60, 12, 4

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob", "Cleo"]}, "count": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
    "required": ["name", "count", "ok"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_k": 4, "seed": 7, "n": 2}


@dataclass(frozen=True, slots=True)
class Question:
    """A request of one API. `adapter`: empty for the base model."""

    path: str
    body: Body
    adapter: str = ""

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream", False))

    def told(self, adapter: str) -> "Question":
        """The same for another adapter."""
        return Question(self.path, {**self.body, "model": adapter}, adapter)


@dataclass(slots=True)
class Told:
    """What became of the requests of a process. `done`: name, time and seconds of each. `refused`: begin and
    end of requests for which there was no server, and what they were. `faults`: what must not happen."""

    done: list[tuple[str, float, float]] = field(default_factory=list)
    refused: list[tuple[float, float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def took(self, name: str, reply: Reply) -> None:
        self.done.append((name, reply.sent, reply.seconds))
        self.counts[name] += 1


@dataclass(frozen=True, slots=True)
class Known:
    """A question, and its answer on the quiet server. `by_adapter`: for questions that are asked of `SWAPPED`."""

    question: Question
    content: Mapping[object, Any]
    by_adapter: Mapping[str, Mapping[object, Any]] = field(default_factory=dict)


# -- questions -------------------------------------------------------------------------------------


def questions(dice: random.Random) -> Iterator[Question]:
    """One of each API in turn, with prompts and answers of all lengths, of the base model and adapters in turn."""
    for number, (make, adapter) in enumerate(zip(itertools.cycle(_MAKERS), itertools.cycle(("", *ADAPTERS)))):
        text = " ".join(dice.choices(WORDS, k=PROMPT_WORDS[number // 3 % 4]))
        question = make(text, LENGTHS[number // 5 % 4], bool(dice.randrange(2)))
        yield Question(question.path, question.body | {"model": adapter or "base"}, adapter)


def _completion(text: str, tokens: int, stream: bool) -> Question:
    return Question(asking.COMPLETIONS, {"prompt": text, "max_tokens": tokens, "stream": stream, **GREEDY})


def _sampled(text: str, tokens: int, stream: bool) -> Question:
    return Question(asking.COMPLETIONS, {"prompt": text, "max_tokens": tokens, "stream": stream, **SAMPLED})


def _chat(text: str, tokens: int, stream: bool) -> Question:
    return Question(asking.CHAT, {"messages": _said(text), "max_tokens": tokens, "stream": stream, **GREEDY})


def _schema(text: str, tokens: int, stream: bool) -> Question:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {"messages": _said(text), "max_tokens": 90, "stream": stream, "response_format": form, **GREEDY}
    return Question(asking.CHAT, body)


def _response(text: str, tokens: int, stream: bool) -> Question:
    body = {"input": text, "max_output_tokens": max(tokens, 16), "stream": stream, "store": stream, **GREEDY}
    return Question(asking.RESPONSES, body)


def _message(text: str, tokens: int, stream: bool) -> Question:
    return Question(asking.MESSAGES, {"messages": _said(text), "max_tokens": tokens, "stream": stream, **GREEDY})


def _ollama_chat(text: str, tokens: int, stream: bool) -> Question:
    options = {"num_predict": tokens, **GREEDY}
    return Question(asking.OLLAMA_CHAT, {"messages": _said(text), "options": options, "stream": stream})


def _ollama_text(text: str, tokens: int, stream: bool) -> Question:
    options = {"num_predict": tokens, **GREEDY}
    return Question(asking.OLLAMA_TEXT, {"prompt": text, "options": options, "stream": stream})


def _tokens(text: str, tokens: int, stream: bool) -> Question:
    body = {"token_ids": long_prompt(len(text) // 6, text), "sampling_params": {"max_tokens": tokens, **GREEDY}}
    return Question(asking.TOKENS, body)


def _embedding(text: str, tokens: int, stream: bool) -> Question:
    return Question(asking.EMBEDDINGS, {"input": [text, text[: len(text) // 2]]})


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_MAKERS = (
    _completion,
    _chat,
    _response,
    _message,
    _ollama_chat,
    _schema,
    _ollama_text,
    _tokens,
    _sampled,
    _embedding,
)


# -- their answers on a quiet server ---------------------------------------------------------------


async def controls(port: int, key: str) -> list[Known]:
    """The answers of a quiet server, but for questions whose answer another batch may change."""
    candidates = list(itertools.islice(questions(random.Random("soak")), CANDIDATES))
    alone = [await _asked(port, key, question) for question in candidates]
    clear, together = list[bool](), list[Answer]()
    for at in range(0, CANDIDATES, CHECKED_AT_ONCE):
        clear += await asyncio.gather(*(_is_clear(port, key, each) for each in candidates[at : at + CHECKED_AT_ONCE]))
    for at in range(0, CANDIDATES, AT_ONCE):
        together += await asyncio.gather(*(_asked(port, key, each) for each in candidates[at : at + AT_ONCE]))
    known = []
    for question, answer, is_clear, again in zip(candidates, alone, clear, together, strict=True):
        if is_clear and same(answer.content, again.content):
            others = {name: (await _asked(port, key, question.told(name))).content for name in ADAPTERS}
            known.append(Known(question, answer.content, others))
    return known


async def _asked(port: int, key: str, question: Question) -> Answer:
    reply = await ask(port, question.path, question.body, key)
    if reply.status != 200:
        raise SystemExit(f"{question.path} was answered {reply.status}: {reply.body[:300]!r}")
    return read(question.path, reply.body, question.streamed)


async def _is_clear(port: int, key: str, question: Question) -> bool:
    """Whether no token of a greedy answer is nearly tied, for all adapters. Of a chat in another API, the chat is asked
    whose prompt is the same."""
    body, path = dict(question.body), question.path
    if path == asking.EMBEDDINGS or "seed" in body:
        return True
    if path == asking.TOKENS:
        body = {"prompt": body["token_ids"], **body["sampling_params"]}
    elif path != asking.COMPLETIONS:
        said = body.get("messages") or _said(body.get("input") or body["prompt"])
        tokens = body.get("max_tokens") or body.get("max_output_tokens") or body["options"]["num_predict"]
        body = {"messages": said, "max_tokens": tokens, "response_format": body.get("response_format"), **GREEDY}
    chat = "messages" in body
    body |= {"stream": False, "logprobs": True, "top_logprobs": 2} if chat else {"stream": False, "logprobs": 2}
    for adapter in (question.adapter or "base", *ADAPTERS):
        asked = Question(asking.CHAT if chat else asking.COMPLETIONS, body | {"model": adapter})
        if min((await _asked(port, key, asked)).top_two) < APART:
            return False
    return True


def same(one: Mapping[object, Any], other: Mapping[object, Any]) -> bool:
    """Whether the answers are equal: vectors up to rounding, everything else to the letter."""
    if one.keys() != other.keys():
        return False
    return all(_equal(mine, theirs) for mine, theirs in ((one[index], other[index]) for index in one))


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, list) and mine and isinstance(mine[0], float):
        return max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) <= VECTORS_APART
    return bool(mine == theirs)


# -- clients ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Versions:
    """What is known of versions that come and go. `texts`: by version and prompt, the first answer. `adapters`: which
    adapter each version of `SWAPPED` is, in each process of the server. `published`: the last process that has one."""

    texts: dict[tuple[str, str], str] = field(default_factory=dict)
    adapters: dict[tuple[int, str], str] = field(default_factory=dict)
    published: int = 0

    def conflict(self, process: int, version: str, adapters: Sequence[str]) -> str:
        """Says that a version which answered as one of the adapters is another one, or nothing."""
        known = self.adapters.get((process, version))
        if known is None and len(adapters) == 1:
            self.adapters[process, version] = adapters[0]
        return "" if known is None or known in adapters else f"{version} is {known}, and answered as {adapters}"


class Clients:
    """All good clients of one process. `process()`: the number of the server's process, which a restart raises."""

    def __init__(self, port: int, key: str, known: Sequence[Known], process: Any, goes_on: GoesOn) -> None:
        self.told = Told()
        self.versions = Versions()
        self._port, self._key, self._known = port, key, known
        self.process, self._goes_on = process, goes_on
        self._dice = random.Random(0)

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    async def _client(self, number: int) -> None:
        await asyncio.sleep(EVERY_S * number / CLIENTS)
        at = time.monotonic()
        while await self._goes_on():
            await (self._of_swapped() if number == 0 else self._of_trained() if number == 1 else self._of_fixed())
            at = max(at + EVERY_S, time.monotonic())
            await asyncio.sleep(at - time.monotonic())

    async def _of_fixed(self) -> None:
        known = self._dice.choice(self._known)
        answer = await self.answer(known.question)
        if answer is not None and not same(known.content, answer.content):
            self.fault("another answer", known.question, f"{answer.content} instead of {known.content}")

    async def _of_swapped(self) -> None:
        """Asks the adapter that is published again and again. The version says which answer is right."""
        known, process = self._dice.choice(self._known), self.process()
        if self.versions.published != process:
            return
        answer = await self.answer(known.question.told(SWAPPED))
        if answer is None or not answer.version:
            return
        fitting = [name for name, content in known.by_adapter.items() if same(content, answer.content)]
        if not fitting:
            self.fault("another answer", known.question, f"{answer.content} of {answer.version}")
        elif wrong := self.versions.conflict(process, answer.version, fitting):
            self.fault("another version", known.question, wrong)

    async def _of_trained(self) -> None:
        """Asks the adapter that is trained. A version has one answer, unless two tokens are nearly tied."""
        text = " ".join(WORDS[:4])
        body = {"prompt": text, "max_tokens": 8, "logprobs": 2, "model": TRAINED, **GREEDY}
        answer = await self.answer(Question(asking.COMPLETIONS, body, TRAINED))
        if answer is None or min(answer.top_two) < APART:
            return
        known = self.versions.texts.setdefault((answer.version, text), answer.content[0])
        if known != answer.content[0]:
            self.fault("another answer", Question(asking.COMPLETIONS, body), f"{answer.content} of {answer.version}")

    async def answer(self, question: Question) -> Answer | None:
        """The answer, whose every part must have ended once. None, and noted, if there is none."""
        reply = await ask(self._port, question.path, question.body, self._key)
        for _ in range(MOST_TRIES - 1):
            if reply.status != 429:
                break
            self.told.counts["tried again"] += 1
            await asyncio.sleep(EVERY_S)
            reply = await ask(self._port, question.path, question.body, self._key)
        if reply.refused:
            self.told.refused.append((reply.sent, reply.ended, reply.about(question.path, question.body)))
            return None
        try:
            if reply.status != 200 or reply.error:
                raise ValueError(reply.about(question.path, question.body))
            answer = read(question.path, reply.body, question.streamed)
        except (ValueError, KeyError, TypeError) as error:
            self.fault("no answer", question, str(error))
            return None
        if ends := {part: times for part, times in answer.ends.items() if times != 1}:
            self.fault("ended other than once", question, str(ends))
        self.told.took(question.path, reply)
        return answer

    def fault(self, what: str, question: Question, more: str) -> None:
        self.told.faults.append(f"{what}: {question.path} {json.dumps(question.body)[:200]}: {more[:400]}")
