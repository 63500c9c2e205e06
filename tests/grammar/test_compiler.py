"""What a compiled grammar allows, token by token, over a vocabulary of bytes."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from subprocess import Popen

import jsonschema
import pytest
from server.fakes import EOS, VOCAB, ByteTokenizer

from mlx_parallm.core.grammar import GrammarKind, GrammarSpec, GrammarState
from mlx_parallm.errors import EngineError, GrammarError, InvalidRequestError, OverloadedError
from mlx_parallm.grammar import trial
from mlx_parallm.grammar.compiler import MAX_CACHED, LLCompiler

WIDTH = VOCAB + 40
"""Of the logits: some models have more than their tokenizer."""
CPU_LIMIT_S = 0.5


@pytest.fixture(scope="module")
def compiler() -> Iterator[LLCompiler]:
    made = LLCompiler(ByteTokenizer(), WIDTH, CPU_LIMIT_S)
    yield made
    made.close()


def allowed(state: GrammarState) -> list[int]:
    mask = bytearray(4 * -(-WIDTH // 32))
    state.fill(memoryview(mask))
    bits = int.from_bytes(mask, "little")
    return [token for token in range(8 * len(mask)) if bits >> token & 1]


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def drawn(compiler: LLCompiler, spec: GrammarSpec, seed: int, most: int = 3000) -> str:
    """A text of random allowed tokens; where it may end it does."""
    state, rng, text = compiler.compile(spec).start(), random.Random(seed), bytearray()
    for _ in range(most):
        tokens = allowed(state)
        if state.ended or EOS in tokens:
            return text.decode()
        # letters of a string go on for ever: its end is as likely as all of them
        token = rng.choice(tokens if rng.random() < 0.5 or ord('"') not in tokens else [ord('"')])
        state.accept(token)
        text.append(token)
    raise AssertionError(f"no end after {most} bytes: {bytes(text[:200])!r}")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 5}], "items": False,
                       "minItems": 2}},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_is_what_the_schema_allows(compiler: LLCompiler, seed: int) -> None:
    jsonschema.validate(json.loads(drawn(compiler, schema(PERSON), seed)), PERSON)


def test_a_regex_is_of_the_whole_text(compiler: LLCompiler) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, r"[0-9]{3}-[a-f]+!")
    for seed in range(5):
        assert re.fullmatch(r"[0-9]{3}-[a-f]+!", drawn(compiler, spec, seed))


def test_choices_may_be_parts_of_each_other_and_of_the_syntax(compiler: LLCompiler) -> None:
    choices = ["yes", "yes, but", 'say "no"', "a\\b", "täglich", "%json"]
    spec = GrammarSpec(GrammarKind.CHOICE, json.dumps(choices))
    grammar = compiler.compile(spec)
    for choice in choices:
        state = grammar.start()
        for token in choice.encode():
            assert token in allowed(state)
            state.accept(token)
        assert EOS in allowed(state)
    assert len({drawn(compiler, spec, seed) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    "source",
    ['root ::= "a" item+ "."\nitem ::= [0-9] | "-"', 'start: "a" ITEM+ "."\nITEM: /[0-9]/ | "-"'],
    ids=["gbnf", "lark"],
)
def test_both_ways_to_write_a_grammar(compiler: LLCompiler, source: str) -> None:
    for seed in range(5):
        assert re.fullmatch(r"a[0-9-]+\.", drawn(compiler, GrammarSpec(GrammarKind.GRAMMAR, source), seed))


def test_texts_of_one_grammar_are_strangers(compiler: LLCompiler) -> None:
    grammar = compiler.compile(GrammarSpec(GrammarKind.REGEX, "ab|cd"))
    one, other = grammar.start(), grammar.start()
    one.accept(ord("a"))
    assert (allowed(one), allowed(other)) == ([ord("b")], [ord("a"), ord("c")])
    one.accept(ord("b"))
    assert (one.ended, other.ended) == (True, False)


def test_no_token_without_a_text_is_allowed(compiler: LLCompiler) -> None:
    """Special tokens, and ids beyond the tokenizer's."""
    assert set(allowed(compiler.compile(GrammarSpec(GrammarKind.REGEX, "(.|\n)*")).start())) <= {*range(256), EOS}


