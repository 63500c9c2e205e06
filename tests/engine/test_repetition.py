"""An answer that repeats itself without end is ended, and one that only looks so is not."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping

import pytest
from harness import Harness, make_harness
from word_grammar import END, Words

from mlx_parallm.core.requests import FinishReason, RepetitionLimits, SamplingParams, StopParams
from mlx_parallm.engine.text import CHECK_EVERY, repeats
from mlx_parallm.model.bundled import bundled_tokenizer

LIMITS = RepetitionLimits()
VARIED = random.Random(0)

ORDINARY: Mapping[str, str] = {
    "numbered list": "".join(f"{n}. Check the seal of valve {n}.\n" for n in range(1, 400)),
    "bullets": "".join(
        f"- **{part}**: the {part} of the {machine} is checked once a {time}.\n"
        for machine in ("mill", "press", "crane", "lift", "oven")
        for part in ("pump", "belt", "fan", "rod", "valve")
        for time in ("day", "week", "month", "year")
    ),
    "code": "".join(f"    def get_{n}(self) -> int:\n        return self._values[{n}]\n\n" for n in range(150)),
    "asserts": "".join(f"    assert add({n}, 0) == {n}\n" for n in range(200)),
    "table": "| id | name | note |\n|---|---|---|\n" + "".join(f"| {n} |  |  |\n" for n in range(200)),
    "empty table": "|  |  |  |  |\n" * 100,
    "csv": "id,x,y,z\n" + "".join(f"{n},0,0,0\n" for n in range(300)),
    "csv of zeros": "0,0,0,0,0,0,0,0\n" * 100,
    "empty lines": "Yours sincerely" + "\n" * 600,
    "spaces": "a" + " " * 3000 + "b",
    "columns": "".join(f"{'value':>60}{n:>60}\n" for n in range(60)),
    "matrix of zeros": json.dumps([[0] * 28] * 28),
    "matrix of zeros, a number a line": json.dumps([[0] * 28] * 28, indent=2),
    "vector of zeros": json.dumps([0.0] * 384),
    "base64": base64.b64encode(VARIED.randbytes(3000)).decode(),
    "base64 of zeros": base64.b64encode(bytes(3000)).decode(),
    "hex dump": "".join(f"{16 * n:08x}  {'00 ' * 16}\n" for n in range(100)),
    "rules": ("-" * 78 + "\n") * 60,
    "box": "+" + "-" * 60 + "+\n" + ("|" + " " * 60 + "|\n") * 40,
    "checkerboard": ("# " * 32 + "\n" + " #" * 32 + "\n") * 16,
    "song": "".join(
        f"Verse {n}: the river {n} runs on.\n" + "Row, row, row your boat, gently down the stream,\n" * 4
        for n in range(20)
    ),
    "lines to write": "I will not talk in class. " * 100,
    "log": "".join(f"12:{n // 60:02}:{n % 60:02} INFO worker ready\n" for n in range(300)),
}
PARAGRAPH = (
    "Wait, let me read the task again. The user wants the function to return the sum of all even numbers in the list, "
    "so I have to go through the list, take those that are divisible by two, and add them. But the list may be empty. "
    "Then the sum is zero, and that is what the function returns already. So the function is right, and the test that "
    "fails must be about something else. Let me look at the test again: it calls the function with a tuple, and not "
    "with a list. A tuple can be gone through in the same way, so that cannot be the reason either.\n\n"
)
LOOPS: Mapping[str, str] = {
    "a token": "!",
    "two tokens": "no, ",
    "a phrase": " and the end of the world",
    "a sentence": "I should now write the final answer to the question that the user has asked.\n",
    "a paragraph": PARAGRAPH,
    "a call": '<tool_call>\n{"name": "read", "arguments": {"path": "src/app/main.py", "lines": 40}}\n</tool_call>\n',
    "a row": "| 0 | open | the pump does not start after the filter was cleaned | today |\n",
}


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return bundled_tokenizer()


def ended_at(tokens: list[int], limits: RepetitionLimits = LIMITS) -> int | None:
    """The number of tokens after which an answer is ended."""
    places = range(CHECK_EVERY, len(tokens) + 1, CHECK_EVERY)
    return next((place for place in places if repeats(tokens[:place], 0, limits)), None)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_texts_are_not_ended(name: str, tokenizer) -> None:
    introduction = "Of course! Here is what you asked for:\n\n"
    tokens = tokenizer.encode(introduction + ORDINARY[name] + "\nThat is all.")
    assert ended_at(tokens) is None


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_ended(name: str, tokenizer) -> None:
    before = tokenizer.encode("Let me think about it. " + ORDINARY["bullets"][:1000])
    period = tokenizer.encode(LOOPS[name])
    few = 1 < len(set(period)) <= 8
    least = max(4096 if few else 1024, 8 * len(period))
    ended = ended_at(before + period * (6000 // len(period)))
    assert ended is not None
    assert least <= ended <= len(before) + least + len(period) + CHECK_EVERY


def test_every_period_up_to_the_longest_is_found() -> None:
    for period in (1, 2, 7, 31, 62, 100, 511, 512):
        tokens = list(range(1000, 1000 + period)) * (9 + 5000 // period)
        assert ended_at(tokens) is not None, period
    longer = list(range(513)) * 12
    assert ended_at(longer) is None
    assert ended_at(longer, RepetitionLimits(max_period=600)) is not None


def test_the_prompt_is_no_part_of_the_repetition() -> None:
    tokens = list(range(40)) * 100
    assert repeats(tokens, len(tokens) - 1024, LIMITS)
    assert not repeats(tokens, len(tokens) - 1023, LIMITS)


def test_limits_of_a_request_are_as_small_as_it_says() -> None:
    limits = RepetitionLimits(max_period=3, min_period=2, min_count=3, min_tokens=0, min_tokens_of_few=0)
    assert repeats([9, 1, 2, 1, 2, 1, 2], 0, limits)
    assert not repeats([9, 9, 9, 1, 2, 1, 2], 0, limits)
    assert not repeats([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4], 0, limits), "the period is too long"
    assert not repeats([5, 1, 1, 1], 0, limits), "the period is too short"


SHORT = RepetitionLimits(max_period=8, min_count=3, min_tokens=40)
ONLY_3 = SamplingParams(temperature=0.0, allowed_tokens=bytes([1 << 3]) + bytes(32))


def test_the_engine_ends_a_row_that_repeats_itself_and_no_other() -> None:
    """A row that may draw one token only."""
    harness = make_harness()
    harness.submit("loop", [1, 2], sampling=ONLY_3, stopping=StopParams(200, repetition=SHORT))
    harness.submit("long", [1, 2], sampling=ONLY_3, stopping=StopParams(90))
    harness.submit("least", [1, 2], sampling=ONLY_3, stopping=StopParams(200, min_tokens=100, repetition=SHORT))
    harness.run()
    assert {name: len(harness.tokens(name)) for name in ("loop", "long", "least")} == {
        "loop": 62,
        "long": 90,
        "least": 124,
    }
    ends = {name: _end(harness, name) for name in ("loop", "long", "least")}
    assert ends == {
        "loop": FinishReason.REPETITION,
        "long": FinishReason.LENGTH,
        "least": FinishReason.REPETITION,
    }


def test_what_a_grammar_demands_may_be_long() -> None:
    """One text, and a text that may end anywhere."""
    harness = make_harness(eos_ids=(END,))
    unbiased = SamplingParams(temperature=0.0, logit_bias=((END, -100.0),))
    demanded, free = (3,) * 100, tuple((3,) * length for length in range(1, 100))
    harness.submit("demanded", [1], grammar=Words(demanded), stopping=StopParams(200, repetition=SHORT))
    harness.submit("free", [1], grammar=Words(*free), stopping=StopParams(200, repetition=SHORT), sampling=unbiased)
    harness.run()
    assert (len(harness.tokens("demanded")), len(harness.tokens("free"))) == (100, 62)
    assert _end(harness, "demanded") is FinishReason.STOP
    assert _end(harness, "free") is FinishReason.REPETITION


def _end(harness: Harness, name: str) -> FinishReason | None:
    return harness.outputs(name)[-1].finish_reason
