"""`scripts/size`: what counts, and that the package keeps to its record."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "size"


@pytest.fixture(scope="module")
def size() -> ModuleType:
    spec = spec_from_loader("size", SourceFileLoader("size", str(SCRIPT)))
    assert spec is not None
    made = sys.modules["size"] = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(made)
    return made


def test_statements_count_and_texts_and_formatting_do_not(size: ModuleType) -> None:
    counted = size.Size()
    counted.add(ast.parse('"""Text."""\nclass A:\n    """Text."""\n    x = 1\n    """Text."""\n'))
    counted.add(ast.parse("def f(a):\n    if (\n        a\n    ):\n        return 1\n    return 2\n"))
    assert (counted.statements, counted.functions, counted.classes, counted.files) == (2 + 4, 1, 1, 2)
    assert (counted.longest_function, counted.longest_file) == (3, 4)


def test_a_room_may_grow_by_a_fiftieth_or_ten_statements(size: ModuleType) -> None:
    now = {"large": size.Size(1021), "small": size.Size(30), "new": size.Size(11)}
    assert [line.partition(":")[0] for line in size.grown(now, {"large": 1000, "small": 20})] == ["large", "new"]
    assert not [*size.grown({"large": size.Size(1020)}, {"large": 1000})]


def test_the_package_keeps_to_its_record() -> None:
    subprocess.run([str(SCRIPT), "--check"], check=True)
