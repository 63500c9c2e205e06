"""Built-in scorers: right, wrong and malformed answers; names and sums of names; what requests must bring."""

from __future__ import annotations

import json
import math
import signal
import sys
import time

import pytest

from mlx_parallm.core import CollectionSpec
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring.catalogue import ScorerCatalogue
from mlx_parallm.rl.scoring.gym import TextAsCodeError, dataset, no_code_from_text
from mlx_parallm.rl.scoring.reward import load
from mlx_parallm.rl.scoring.sample import ScorerInput


def score(scorer, text, tokens=3, finish_reason="stop", **metadata):
    return load(scorer)([ScorerInput(text, 5, tokens, finish_reason, metadata)])[0]


def refused(scorer, **metadata):
    with pytest.raises(InvalidRequestError) as caught:
        ScorerCatalogue().check(CollectionSpec(scorer, metadata))
    return caught.value


# -- exact, regex, json_schema, length -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("Paris", "Paris", 1),
        (" Paris\n", "Paris ", 1),
        ("paris", "Paris", 0),
        ("It is Paris", "Paris", 0),
        ("", "x", 0),
        ("42", 42, 1),
        ("42.0", 42, 0),
    ],
)
def test_exact(text, answer, reward):
    assert score("exact", text, answer=answer) == reward


@pytest.mark.parametrize("scorer", ["exact", "gsm8k", "math"])
def test_an_answer_that_was_cut_off_is_none(scorer):
    assert score(scorer, "42", answer="42") == 1
    assert score(scorer, "42", finish_reason="length", answer="42") == 0


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [
        ("cat", "a cat sat", 1),
        (r"\Acat\Z", "a cat sat", 0),
        (r"\Acat\Z", "cat", 1),
        ("(?i)CAT", "a cat", 1),
        ("^sat$", "cat\nsat", 0),
        ("", "anything", 1),
        ("x", "", 0),
    ],
)
def test_regex_searches(pattern, text, reward):
    assert score("regex", text, pattern=pattern) == reward
    assert score("regex", text, finish_reason="length", pattern=pattern) == reward


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}


TAKEN = ['{"n": 3}', ' {"n": 3, "m": []}\n']
NOT_TAKEN = ['{"n": 0}', '{"n": "3"}', "{}", "[3]", "", '{"n": 3', 'Here: {"n": 3}', '{"n": 3, "m": NaN}']
NOT_TAKEN += ["[" * 10**5, '{"n": ' + "9" * 5000]


@pytest.mark.parametrize(("text", "reward"), [*((text, 1) for text in TAKEN), *((text, 0) for text in NOT_TAKEN)])
def test_json_schema(text, reward):
    assert score("json_schema", text, schema=SCHEMA) == reward
    assert score("json_schema", text, schema=json.dumps(SCHEMA)) == reward
    assert score("json_schema", text, finish_reason="length", schema=SCHEMA) == 0


def test_a_schema_fetches_nothing():
    with pytest.raises(Exception, match="Unresolvable"):
        score("json_schema", "3", schema={"$ref": "http://127.0.0.1:9/schema.json"})


def test_length_falls_smoothly_on_both_sides():
    rewards = [score("length", "text", tokens, target_length=40) for tokens in range(1, 400)]
    assert max(rewards) == rewards[39] == 1
    assert rewards[:40] == sorted(rewards[:40])
    assert rewards[39:] == sorted(rewards[39:], reverse=True)
    assert rewards[19] == pytest.approx(rewards[79]) == pytest.approx(math.exp(-(math.log(2) ** 2)))
    assert all(0 < reward <= 1 for reward in rewards)
    assert score("length", "text", 40, target_length="40") == 1


def test_a_text_that_was_cut_off_has_no_length():
    assert score("length", "text", 40, finish_reason="length", target_length=40) == 0
    assert score("length", "", 0, target_length=40) == 0


# -- gsm8k and math --------------------------------------------------------------------------------

