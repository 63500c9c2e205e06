"""Built-in scorers: right, wrong and malformed answers; their names, and sums of them; and the metadata that they read,
which requests must bring."""

from __future__ import annotations

import json
import math
import signal
import sys
import time

import pytest

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring.builtin import BUILTINS
from mlx_parallm.rl.scoring.gym import dataset
from mlx_parallm.rl.scoring.sample import ScorerInput
from mlx_parallm.rl.scoring.scorers import Term, load, terms
from mlx_parallm.rl.scoring.service import ScorerCatalogue


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
    monkeypatch.setattr("mlx_parallm.rl.scoring.builtin._MATH_LIMIT_S", 0.5)
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


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact", (Term(1, "exact"),)),
        ("reasoning_gym:chain_sum", (Term(1, "reasoning_gym:chain_sum"),)),
        ("0.8*exact + 0.2*regex", (Term(0.8, "exact"), Term(0.2, "regex"))),
        ("0.8*exact+0.2*regex", (Term(0.8, "exact"), Term(0.2, "regex"))),
        (" 1e+1 * exact + -.5*my-own.scorer ", (Term(10, "exact"), Term(-0.5, "my-own.scorer"))),
        ("2*exact", (Term(2, "exact"),)),
    ],
)
def test_sums_are_read(text, expected):
    assert terms(text) == expected


BAD = ["", " ", "+", "exact +", "exact + regex", "0.8*exact + regex", "0.8*exact 0.2*regex", "0.8 exact", "*exact"]


BAD += ["nan*exact", "inf*exact", "1e999*exact", "0.8*exact - 0.2*regex", "0.8*exact + + 0.2*regex", "1*1", "a*exact"]


BAD += ["0.8*exact,", "0.8*(exact)", "exact()", "__import__('os')", "exäct", "a" * 10**6, "1*a+" * 200 + "1*a", "a:b:c"]


BAD += ["1*a + " * 16 + "1*a", "../exact", "exact\n", "0.5*exact\0", "１*exact"]


@pytest.mark.parametrize("text", BAD)
def test_other_sums_are_refused_in_short_ascii(text):
    with pytest.raises(InvalidRequestError) as caught:
        terms(text)
    assert caught.value.param == "scoring_function"
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 400


def test_a_sum_adds_up_its_parts():
    metadata = {"answer": "cat", "pattern": "c", "target_length": 3}
    assert score("0.8*exact + 0.2*regex", "cat", **metadata) == pytest.approx(1)
    assert score("0.8*exact + 0.2*regex", "cow", **metadata) == pytest.approx(0.2)
    assert score("0.8*exact + 0.2*regex", "dog", **metadata) == 0
    assert score("-2*exact + 1*length", "cat", tokens=3, **metadata) == pytest.approx(-1)


# -- what requests must bring ----------------------------------------------------------------------

GOOD = {
    "exact": {"answer": "x"},
    "gsm8k": {"answer": "so\n#### 1,234.5"},
    "math": {"answer": "\\frac12"},
    "regex": {"pattern": "a+"},
    "json_schema": {"schema": {"type": "object"}},
    "length": {"target_length": 12},
}


READS = {name: next(iter(metadata)) for name, metadata in GOOD.items()}


def test_every_built_in_scorer_takes_what_it_reads_and_names_what_is_absent():
    assert set(GOOD) == set(BUILTINS)
    for name, metadata in GOOD.items():
        ScorerCatalogue().check(CollectionSpec(name, metadata))
        for absent in ({}, {READS[name]: None}):
            error = refused(name, **absent)
            assert error.param == "metadata"
            assert f"metadata.{READS[name]} is missing" in str(error)


UNREADABLE = [
    ("exact", {"answer": " "}),
    ("exact", {"answer": ["x"]}),
    ("math", {"answer": True}),
    ("gsm8k", {"answer": "many"}),
    ("gsm8k", {"answer": "####"}),
    ("regex", {"pattern": "("}),
    ("regex", {"pattern": 3}),
    ("regex", {"pattern": "(" * 3000}),
    ("regex", {"pattern": "a" * 10**5}),
    ("json_schema", {"schema": "{"}),
    ("json_schema", {"schema": []}),
    ("json_schema", {"schema": {"type": "strange"}}),
    ("json_schema", {"schema": {"$schema": []}}),
    ("length", {"target_length": 0}),
    ("length", {"target_length": "nan"}),
    ("length", {"target_length": []}),
]


@pytest.mark.parametrize(("scorer", "metadata"), UNREADABLE)
def test_metadata_that_no_scorer_could_read_is_refused(scorer, metadata):
    error = refused(scorer, **metadata)
    assert error.param == "metadata"
    assert f"metadata.{READS[scorer]}" in str(error)


def test_unknown_names_are_refused_with_what_was_probably_meant():
    error = refused("exakt")
    assert error.param == "scoring_function"
    assert "did you mean exact?" in str(error)
    assert "gsm8k" in str(refused("zzzzzz"))
    assert refused("0.5*exact + 0.5*nothing", answer="x").param == "scoring_function"


@pytest.mark.parametrize(
    "name",
    [
        *("reward.py", "reward.py:score", "./reward.py:score", "/etc/passwd", "file:///etc/passwd", "../exact"),
        *("os:system", "os.system", "builtins:eval", "json", "mlx_parallm.rl.scoring.scorers:load_one", "exact\0"),
    ],
)
def test_a_request_names_no_file_and_no_function(name, tmp_path, monkeypatch):
    """Even if there is one of that name, it is not imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("raise SystemExit")
    assert refused(name).param == "scoring_function"
    assert refused(f"0.5*exact + 0.5*{name}", answer="x").param == "scoring_function"


def test_tasks_of_reasoning_gym_are_known_without_importing_it_here():
    catalogue, entry = ScorerCatalogue(), {"question": "1 + 1 = ?", "answer": "2", "metadata": {}}
    before = set(sys.modules)
    catalogue.check(CollectionSpec("reasoning_gym:chain_sum", {"entry": entry}))
    assert not any(name.startswith("reasoning_gym") for name in set(sys.modules) - before)
    for name, metadata, param, message in (
        ("reasoning_gym:chain_sun", {"entry": entry}, "scoring_function", "did you mean reasoning_gym:chain_sum"),
        ("reasoning_gym:composite", {"entry": entry}, "scoring_function", "unknown"),
        ("reasoning_gym:countdown", {"entry": entry}, "scoring_function", "its scoring runs text as code"),
        ("reasoning_gym:chain_sum", {}, "metadata", "metadata.entry is missing"),
        ("reasoning_gym:chain_sum", {"entry": "2"}, "metadata", "metadata.entry must be a JSON object"),
        ("reasoning_gym:chain_sum", {"entry": {"answer": "2"}}, "metadata", "lacks question, metadata"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            catalogue.check(CollectionSpec(name, metadata))
        assert caught.value.param == param


def test_without_reasoning_gym_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    error = refused("reasoning_gym:chain_sum", entry={})
    assert error.param == "scoring_function"
    assert "uv sync --inexact --extra reasoning-gym" in str(error)


@pytest.mark.parametrize("scorer", ["math", "0.5*exact + 0.5*math"])
def test_without_math_verify_the_error_says_how_to_install_it(monkeypatch, scorer):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    error = refused(scorer, answer="3")
    assert error.param == "scoring_function"
    assert "pip install 'mlx-parallm[math]'" in str(error)