def test_a_token_that_is_not_allowed_is_an_error_from_then_on(compiler: LLCompiler) -> None:
    state = compiler.compile(GrammarSpec(GrammarKind.REGEX, "ab")).start()
    for _ in range(2):
        with pytest.raises(GrammarError):
            state.accept(ord("x"))
    assert len(allowed(state)) >= VOCAB, "a batch is masked all the same; the row's error is told by accept"


MANY_PARTS = "a?" * 10_000
"""Its first token would take a second, and no limit of llguidance sees that."""


@pytest.mark.parametrize(
    "spec",
    [
        schema({"type": "objekt"}),
        schema({"$ref": "#/nowhere"}),
        schema({"$ref": "http://example.com/schema.json"}),
        schema({"type": "string", "pattern": "("}),
        schema({"type": "integer", "minimum": 3, "maximum": 1}),
        schema({"not": {"type": "string"}}),
        schema(False),
        GrammarSpec(GrammarKind.REGEX, "(unclosed"),
        GrammarSpec(GrammarKind.REGEX, "a{1000}{1000}{1000}"),
        GrammarSpec(GrammarKind.REGEX, MANY_PARTS),
        schema({"type": "string", "pattern": f"^({MANY_PARTS})$"}),
        schema({"type": "object", "patternProperties": {f"^({MANY_PARTS})$": {}}}),
        GrammarSpec(GrammarKind.GRAMMAR, f"start: A\nA: /{MANY_PARTS}/"),
        GrammarSpec(GrammarKind.GRAMMAR, "start: nobody"),
        GrammarSpec(GrammarKind.GRAMMAR, "start: start start"),
    ],
    ids=lambda spec: spec.source[:40],
)
def test_what_cannot_be_enforced_is_refused(compiler: LLCompiler, spec: GrammarSpec) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be enforced: .+"):
        compiler.compile(spec)


ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
CALL = "%llguidance {}\nstart: call\ncall: call_0\ncall_0: "


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (schema(LOOP), "nothing satisfies it, because it refers to itself without an end"),
        (schema(ITSELF), "it is too complex, or it requires a text without an end"),
        (schema({"items": {"not": {}, "if": {}, "else": {}}}), 'not supported: "else", "if", "not"'),
        (schema({"oneOf": [{"type": "string"}, {"type": "string"}]}), "oneOf constraints are not supported. anyOf is."),
        (schema({"$ref": "https://example.com/a"}), "$ref 'https://example.com/a' is not part of the schema"),
        (schema({"$ref": "#/a"}), "$ref '#/a' is not part of the schema"),
        (schema({"enum": []}), "nothing satisfies it: an enum or anyOf is empty"),
        (schema(False), "nothing satisfies it: false allows no value"),
        (schema({"type": "string", "pattern": "x("}), "unclosed group, in /x(/"),
        (
            schema({"type": "string", "pattern": r"\bx"}),
            r"anchors and word boundaries are not supported inside regex /\bx/",
        ),
        (GrammarSpec(GrammarKind.REGEX, "x("), "unclosed group, in /x(/"),
        (GrammarSpec(GrammarKind.GRAMMAR, "start: a\na: /x(/"), "at 2(4): unclosed group, in /x(/"),
        (GrammarSpec(GrammarKind.GRAMMAR, "root ::= a"), "as GBNF: Rule 'a' not found"),
        (GrammarSpec(GrammarKind.GRAMMAR, "start: <|x|>"), 'at 1(8): unknown special token: "<|x|>"'),
        (GrammarSpec(GrammarKind.CALLS, CALL + '%json {"not": {}}'), 'not supported: "not"'),
    ],
    ids=lambda value: value.source[:40] if isinstance(value, GrammarSpec) else None,
)
def test_a_refusal_speaks_of_what_was_sent(compiler: LLCompiler, spec: GrammarSpec, reason: str) -> None:
    """Not of llguidance's options and errors, nor of a grammar that the server made."""
    with pytest.raises(InvalidRequestError) as refused:
        compiler.compile(spec)
    assert str(refused.value) == f"this {spec.kind.replace('_', ' ')} cannot be enforced: {reason}"


