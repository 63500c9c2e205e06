"""Mutants are what they should be, and are run against the tests that reach them, in a copy."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ci, pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")]

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


def test_a_mutant_is_the_same_one_wherever_its_function_stands(making):
    moved = b'"""Another line."""\n' + SOURCE
    assert {each.key for each in making.mutants("queue.py", SOURCE)} == {
        each.key for each in making.mutants("queue.py", moved)
    }
    assert len({each.key for each in making.mutants("queue.py", SOURCE)}) == 10
    changed = {each.function for each in making.mutants("queue.py", SOURCE.replace(b"number, 2", b"number, 4"))}
    assert changed == {"Queue.take", "Queue.take.<locals>.inner"}


def toy(root: Path, *lines: str) -> dict[str, str]:
    """The results of a room of one module, as the command prints them."""
    found = subprocess.run(
        [sys.executable, str(root / "scripts/mutants"), "toy", "--work", str(root / "work"),
         "--out", str(root / "record.json"), *lines],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    results = re.findall(r"/\d+ (killed|too long|survived|not reached) +mlx_parallm/toy.py:(\d+ .*) \(", found)
    return {change: result for result, change in results}


def test_mutants_run_against_the_tests_that_reach_them_and_leave_no_trace(tmp_path):
    files = {
        ".gitignore": "work\nrecord.json\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'ci']\naddopts = '--import-mode=importlib'\n",
        "mlx_parallm/__init__.py": "from pathlib import Path\n\nBLAS = Path('none')\n",
        "mlx_parallm/toy.py": "def double(x):\n    return x * 2\n\n\ndef unused(x):\n    return x\n\n\n"
        "def ends(x):\n    while x > 0:\n        x -= 1\n    return x\n",
        "tests/toy/test_toy.py": "from mlx_parallm.toy import double, ends\n\n\n"
        "def test_double():\n    assert double(2) == 4\n\n\ndef test_ends():\n    assert ends(1) is not None\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("scripts", "benchmarks/lib"):
        shutil.copytree(SCRIPTS.parent / name, tmp_path / name)

    def commit() -> None:
        for line in ("init -q", "add -A", "-c user.name=t -c user.email=t@t commit -qm t"):
            subprocess.run(["git", *line.split()], cwd=tmp_path, check=True)

    commit()
    expected = {
        "2 x * 2 → (x + 2)": "survived",
        "2 2 → 3": "killed",
        "2 return x * 2 → return None": "killed",
        "6 return x → return None": "not reached",
        "10 x > 0 → (x >= 0)": "survived",
        "10 0 → 1": "survived",
        "11 x -= 1 → x += 1": "too long",
        "11 1 → 2": "survived",
        "12 return x → return None": "killed",
    }
    first = toy(tmp_path, "--count", "4")
    assert len(first) == 4
    assert first.items() < expected.items()
    rest = toy(tmp_path)
    assert first | rest == expected
    assert not first.keys() & rest.keys()
    (tmp_path / "tests/toy/test_more.py").write_text(
        "from mlx_parallm.toy import double, unused\n\n\n"
        "def test_more():\n    assert double(3) == 6\n    assert unused(3) == 3\n"
    )
    commit()
    survivors = toy(tmp_path, "--survivors")
    assert survivors == {
        change: result for change, result in expected.items() if result in ("survived", "not reached")
    } | {
        "2 x * 2 → (x + 2)": "killed",
        "6 return x → return None": "killed",
    }
    record = json.loads((tmp_path / "record.json").read_text())["rooms"]["toy"]
    assert (record["mutants"], record["at_first"], len(record["survivors"])) == (9, 4, 3)
    assert (tmp_path / "mlx_parallm/toy.py").read_text() == files["mlx_parallm/toy.py"]
    assert not [path for path in (tmp_path / "work").iterdir() if path.is_dir()]


def test_only_a_process_that_wants_no_cpu_hangs(making, tmp_path, monkeypatch):
    """A busy machine makes a test slow, which says nothing of the mutant."""
    from mutation import running

    monkeypatch.setattr(running, "IDLE_S", 1.0)
    monkeypatch.setattr(running, "_FAST_S", 0.1)
    copy = object.__new__(running.Copy)
    copy.progress = tmp_path / "progress.txt"
    copy.progress.write_text("")

    def status(program: str, cpu_s: float) -> int | None:
        return copy._ended(subprocess.Popen([sys.executable, "-c", program], start_new_session=True).pid, cpu_s)

    spin = "import time\nwhile time.process_time() < {}: pass"
    assert status("import time; time.sleep(60)", 9.0) is None
    assert status(spin.format(60), 1.0) is None
    assert status(spin.format(2.5), 60.0) == 0
