"""The programs beside the package go with it. Most of them run only when they are named."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["examples", "benchmarks", "scripts"])
def test_what_programs_import_from_the_package_exists(folder: str) -> None:
    missing = []
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mlx_parallm":
                missing += [(file.name, node.module, each.name) for each in node.names if not exists(node, each.name)]
    assert missing == []


def exists(node: ast.ImportFrom, name: str) -> bool:
    module = import_module(str(node.module))
    return hasattr(module, name) or (hasattr(module, "__path__") and find_spec(f"{node.module}.{name}") is not None)
