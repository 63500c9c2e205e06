"""Which of a model's products a pass calls, in which order and for how many tokens.

A pass is built and never computed, so weights that have not been read yet stay so. Its graph shows which products have
no gradient. Products are linears, those of all
heads or experts too, and embeddings that make logits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.experts import EXPERT_LINEARS

LINEARS = (nn.Linear, nn.QuantizedLinear, nn.QQLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
HEAD_LINEARS = (MultiLinear, QuantizedMultiLinear)
"""mlx-lm's types for one matrix per attention head."""


@dataclass(slots=True)
class Product:
    """What a module multiplies in a pass. `x`: its first input, kept so that no later array has that id. `outputs`: of
    all calls. `transposed`: whether one of the calls asked for the product with the transposed matrix."""

    x: mx.array
    outputs: list[mx.array] = field(default_factory=list)
    transposed: bool = False

    @property
    def width(self) -> int:
        """Of the outputs."""
        return self.outputs[0].shape[-1]

    @property
    def vectors(self) -> int:
        """How many outputs it gives in all calls."""
        return sum(y.size // y.shape[-1] for y in self.outputs)


@dataclass(slots=True)
class Trace:
    """The products of a pass of `tokens` tokens, by the path of their module, in the order of their first calls.

    `used`: modules with an array that the model reads or sets by itself, so that an adapted module cannot take their
    place. `logits`: what the pass gives. `within`: the path of the module whose own code runs.
    """

    tokens: int
    called: dict[str, Product] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    logits: mx.array | None = None
    within: str = ""

    def add(self, path: str, x: mx.array, y: mx.array, transposed: bool) -> None:
        product = self.called.setdefault(path, Product(x))
        product.outputs.append(y)
        product.transposed |= transposed

    def of_all_tokens(self, path: str) -> bool:
        """Whether the module gets every token, or as many experts of each."""
        return path in self.called and not self.called[path].vectors % self.tokens

    @property
    def head(self) -> str | None:
        """The path of the module whose product is the logits: the last one, if it is as wide."""
        path = next(reversed(self.called), None)
        assert self.logits is not None
        return path if path is not None and self.called[path].width == self.logits.shape[-1] else None

    @property
    def without_gradient(self) -> set[str]:
        """The paths of modules whose product has no gradient."""
        assert self.logits is not None
        return without_gradient(self.logits, {path: product.outputs for path, product in self.called.items()})


def traced(model: nn.Module, modules: Mapping[str, nn.Module], tokens: int) -> Trace:
    """Builds a pass of so many tokens. `modules`: those of the model, by path.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    trace, kinds = Trace(tokens), {}
    for path, module in modules.items():
        if type(module) in LINEARS + EXPERT_LINEARS + HEAD_LINEARS + EMBEDDINGS:
            kinds[path] = type(module)
            module.__class__ = _watched(kinds[path], path, trace)
    try:
        trace.logits = model(mx.arange(tokens)[None], cache=make_prompt_cache(model))
    except Exception as error:  # the model file is foreign code
        raise UnsupportedModelError(f"this model does not run: {error}") from error
    finally:
        for path, kind in kinds.items():
            modules[path].__class__ = kind
    return trace


def _watched(kind: Any, path: str, trace: Trace) -> Any:
    """A class that behaves as `kind`, and tells the trace how the module at `path` is used."""
    product = "as_linear" if kind in EMBEDDINGS else "__call__"

    def own(name: str) -> Callable[..., mx.array]:
        def run(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            trace.within = path
            y: mx.array = getattr(kind, name)(self, x, *args, **kwargs)
            trace.within = ""
            if name == product:
                trace.add(path, x, y, transposed=kind in HEAD_LINEARS and not all([*args, *kwargs.values()]))
            return y

        return run

    def get(self: nn.Module, name: str) -> Any:
        if name in self and trace.within != path and kind not in EXPERT_LINEARS:
            trace.used.add(path)
        return kind.__getattr__(self, name)

    def put(self: nn.Module, name: str, value: Any) -> None:
        if name in self:
            trace.used.add(path)
        kind.__setattr__(self, name, value)

    methods = {name: own(name) for name in ("__call__", product)}
    return type(kind.__name__, (kind,), {**methods, "__getattr__": get, "__setattr__": put})


# -- what has no gradient --------------------------------------------------------------------------


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
