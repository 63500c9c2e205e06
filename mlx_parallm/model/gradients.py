"""Which arrays of a pass that was built, and not computed, have no gradient."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from io import StringIO

import mlx.core as mx

_STEPS = frozenset({
    *("ArgPartition", "ArgReduce", "ArgSort", "StopGradient", "Floor", "Ceil", "Round", "Sign"),
    *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"),
})  # fmt: skip
"""MLX's names for operations whose result does not change with small changes of their inputs."""
_RESULT = "result"
_OPERATION = re.compile(r'^\{ (\d+) \[label ="(\w+)"', re.MULTILINE)
_EDGE = re.compile(r'^"?(\w+)"? -> "?(\w+)"?$', re.MULTILINE)


def without_gradient(result: mx.array, arrays: Mapping[str, Sequence[mx.array]]) -> set[str]:
    """Those of `arrays`, by name, none of which can change `result` by a small change: it does not depend on them, or
    on what they choose alone, as on the tokens that an indexer selects. None if the pass computed some of them, because
    MLX forgets what arrays were computed of."""
    names: dict[str, str] = {}
    given: dict[str, mx.array] = {}
    for name, calls in arrays.items():
        for each in calls:
            key = f"array_{len(given)}"
            names[key], given[key] = name, each
    text = StringIO()
    mx.export_to_dot(text, **given, **{_RESULT: result + 0})
    above = defaultdict(list)
    for source, target in _EDGE.findall(text.getvalue()):
        above[target].append(source)
    if not all(above[key] for key in given):
        return set()
    reached = _reached(above, dict(_OPERATION.findall(text.getvalue())))
    return arrays.keys() - {names[node] for node in reached if node in names}


def _reached(above: Mapping[str, Sequence[str]], operations: Mapping[str, str]) -> set[str]:
    """The nodes that a gradient of the result reaches. `above`: of what each node is computed. `operations`: the kind
    of those that are no arrays."""
    reached, left = set(), [_RESULT]
    while left:
        node = left.pop()
        if node not in reached and operations.get(node) not in _STEPS:
            reached.add(node)
            left += above.get(node, ())
    return reached
