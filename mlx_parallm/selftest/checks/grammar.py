"""Answers that must follow a grammar."""

from __future__ import annotations

import asyncio
import re

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.core.grammar import Grammar, GrammarKind, GrammarSpec, GrammarState
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.tested import TestedModel

_PATTERN = r'\{"answer": "(yes|no|maybe)", "sure": [0-9]{1,2}\}'
_SAMPLING = SamplingParams(temperature=0.0, top_logprobs=0, processed_logprobs=True)
_MOST = 64


async def _follows(tested: TestedModel) -> Outcome:
    """Greedy answers under a mask, beside one without: each token is the best that the grammar allows."""
    grammar = await asyncio.to_thread(_compiled, tested)
    prompts = [tested.prompt(20 + 30 * at, seed=120 + at) for at in range(3)]
    free = tested.ask(prompts[2], 16)
    *answers, beside = await asyncio.gather(*(tested.ask(p, _MOST, _SAMPLING, grammar=grammar) for p in prompts), free)
    found, problem = [await tested.difference(prompts[2], beside)], ""
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = (await tested.plain_logprobs([*prompt, *answer.tokens[:-1]]))[len(prompt) - 1 :]
        state = grammar.start()
        for row, token, logprob in zip(rows, answer.tokens, answer.logprobs, strict=True):
            allowed = np.where(_allowed(state, tested.vocab_size), row, -np.inf)
            own = allowed[token] - np.logaddexp.reduce(allowed)
            found += [float(abs(own - logprob)), float(allowed.max() - allowed[token]) / 10]
            state.accept(token)
        if not re.fullmatch(_PATTERN, answer.text):
            problem = f"an answer is {answer.text[:60]!r}, which the grammar does not allow"
    return Outcome.of(found, tested.rounding.of_logprobs.times(2, "a sum over few tokens"), problem)


def _compiled(tested: TestedModel) -> Grammar:
    compiler = LLCompiler(tested.served.tokenizer, tested.vocab_size)
    try:
        return compiler.compile(GrammarSpec(GrammarKind.REGEX, _PATTERN))
    finally:
        compiler.close()


def _allowed(state: GrammarState, vocab_size: int) -> NDArray[np.bool_]:
    """Which tokens may come next, bool [vocab]."""
    mask = bytearray(4 * -(-vocab_size // 32))
    state.fill(memoryview(mask))
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size].astype(bool)


CHECK = Check(
    name="grammar",
    compared="greedy answers under a regular expression, with the best tokens that it allows in a plain pass",
    advice="Answers do not follow their schema. Validate them in your program, and attach the report to an issue.",
    run=_follows,
)
