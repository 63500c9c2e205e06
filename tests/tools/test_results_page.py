"""The page of benchmark results, against the records it is made of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "results_page.py"


def record(median, processor="M4"):
    machine = {"processor": processor, "mlx": "1"}
    value = {"median": median, "low": median, "high": median}
    figure = {"name": "rate", "unit": "tok/s", "value": value, "limit": 5, "at_least": True, "met": median >= 5}
    return json.dumps({"machine": machine, "figures": [figure]})


@pytest.fixture
def tree(tmp_path):
    """A repository with the script, and one record committed."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text())
    (results / "serving.json").write_text(record(10.0))
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(tree, *arguments):
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tree, check=True)


def commit(tree):
    git(tree, "add", "-A")
    git(tree, "commit", "--quiet", "--message", "a record")


def write(tree, *flags):
    return subprocess.run([sys.executable, str(tree / "scripts" / SCRIPT.name), *flags], check=False).returncode


def page(tree):
    assert write(tree) == 0
    return (tree / "benchmarks" / "RESULTS.md").read_text()


def has_history():
    command = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() == "false"


@pytest.mark.skipif(not has_history(), reason="needs the repository's history")
def test_the_page_in_the_tree_is_current():
    assert write(ROOT, "--check") == 0


def test_a_figure_that_moved_by_more_than_5_percent_is_listed_before_and_after_the_commit(tree):
    assert "This is its first record." in page(tree)
    (tree / "benchmarks" / "results" / "serving.json").write_text(record(11.0, processor="M5"))
    assert write(tree, "--check") == 1
    text = page(tree)
    assert "| rate | 10 tok/s | 11 tok/s | +10% |" in text
    assert "(M4, MLX 1)" in text
    commit(tree)
    assert page(tree) == text
    assert write(tree, "--check") == 0


@pytest.mark.parametrize("median", [10.4, 9.6])
def test_a_figure_that_moved_less_is_not(tree, median):
    (tree / "benchmarks" / "results" / "serving.json").write_text(record(median))
    assert "Nothing moved by more than 5% against" in page(tree)


def test_a_missed_limit_is_named(tree):
    (tree / "benchmarks" / "results" / "serving.json").write_text(record(4.0))
    assert "| rate | 4 tok/s | ≥ 5 | missed |" in page(tree)
