"""The linears of Transformers' models, read from the text of its model files, which need no PyTorch for that."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_FOLDER = Path(str(importlib.util.find_spec("transformers").origin)).parent / "models"  # type: ignore[union-attr]
_LISTS = ("ModuleList", "Sequential")


def linears_of(family: str, model: str) -> set[str]:
    """The paths of all linears that a class of `models/<family>/modeling_<family>.py` may have, with N in the place of
    numbers. Of modules that depend on the config, all are there."""
    return set(_linears(family, model, ()))


def _linears(family: str, name: str, above: tuple[str, ...]) -> Iterator[str]:
    if name in above:
        return
    for attribute, in_list, value in _assignments(family, name):
        prefix = f"{attribute}.N" if in_list else attribute
        if value == "Linear":
            yield prefix
        elif found := _find(family, value):
            for path in _linears(*found, (*above, name)):
                yield f"{prefix}.{path}"


@cache
def _classes(family: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(family).body if isinstance(node, ast.ClassDef)}


@cache
def _tree(family: str) -> ast.Module:
    return ast.parse((_FOLDER / family / f"modeling_{family}.py").read_text())


def _find(family: str, name: str) -> tuple[str, str] | None:
    """Where a class is defined: in the family's own file, or in that of another one, which it imports it from."""
    if name in _classes(family):
        return family, name
    for node in _tree(family).body:
        if isinstance(node, ast.ImportFrom) and node.level and any(alias.name == name for alias in node.names):
            other = str(node.module).partition(".")[0]
            return (other, name) if (_FOLDER / other / f"modeling_{other}.py").is_file() else None
    return None


def _assignments(family: str, name: str) -> Iterator[tuple[str, bool, str]]:
    """What `self.attribute = …` make in a class and its bases: the attribute, whether it is a list, and the class."""
    node = _classes(family)[name]
    for base in node.bases:
        if isinstance(base, ast.Name) and (found := _find(family, base.id)):
            yield from _assignments(*found)
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Attribute):
            made = [_called(call) for call in ast.walk(statement.value) if isinstance(call, ast.Call)]
            in_list = any(each in _LISTS for each in made)
            yield from ((target.attr, in_list, each) for called in made for each in _alternatives(family, called))


def _called(call: ast.Call) -> str:
    """The last name of what is called: of nn.Linear, Linear; of CLASSES[kind], CLASSES."""
    function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _alternatives(family: str, name: str) -> list[str]:
    """The classes in a dictionary of this name, or the name itself."""
    for node in _tree(family).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == name:
            return [ast.unparse(value) for value in node.value.values]
    return [name]
