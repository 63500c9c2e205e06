"""`calculator`: a tool. The model calls it with a line of text, and gets the result as the next message.

user        What is 48 * 37?
assistant   calc: 48 * 37
user        result: 1776
assistant   1776
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from random import Random

from mlx_parallm.core import CollectionSpec, FinishReason
from mlx_parallm.rl.environments.protocol import Message, RolloutClient, Task

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
    """Each task is a sum or a product that a small model cannot do in its head. 1 is the reward for the right number as
    the whole last answer."""

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
            told = [f"calc: {text.replace(' ', '')}", f"result: {result}", result]
            roles = ("assistant", "user", "assistant")
            turns = ({"role": role, "content": content} for role, content in zip(roles, told, strict=True))
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
