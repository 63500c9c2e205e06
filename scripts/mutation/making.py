"""Makes mutants: small changes to the statements of functions, each of which a test should notice.

Not changed are what no test should pin: docstrings and other strings, annotations, defaults, assertions, the messages
of errors, and what is logged.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
_OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LEFT_OUT = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
_LOGGERS = ("_log", "log", "logger", "logging", "warnings")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to a file. `function`: the qualified name of the one it is in. `start`, `end`: bytes of the file.
    `key` stays the same for as long as the function does, whatever else changes in the file."""

    file: str
    function: str
    line: int
    before: str
    after: str
    start: int
    end: int
    key: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in the order of their places."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        last = node.end_lineno or node.lineno
        return starts[node.lineno - 1] + node.col_offset, starts[last - 1] + (node.end_col_offset or 0)

    found = []
    for name, function in _functions(ast.parse(source), ""):
        first, last = span(function)
        text = f"{file}:{name}:{source[first:last].decode()}"
        for node, after in (change for statement in function.body for change in _changes(statement)):
            start, end = span(node)
            key = hashlib.sha256(f"{text}:{start - first}:{end - first}:{after}".encode()).hexdigest()[:10]
            found.append(Mutant(file, name, node.lineno, source[start:end].decode(), after, start, end, key))
    return sorted(found, key=lambda each: (each.start, each.end, each.after))


def _functions(parent: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions below a node, each with its qualified name."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _FUNCTIONS):
            own = f"{name}{node.name}"
            yield own, node
            yield from _functions(ast.Module(node.body, []), f"{own}.<locals>.")
        else:
            yield from _functions(node, f"{name}{node.name}." if isinstance(node, ast.ClassDef) else name)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """What can be replaced in a node, apart from functions and classes in it, and by which text."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef, *_LEFT_OUT)) or _logs(node):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield from ((node, after) for after in _replacements(node))
    for name, field in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST):
                if name == "test" and isinstance(child, ast.expr) and not isinstance(node, ast.While):
                    yield child, f"(not ({ast.unparse(child)}))"
                yield from _changes(child)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _SWAPPED:
            yield _with(node, ops=[_SWAPPED[type(operator)]()])
        case ast.BoolOp(op=operator):
            yield _with(node, op=_SWAPPED[type(operator)]())
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _SWAPPED:
            if not (_is_text(left) or _is_text(right)):
                yield _with(node, op=_SWAPPED[type(operator)]())
        case ast.AugAssign(op=operator) if type(operator) in _SWAPPED:
            yield _with(node, op=_SWAPPED[type(operator)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield str(value + 1)
        case ast.Name(id=name) if name in _OTHER_NAMES:
            yield _OTHER_NAMES[name]
        case ast.Return(value=value) if value is not None and not _is_falsy(value):
            yield "return None"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Break():
            yield "continue"
        case ast.Continue():
            yield "break"


def _with(node: ast.expr | ast.stmt, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return ast.unparse(changed) if isinstance(node, ast.stmt) else f"({ast.unparse(changed)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_falsy(node: ast.expr) -> bool:
    """Whether this is None, or what most callers take for the same. False and 0 have mutants of their own."""
    return isinstance(node, ast.Constant) and not node.value


def _logs(node: ast.AST) -> bool:
    """Whether this is a statement that logs."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOGGERS
    return False