RIGHT = [
    ("42", "The answer is 42."),
    (42, "42"),
    ("1000", "He pays $1,000"),
    ("-7", "so it is -7"),
    (0.5, "\\boxed{\\frac{1}{2}}"),
    ("3.50", "$3.5$"),
]
WRONG = [
    ("42", "43"),
    ("42", "-42"),
    ("42", "42 of 50"),
    ("42", "no number"),
    ("42", ""),
    ("42", "\\boxed{"),
    ("42", "1/0"),
]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("That makes 72", 1),
        ("48 + 24 = 72.\nSo it is $72.00, not 24? No: 72", 1),
        ("24 less 96 is -72", 0),
        ("100-72", 1),
        ("1,072 of them", 0),
        ("72\n#### 24", 0),
        ("12\n#### 72 clips", 1),
        ("no number", 0),
    ],
)
def test_gsm8k_needs_no_package(monkeypatch, text, reward):
    """Without math-verify the last number counts."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert score("gsm8k", text, answer="48 + 24\n#### 72") == reward
    assert score("gsm8k", text, finish_reason="length", answer="72") == 0


@pytest.mark.parametrize("scorer", ["gsm8k", "math"])
def test_numbers(scorer):
    assert [score(scorer, text, answer=answer) for answer, text in RIGHT] == [1] * len(RIGHT)
    assert [score(scorer, text, answer=answer) for answer, text in WRONG] == [0] * len(WRONG)


def test_gsm8k_reads_the_answers_of_its_data_set():
    solution = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 1,072.\n#### 1,072"
    assert score("gsm8k", "That makes 1072", answer=solution) == 1
    assert score("gsm8k", "That makes 24", answer=solution) == 0
    assert score("gsm8k", "48 + 24\n#### 72\n", answer="#### 72") == 1
    assert score("gsm8k", "72\n#### 24", answer="#### 72") == 0


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("\\frac{3}{4}", "It is $\\frac34$.", 1),
        ("\\frac{3}{4}", "0.75", 1),
        ("$\\frac{3}{4}$", "3/4", 1),
        ("3/4", "\\(\\frac{6}{8}\\)", 1),
        ("\\frac{3}{4}", "4/3", 0),
        ("\\sqrt{2}", "\\sqrt{2}", 1),
        ("\\sqrt{8}", "$2\\sqrt{2}$", 1),
        ("\\boxed{9}", "first 3, then $9$", 1),
        ("2x+1", "$1 + 2x$", 1),
        ("2x+1", "$2x - 1$", 0),
        ("[0,1)", "$[0, 1)$", 1),
        ("[0,1)", "$[0, 1]$", 0),
        ("\\frac{3}{4}", "\\frac{3}{", 0),
        ("Monday", " Monday", 1),
        ("Monday", "Sunday", 0),
    ],
)
def test_math_reads_latex(answer, text, reward):
    assert score("math", text, answer=answer) == reward


def test_mathematics_has_a_limit_of_processor_time_and_leaves_other_alarms_alone(monkeypatch):
    """A busy machine costs nobody a reward, and a timer of the program, such as a test's, still rings."""
    monkeypatch.setattr("mlx_parallm.rl.scoring.registry._MATH_LIMIT_S", 0.5)
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert score("math", "$" + "+".join(f"\\sqrt{{{n}}}" for n in range(2, 400)) + "$", answer="7") == 0
        while not rung:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_answer_of_the_request_that_is_no_mathematics_is_a_fault_not_a_wrong_answer():
    with pytest.raises(ValueError, match="no mathematical expression"):
        score("math", "4", answer="a$b")


# -- reasoning_gym ---------------------------------------------------------------------------------


def plain_entry(task):
    return json.loads(json.dumps(dataset(task, seed=3)[0]))


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi"])
def test_a_task_scores_its_own_entries(task):
    entry = plain_entry(task)
    name = f"reasoning_gym:{task}"
    assert score(name, entry["answer"] + "\n", entry=entry) == 1
    assert score(name, entry["answer"], entry=json.dumps(entry)) == 1
    assert score(name, f"Hm. <answer>0</answer> no: <answer>{entry['answer']}</answer> done", entry=entry) == 1
    assert score(name, entry["answer"], finish_reason="length", entry=entry) == 0
    assert score(name, "<answer>nonsense</answer>", entry=entry) < 0.5
    assert score(name, "", entry=entry) < 0.5


def test_an_answer_that_a_task_fails_to_read_is_wrong_and_an_entry_is_a_fault():
    factors, survo = plain_entry("prime_factorization"), plain_entry("survo")
    assert score("reasoning_gym:prime_factorization", factors["answer"], entry=factors) == 1
    assert score("reasoning_gym:prime_factorization", "two times two", entry=factors) == 0
    with pytest.raises(KeyError, match="board_size"):
        score("reasoning_gym:survo", "1 2", entry={**survo, "metadata": {}})


def test_no_answer_and_no_entry_is_run_as_code(tmp_path):
    """string_insertion evaluates answers that are not the right one; number_sorting evaluates the entry's."""
    entry = plain_entry("string_insertion")
    code = f"[open({str(tmp_path / 'ran')!r}, 'w').write('x') and 'a']"
    assert score("reasoning_gym:string_insertion", entry["answer"], entry=entry) == 1
    assert score("reasoning_gym:string_insertion", code, entry=entry) == 0
    assert not (tmp_path / "ran").exists()
    eval(code)
    assert (tmp_path / "ran").exists()


def test_the_guard_stands_only_while_it_is_wanted():
    with no_code_from_text():
        with pytest.raises(TextAsCodeError):
            eval("1 + 1")
        with pytest.raises(TextAsCodeError):
            exec(compile("1 + 1", "<string>", "exec"))
        assert json.loads("[1]") == [1]
    assert eval("1 + 1") == 2
