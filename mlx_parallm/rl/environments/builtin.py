"""The environments that come with the package: `words` of one turn, `hints` of two, and `calculator` with a tool.

To add one, write its class and a row of `BUILT_IN` at the end of this file. `protocol` says what a class may do; the
recipe in docs/contributing.md names the tests and pages.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from random import Random

from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.rl.environments.protocol import Answer, Environment, Message, RolloutClient, Task

# ---- words ----------------------------------------------------------------------------------------

_ADJECTIVES = {
    "positive": "superb lovely wonderful excellent delightful amazing brilliant charming fantastic pleasant great "
    "beautiful impressive splendid perfect enjoyable",
    "negative": "dull awful terrible horrible dreadful boring miserable disappointing unpleasant poor bad ugly weak "
    "dismal annoying tedious",
}
_THINGS = ("film", "hotel", "meal", "book", "concert", "garden", "party", "journey")


class Words:
    """Each task is a sentence such as "The film was dull.", and 1 is the reward for its class as the only word."""

    def tasks(self, seed: int) -> Iterator[Task]:
        """Every sentence comes once before any comes again, positive and negative ones in turns: an update from one
        kind would teach one answer to everything."""
        for epoch in itertools.count():
            dice = Random(f"{seed}/{epoch}")
            sides = [_shuffled(kind, dice) for kind in _ADJECTIVES]
            yield from itertools.chain.from_iterable(zip(*sides, strict=True))


def _shuffled(kind: str, dice: Random) -> list[Task]:
    pairs = list(itertools.product(_THINGS, _ADJECTIVES[kind].split()))
    dice.shuffle(pairs)
    return [_sentence(thing, adjective, kind) for thing, adjective in pairs]


def _sentence(thing: str, adjective: str, kind: str) -> Task:
    text = f"The {thing} was {adjective}. Positive or negative? Answer with one word."
    pattern = rf"(?i)\A\W*{kind}\W*\Z"
    return Task(({"role": "user", "content": text},), CollectionSpec("regex", {"pattern": pattern}))


# ---- hints ----------------------------------------------------------------------------------------

_KINDS = {
    "animal": "horse tiger rabbit monkey eagle dolphin sheep camel zebra lion goat wolf",
    "fruit": "apple banana cherry lemon mango orange peach grape plum kiwi melon pear",
    "color": "red green blue yellow purple black white brown pink gray violet beige",
    "tool": "hammer saw drill wrench shovel axe screwdriver pliers rake ladder chisel file",
}
_FIRST, _SECOND = 1.0, 0.5
"""The rewards of a right answer without the hint, and with it."""


class Hints:
    """Each task asks which of three words is, for example, an animal. The answer is that word and nothing else."""

    def tasks(self, seed: int) -> Iterator[Task]:
        dice = Random(seed)
        while True:
            kind, *others = dice.sample(sorted(_KINDS), 3)
            words = [dice.choice(_KINDS[each].split()) for each in (kind, *others)]
            right, shown = words[0], ", ".join(dice.sample(words, 3))
            text = f"Which of these is the {kind}: {shown}? Answer with one word."
            yield Task(({"role": "user", "content": text},), CollectionSpec(metadata={"answer": right}))

    async def rollout(self, client: RolloutClient, task: Task) -> float:
        right = str(task.collection.metadata["answer"])
        first = await client.ask(task.messages)
        if _says(first, right):
            return _FIRST
        hint = f"No. It begins with the letter {right[0]}. Answer with that word alone."
        second = await client.ask([*task.messages, first.message, {"role": "user", "content": hint}])
        return _SECOND if _says(second, right) else 0.0


def _says(answer: Answer, word: str) -> bool:
    """Whether an answer is this word alone."""
    return re.findall(r"\w+", answer.text.lower()) == [word]


# ---- calculator -----------------------------------------------------------------------------------

_RULES = (
    "You have a calculator. To use it, write a line such as `calc: 12*34` and nothing else. You then get its result. "
    "Answer with the final number alone."
)
_CALL = re.compile(r"\Acalc:(.*)\Z")
_MAX_CALLS = 2
_MAX_TEXT = 60
"""Characters of an expression."""

_LARGEST = 10**12
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """Each task is a sum or a product that a small model cannot do in its head. The model calls the calculator with a
    line of text, and gets the result as the next message. 1 is the reward for the right number as the whole last
    answer.

    user        What is 48 * 37?
    assistant   calc: 48 * 37
    user        result: 1776
    assistant   1776
    """

    def tasks(self, seed: int) -> Iterator[Task]:
        dice = Random(seed)
        while True:
            text = _expression(dice)
            yield Task(_opening(text), CollectionSpec(metadata={"answer": str(int(calculate(text)))}))

    def examples(self, seed: int) -> Iterator[tuple[Message, ...]]:
        """Conversations as they should be, of tasks that `tasks` does not give for the same seed: with the call, its
        result and the answer."""
        dice = Random(f"examples/{seed}")
        while True:
            text = _expression(dice)
            result = calculated(text)
            contents = [f"calc: {text.replace(' ', '')}", f"result: {result}", result]
            roles = ("assistant", "user", "assistant")
            turns = ({"role": role, "content": content} for role, content in zip(roles, contents, strict=True))
            yield (*_opening(text), *turns)

    async def rollout(self, client: RolloutClient, task: Task) -> float:
        messages = [*task.messages]
        answer = await client.ask(messages)
        for _ in range(_MAX_CALLS):
            call = _CALL.match(answer.text.strip())
            if call is None:
                break
            messages += [answer.message, {"role": "user", "content": f"result: {calculated(call[1])}"}]
            answer = await client.ask(messages)
        ended = answer.finish_reason is FinishReason.STOP
        return float(ended and answer.text.strip().rstrip(".") == task.collection.metadata["answer"])


def _opening(text: str) -> tuple[Message, ...]:
    question = {"role": "user", "content": f"What is {text}?"}
    return ({"role": "system", "content": _RULES}, question)


def _expression(dice: Random) -> str:
    first, second = dice.randint(100, 999), dice.randint(12, 99)
    return f"{first} {dice.choice('+-*')} {second}"


# ---- the tool ------------------------------------------------------------------------------------


def calculated(text: str) -> str:
    """What the calculator shows for an expression: its value, or what is wrong with it."""
    try:
        value = calculate(text)
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}"
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def calculate(text: str) -> float:
    """The value of an expression of numbers, parentheses, and + - * /. Nothing else in it is run.

    Raises:
        ValueError: it is another expression, or one that is too long; its value is too large.
        ZeroDivisionError: it divides by 0.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError(f"at most {_MAX_TEXT} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("write an expression such as 12*34") from None
    return _value(tree.body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: float = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            result = _OPERATIONS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers and + - * / are known")
    if not abs(result) <= _LARGEST:
        raise ValueError("the number is too large")
    return result


# ---- the table ------------------------------------------------------------------------------------

BUILT_IN: Mapping[str, Callable[[], Environment]] = {"words": Words, "hints": Hints, "calculator": Calculator}
"""By name. An installed package's environment of the same name takes its place (see `names`)."""