def test_a_text_without_an_end_that_comes_later_ends_its_answer_in_plain_words(compiler: LLCompiler) -> None:
    part = {**ITSELF, "properties": {"a": {"$ref": "#/$defs/part"}}}
    spec = schema({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/part"}], "$defs": {"part": part}})
    state = compiler.compile(spec).start()
    state.accept(ord("{"))
    state.forced()
    with pytest.raises(GrammarError, match="requires a text without an end"):
        state.accept(ord('"'))


def pathological() -> dict[str, GrammarSpec]:
    nested: object = {"type": "string"}
    for _ in range(60):
        nested = {"type": "object", "properties": {"a": nested, "b": {"anyOf": [nested, {"type": "null"}]}}}
        if len(json.dumps(nested)) > 60_000:
            break
    words = [f"word {number} " * 3 for number in range(4000)]
    keys = {f"key{i}": {"type": "string", "pattern": f"^(a|b)*{i}(c|d)*$"} for i in range(500)}
    return {
        "nested": schema(nested),
        "many words": schema({"enum": words}),
        "many patterns": schema({"type": "object", "properties": keys, "required": list(keys)}),
        "one of many": schema({"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "integer"}}}
                                         for i in range(1500)]}),
        "long repeat": GrammarSpec(GrammarKind.REGEX, "(a|b|ab|ba){5000}"),
        "repeats in repeats": GrammarSpec(GrammarKind.REGEX, "((a{1,100}){1,100}){1,100}"),
        "hours": GrammarSpec(GrammarKind.REGEX, "a{1000}{1000}{1000}"),
        "hours in a schema": schema({"type": "array", "items": {"type": "string", "pattern": "^a{1000}{1000}{1000}$"}}),
        "backtracking": GrammarSpec(GrammarKind.REGEX, "(a|a)*(a|a)*(a|a)*b" * 20),
        "exponential automaton": GrammarSpec(GrammarKind.REGEX, "(a|b)*a(a|b){200}"),
        "ambiguous": GrammarSpec(GrammarKind.GRAMMAR, "start: a\na: a a a a | \"x\" |"),
        "unions": GrammarSpec(GrammarKind.CHOICE, json.dumps(["x" * n for n in range(1, 1000)])),
    }  # fmt: skip


@pytest.mark.parametrize("name", pathological())
def test_a_hostile_grammar_is_bounded_in_time(compiler: LLCompiler, name: str) -> None:
    """Refused, or followed: neither it nor any of its tokens takes long (seconds here are for a slow machine)."""
    times = [time.monotonic()]
    try:
        state = compiler.compile(pathological()[name]).start()
        times.append(time.monotonic())
        rng = random.Random(0)
        for _ in range(50):
            tokens = allowed(state)
            if state.ended:
                break
            state.accept(rng.choice(tokens))
            times.append(time.monotonic())
    except (InvalidRequestError, GrammarError):
        times.append(time.monotonic())
    assert max(after - before for before, after in pairwise(times)) < 20.0


def test_a_grammar_that_comes_again_is_compiled_once(compiler: LLCompiler) -> None:
    first = compiler.compile(GrammarSpec(GrammarKind.REGEX, "again"))
    assert compiler.compile(GrammarSpec(GrammarKind.REGEX, "again")) is first
    for number in range(MAX_CACHED):
        compiler.compile(GrammarSpec(GrammarKind.REGEX, f"other{number}"))
    assert compiler.compile(GrammarSpec(GrammarKind.REGEX, "again")) is not first, "only so many are kept"


def test_a_schema_that_is_nested_too_deeply_is_refused_and_ends_no_child(compiler: LLCompiler) -> None:
    compiler.compile(GrammarSpec(GrammarKind.REGEX, "before"))
    tried = [child._process for child in compiler._trial._children]
    for depth in (900, 50_000):
        with pytest.raises(InvalidRequestError, match="recursion"):
            compiler.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"items": ' * depth + "{}" + "}" * depth))
    assert [child._process for child in compiler._trial._children] == tried


def test_one_that_takes_for_ever_is_refused_in_time_and_the_next_is_compiled(compiler: LLCompiler) -> None:
    """And refused at once when it comes again."""
    for number in range(2):
        with pytest.raises(InvalidRequestError, match=r"takes more than 0.5 s to compile|takes more memory"):
            compiler.compile(GrammarSpec(GrammarKind.REGEX, "b{1000}{1000}{1000}"))
        if number == 0:
            assert drawn(compiler, GrammarSpec(GrammarKind.REGEX, "next"), 0) == "next"
            tried = [child._process for child in compiler._trial._children]
    assert [child._process for child in compiler._trial._children] == tried, "nothing was tried again"


BOMB = GrammarSpec(GrammarKind.REGEX, "c{1000}{1000}{1000}")


def test_a_grammar_is_tried_while_another_takes_for_ever(compiler: LLCompiler) -> None:
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(compiler.compile, BOMB)
        assert drawn(compiler, GrammarSpec(GrammarKind.REGEX, "meanwhile"), 0) == "meanwhile"
        assert not bomb.done()
        assert isinstance(bomb.exception(), InvalidRequestError)


def test_a_busy_machine_is_not_the_grammars_fault(compiler: LLCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that gets no processor time in time tells nothing, and nothing is kept."""
    spec = GrammarSpec(GrammarKind.REGEX, "slow but fine")
    read_line = trial._read_line

    def slow(process: Popen[bytes], timeout_s: float) -> bytes | None:
        if timeout_s == trial._WALL_LIMIT_S:
            process.send_signal(signal.SIGSTOP)  # else it might answer at once
            return None
        return read_line(process, timeout_s)

    monkeypatch.setattr(trial, "_read_line", slow)
    with pytest.raises(OverloadedError, match="too busy"):
        compiler.compile(spec)
    monkeypatch.undo()
    assert drawn(compiler, spec, 0) == "slow but fine"


def killed_while_asked(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The next `times` children get SIGKILL when they have a grammar. Returns their process ids, as they come."""
    read_line, killed = trial._read_line, []

    def read(process: Popen[bytes], timeout_s: float) -> bytes | None:
        if timeout_s == trial._WALL_LIMIT_S and len(killed) < times:
            killed.append(process.pid)
            process.kill()
            process.wait()
            return b""
        return read_line(process, timeout_s)

    monkeypatch.setattr(trial, "_read_line", read)
    return killed


def test_a_child_that_is_killed_from_outside_is_not_the_grammars_fault(
    compiler: LLCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the system, which lacks memory: once costs nothing, and twice is an error that is not kept."""
    killed = killed_while_asked(monkeypatch, times=1)
    assert drawn(compiler, GrammarSpec(GrammarKind.REGEX, "killed once"), 0) == "killed once"
    assert len(killed) == 1
    killed, spec = killed_while_asked(monkeypatch, times=2), GrammarSpec(GrammarKind.REGEX, "killed twice")
    with pytest.raises(OverloadedError, match="try again"):
        compiler.compile(spec)
    assert len(set(killed)) == 2
    assert drawn(compiler, spec, 0) == "killed twice"


def test_a_child_that_has_just_died_is_replaced(compiler: LLCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and the write."""
    compiler.compile(GrammarSpec(GrammarKind.REGEX, "starts the child too"))
    for process in [child._process for child in compiler._trial._children if child._process is not None]:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(process, "poll", lambda process=process: process.returncode)
    assert drawn(compiler, GrammarSpec(GrammarKind.REGEX, "replaced"), 0) == "replaced"


def test_a_process_without_free_descriptors_still_tries_grammars(compiler: LLCompiler) -> None:
    """An answer that cannot be waited for would hold a child for ever."""
    compiler.compile(GrammarSpec(GrammarKind.REGEX, "starts the child"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(compiler.compile, GrammarSpec(GrammarKind.REGEX, "none is free")).result(30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("started", [False, True])
def test_closing_does_not_wait_for_a_grammar(started: bool) -> None:
    made = LLCompiler(ByteTokenizer(), WIDTH, cpu_limit_s=60.0)
    if started:
        made.compile(GrammarSpec(GrammarKind.REGEX, "starts the child"))
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(made.compile, BOMB)
        while not any(child._process for child in made._trial._children):
            time.sleep(0.01)
        time.sleep(0.2 if started else 0.0)  # until the child has the grammar
        began = time.monotonic()
        made.close()
        assert isinstance(bomb.exception(), OverloadedError | EngineError)
    assert time.monotonic() - began < 10.0
