"""Mutants are what they should be, and are run against the tests that reach them, in a copy."""

import ast
import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

SCRIPTS = Path(__file__).parents[2] / "scripts"
SOURCE = '''"""A module."""
LIMIT = 3

class Queue:
    def take(self, number: int = 1) -> list[int]:
        """Takes é or more."""
        if number < LIMIT and not self.closed:
            _log.info("taken")
            self.left -= 1
            raise ValueError(number + 1)
        def inner():
            return min(number, 2)
        assert number > 0
        return inner
'''.encode()


@pytest.fixture
def making(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from mutation import making

    return making


@pytest.fixture
def command(making):
    loader = SourceFileLoader("mutants", str(SCRIPTS / "mutants"))
    module = module_from_spec(spec_from_loader("mutants", loader))
    loader.exec_module(module)
    return module


def test_each_mutant_is_one_change_within_a_function(making):
    found = making.mutants("queue.py", SOURCE)
    changes = {(each.function, each.before, each.after) for each in found}
    assert changes == {
        ("Queue.take", "number < LIMIT", "(number <= LIMIT)"),
        ("Queue.take", "number < LIMIT and not self.closed", "(number < LIMIT or not self.closed)"),
        ("Queue.take", "number < LIMIT and not self.closed", "(not (number < LIMIT and (not self.closed)))"),
        ("Queue.take", "not self.closed", "(self.closed)"),
        ("Queue.take", "self.left -= 1", "self.left += 1"),
        ("Queue.take", "1", "2"),
        ("Queue.take", "return inner", "return None"),
        ("Queue.take.<locals>.inner", "return min(number, 2)", "return None"),
        ("Queue.take.<locals>.inner", "min", "max"),
        ("Queue.take.<locals>.inner", "2", "3"),
    }
    for each in found:
        ast.parse(each.applied(SOURCE))


def test_a_mutant_runs_against_the_tests_that_reach_it_and_leaves_no_trace(command, tmp_path):
    root = tmp_path / "root"
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'ci']\n",
        "mlx_parallm/__init__.py": "",
        "mlx_parallm/toy.py": "def double(x):\n    return x * 2\n\n\ndef unused(x):\n    return x\n\n\n"
        "def ends(x):\n    while x > 0:\n        x -= 1\n    return x\n",
        "tests/toy/test_toy.py": "from mlx_parallm.toy import double, ends\n\n\n"
        "def test_double():\n    assert double(2) == 4\n\n\ndef test_ends():\n    assert ends(1) is not None\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for line in ("init -q", "add -A", "-c user.name=t -c user.email=t@t commit -qm t"):
        subprocess.run(["git", *line.split()], cwd=root, check=True)
    copy = command.Copy(root, tmp_path / "copy")
    reach = command.reached(copy, tmp_path, ["toy"])
    assert [test for _, test in reach["mlx_parallm/toy.py:double"]] == ["tests/toy/test_toy.py::test_double"]
    chosen = command.sample(copy, "toy", seed=1, count=100)
    assert chosen == command.sample(copy, "toy", seed=1, count=100) != command.sample(copy, "toy", seed=2, count=100)
    results = {}
    for mutant in chosen:
        if mutant.before in ("x * 2", "return x", "x > 0"):
            tests = reach.get(command.name_of(mutant.file, mutant.function), [])
            results[mutant.function, mutant.after] = command.tried(copy, mutant, tests)["result"]
    assert results == {
        ("double", "(x + 2)"): "survived",
        ("unused", "return None"): "not reached",
        ("ends", "return None"): "killed",
        ("ends", "(x >= 0)"): "survived",
    }
    assert (copy.folder / "mlx_parallm/toy.py").read_text() == files["mlx_parallm/toy.py"]
    (copy.folder / "tests/toy/test_toy.py").write_text("import time\n\n\ndef test_long():\n    time.sleep(60)\n")
    assert copy.pytest("tests/toy", limit_s=3) is None
