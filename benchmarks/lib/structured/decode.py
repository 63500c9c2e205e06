"""Compares decoding of 16 rows, each with a schema of its own, with 16 rows without one. There is no HTTP."""

import asyncio
import json
import time

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import Config
from mlx_parallm.core.grammar import Grammar, GrammarKind, GrammarSpec
from mlx_parallm.core.requests import GenerationRequest, RequestFailed, SamplingParams, StopParams
from mlx_parallm.grammar.compiler import LLCompiler

FREE, BOUND = "free", "schemas"
ROWS, TOKENS = 16, 96
Rates = dict[str, list[float]]
"""Tokens per second in each repeat."""


def measure(repeats: int) -> Rates:
    """Runs the benchmark in this process."""
    return asyncio.run(_measure(repeats))


async def _measure(repeats: int) -> Rates:
    engine = RunningEngine(Config())
    served = await asyncio.to_thread(engine.start)
    compiler = LLCompiler(served.tokenizer, served.card.vocab_size)
    grammars = [compiler.compile(_spec(number)) for number in range(ROWS)]
    compiler.close()
    rates: Rates = {FREE: [], BOUND: []}
    try:
        for repeat in range(repeats + 1):  # the first one warms up
            for kind in rates:
                rate = await _rate(served, f"{kind} {repeat}", grammars if kind == BOUND else [None] * ROWS)
                if repeat:
                    rates[kind].append(rate)
                    print(f"  {kind:<8} {rate:6.1f} tok/s", flush=True)
    finally:
        await asyncio.to_thread(engine.stop)
    return rates


async def _rate(served: Served, name: str, grammars: list[Grammar | None]) -> float:
    """Tokens per second from the first request to the last token. Prompts have one token, so this is decoding only."""
    started = time.perf_counter()
    tokens = await asyncio.gather(*(_one(served, f"{name} {row}", row, each) for row, each in enumerate(grammars)))
    return sum(tokens) / (time.perf_counter() - started)


async def _one(served: Served, name: str, row: int, grammar: Grammar | None) -> int:
    request = GenerationRequest(
        request_id=name,
        prompts=((1000 + row,),),
        sampling=SamplingParams(seed=row),
        stopping=StopParams(TOKENS, ignore_eos=grammar is None),
        grammar=grammar,
    )
    tokens = 0
    async for event in served.engine.generate(request):
        if isinstance(event, RequestFailed):
            raise event.error
        tokens += len(getattr(event, "token_ids", ()))
    return tokens


def _spec(number: int) -> GrammarSpec:
    """A schema of an array without a maximum length, so rows run to their token limit. Each row has other field
    names."""
    properties = {
        f"name_{number}": {"type": "string"},
        f"count_{number}": {"type": "integer", "minimum": 0},
        "kind": {"enum": [f"kind {number} {letter}" for letter in "abc"]},
        "places": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 5},
    }
    record = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": record, "minItems": 100}))
