"""Names of scorers, sums of them, and the metadata that they read."""

from __future__ import annotations

import json
import sys

import pytest

from mlx_parallm.core import CollectionSpec
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring.catalogue import ScorerCatalogue
from mlx_parallm.rl.scoring.gym import dataset
from mlx_parallm.rl.scoring.registry import BUILTINS, Term, terms
from mlx_parallm.rl.scoring.reward import load
from mlx_parallm.rl.scoring.sample import ScorerInput


def score(scorer, text, tokens=3, finish_reason="stop", **metadata):
    return load(scorer)([ScorerInput(text, 5, tokens, finish_reason, metadata)])[0]


def refused(scorer, **metadata):
    with pytest.raises(InvalidRequestError) as caught:
        ScorerCatalogue().check(CollectionSpec(scorer, metadata))
    return caught.value


def plain_entry(task):
    return json.loads(json.dumps(dataset(task, seed=3)[0]))


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
        *("os:system", "os.system", "builtins:eval", "json", "mlx_parallm.rl.scoring.registry:load_one", "exact\0"),
    ],
)
def test_a_request_names_no_file_and_no_function(name, tmp_path, monkeypatch):
    """Even if there is one of that name, it is not imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("raise SystemExit")
    assert refused(name).param == "scoring_function"
    assert refused(f"0.5*exact + 0.5*{name}", answer="x").param == "scoring_function"


def test_a_sum_must_bring_what_every_part_reads():
    ScorerCatalogue().check(CollectionSpec("0.5*exact + 0.5*regex", {"answer": "x", "pattern": "y"}))
    assert "metadata.pattern" in str(refused("0.5*exact + 0.5*regex", answer="x"))


def test_no_scorer_needs_nothing():
    ScorerCatalogue().check(CollectionSpec(None))


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


def test_nothing_is_asked_twice(monkeypatch):
    """A name that is not built in costs a child process once, whether or not it can be used."""
    catalogue, started = ScorerCatalogue(), []
    monkeypatch.setattr(
        "mlx_parallm.rl.scoring.catalogue._worker_description",
        lambda name: started.append(name) or {"requires": [], "tasks": ["a", "b"], "problem": "broken"},
    )
    for _ in range(3):
        for name in ("reasoning_gym:a", "reasoning_gym:b", "reasoning_gym:c"):
            with pytest.raises(InvalidRequestError, match="broken" if name[-1] in "ab" else "unknown"):
                catalogue.check(CollectionSpec(name, {}))
    assert started == ["reasoning_gym:a", "reasoning_gym:b"]
