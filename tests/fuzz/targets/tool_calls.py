"""Answers of a model, read as the calls of every family: `family seed`, and the text.

However a text is cut into pieces, the parts are the same. Calls name a tool, and their arguments are one JSON object,
or the beginning of one if the text was cut off.
"""

import json
from random import Random

from fuzz.mutation import after_first_line, with_words
from tool_families import FAMILIES, TEXTS, TOOLS

from mlx_parallm.core.splitter import AnswerSyntax, Splitter, join_parts
from mlx_parallm.core.text import Reasoning

NAMES = sorted(FAMILIES)
THINK = Reasoning("<think>", "</think>")
FAMILY_MARKS = {mark for each in FAMILIES.values() for mark in (*each.starts, each.end, *each.around)}
mutated = after_first_line(
    with_words(
        *sorted(FAMILY_MARKS), *TEXTS.values(), *(THINK.start, THINK.end, "```json\n", "```", "get_weather", "now"),
        *('"city"', '"arguments"', '"parameters"', '{"name": "now", "arguments": {}}', "city=", "<parameter=city>"),
    ),
    [f"{name} {seed}" for name in NAMES for seed in range(24)],
)  # fmt: skip


def parts(syntax, pieces, cut):
    splitter = Splitter(syntax)
    found = [part for piece in pieces for part in splitter.feed(piece)]
    joined = join_parts([*found, *splitter.end(cut)])
    return joined.reasoning, joined.text, [(call.name, call.arguments, call.complete) for call in joined.calls]


def run(data):
    head, _, rest = data.partition(b"\n")
    name, _, seed = head.decode(errors="replace").partition(" ")
    rng = Random(seed)
    thinks, repairs, first = rng.randrange(2), rng.randrange(2), not rng.randrange(4)
    syntax = AnswerSyntax(
        THINK if thinks else None,
        bool(thinks and rng.randrange(2)),
        FAMILIES.get(name, FAMILIES["json_tools"]),
        TOOLS,
        rng.choice((1, 32)),
        first,
        on_repair=(lambda kind: None) if repairs else None,
    )
    text = rest.decode(errors="replace")
    cut = bool(rng.randrange(2))
    whole = parts(syntax, [text], cut)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(min(len(text), rng.choice((1, 8, 2000)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts(syntax, pieces, cut) == whole
    for called, arguments, complete in whole[2]:
        assert called in ("get_weather", "now")
        arguments.encode()
        if complete:
            assert isinstance(json.loads(arguments), dict)
        else:
            assert cut
