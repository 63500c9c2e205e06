"""The linears that LoRA adapters may change.

`adapter_layout` traces passes, and looks which products get every token, in which order they are called, and which have
a gradient. A pass is built and never computed, so weights that have not been read yet stay so. Products are linears,
those of all heads or experts too, and embeddings that make logits.

The head is the module whose product is the logits. In a tied model that is the embedding. Multi-head latent attention
(arXiv 2405.04434) has a linear from latents to the keys and values of all heads, which mlx-lm keeps as two modules with
one matrix per head.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_parallm.adapters.weights import AdapterLayout, HeadParts, LinearSpec
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.packing import as_dense
from mlx_parallm.model.split import owner_of

_LINEARS = (nn.Linear, nn.QuantizedLinear, nn.QQLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_HEAD_LINEARS = (MultiLinear, QuantizedMultiLinear)
"""mlx-lm's types for one matrix per attention head."""
_EXPERT_LINEARS = (SwitchLinear, QuantizedSwitchLinear)
_EXPERT_LAYERS = (SwitchGLU, SwitchMLP)
_TOKENS = (7, 11, 13)
"""Tokens of the traced passes. A linear that gets another number of them in one of these, such as an expert that a
model calls for its own tokens, does not know whose they are."""
_TILE = 8
"""Linears of a group have outputs that this divides, so that their factors fall into few tiles of the same width."""
_HEAD = "lm_head"
_KEYS_AND_VALUES = "kv_b_proj"
"""Transformers' name for the linear from latents to the keys and values of all heads."""


def adapter_layout(model: nn.Module, source: Path | None = None) -> AdapterLayout:
    """The linears that adapters may change: all that get every token of a pass, those of experts too, and the head.

    Linears that are called one after the other with the same input are a group, except for those of odd widths.
    `AdapterLayout.refused` names the other modules that an adapter file might ask for, with the reason. `source`: where
    the model was read from.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    with as_dense(model):
        return _layout(model, source)


def _layout(model: nn.Module, source: Path | None) -> AdapterLayout:
    modules = dict(model.named_modules())
    traces = [_traced(model, modules, tokens) for tokens in _TOKENS]
    linears: dict[str, LinearSpec] = {}
    refused: dict[str, str] = {}
    head = _head(model, modules, traces, refused)
    groups, experts = _groups(traces[0]), _expert_layers(modules)
    for path in sorted(modules, key=_natural):
        if head is not None and path == head.path:
            continue
        if kind := _refusal(path, modules, traces):
            refused[path] = kind
        elif isinstance(modules[path], _LINEARS + _EXPERT_LINEARS):
            linears[path] = _spec(path, modules, traces[0].called[path], groups[path], experts)
    for spec in _heads(modules, traces[0]):
        if kind := next(filter(None, (_unfit(at, spec.target, traces) for at in spec.modules)), ""):
            refused[spec.path] = kind
        else:
            linears[spec.path] = spec
    products = {path: product.outputs for path, product in traces[0].called.items()}
    still = without_gradient(traces[0].logits, products)
    in_order = {path: linears[path] for path in sorted(linears, key=_natural)}
    for path, spec in in_order.items():
        if still.issuperset(spec.modules):
            in_order[path] = replace(spec, chooses=True)
    return AdapterLayout(in_order, refused, len(model.layers), head, source, _transformers_paths(model, in_order))


def _groups(trace: Trace) -> dict[str, str]:
    """The group of each linear that is called, named after its first one."""
    groups: dict[str, str] = {}
    last: str | None = None
    for path, each in trace.called.items():
        same = last is not None and trace.called[last].x is each.x
        groups[path] = groups[last] if same and last is not None else path
        last = path
    return groups


def _expert_layers(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """The number of experts by the path of the module that has them and their router. That is the one around the
    experts' layer, or the next one if there is no other linear in it."""
    found: dict[str, int] = {}
    plain = [path for path, part in modules.items() if isinstance(part, _LINEARS)]
    for path, part in modules.items():
        if isinstance(part, _EXPERT_LINEARS) and path.count(".") > 1:
            at = path.rsplit(".", 2)[0]
            if not any(each.startswith(f"{at}.") for each in plain):
                at = at.rpartition(".")[0]
            found[at] = int(part.num_experts)
    return found


def _refusal(path: str, modules: Mapping[str, nn.Module], traces: list[Trace]) -> str:
    """The kind of LoRA that is not supported on this module; "" if it may have an adapter, or has no own weights."""
    module, name = modules[path], path.rpartition(".")[2]
    if isinstance(module, _EMBEDDINGS):
        return "embedding LoRA"
    experts = isinstance(module, _EXPERT_LINEARS)
    if experts and type(modules[path.rpartition(".")[0]]) not in _EXPERT_LAYERS:
        return "expert LoRA"
    if type(module) not in _LINEARS + _EXPERT_LINEARS:
        is_matrix = "weight" in module and module.weight.ndim == 2
        return f"LoRA on {name}, which is no linear but a {type(module).__name__}," if is_matrix else ""
    return _unfit(path, name, traces)


def _unfit(path: str, name: str, traces: list[Trace]) -> str:
    """Why adapted code cannot take the place of a product, as a kind of LoRA; "" if it can."""
    if not all(trace.of_all_tokens(path) for trace in traces):
        return f"LoRA on {name}, which does not get all tokens,"
    return f"LoRA on {name}, whose weight the model reads by itself," if path in traces[0].used else ""


def _spec(
    path: str, modules: Mapping[str, nn.Module], product: Product, group: str, experts: Mapping[str, int]
) -> LinearSpec:
    inputs, outputs = product.x.shape[-1], product.width
    if isinstance(modules[path], _EXPERT_LINEARS):
        return LinearSpec(path, inputs, outputs, group, int(modules[path].num_experts), product.vectors // _TOKENS[0])
    block = next((at for at in experts if path.startswith(f"{at}.")), None)
    group = path if outputs % _TILE else group
    return LinearSpec(path, inputs, outputs, group, chooses=block is not None and outputs in (1, experts[block]))


def _heads(modules: Mapping[str, nn.Module], trace: Trace) -> Iterator[LinearSpec]:
    """The linears from latents to the keys and values of all heads. Of the two modules that do the work of each, a pass
    of several tokens uses the one of the keys transposed, because a pass of one token multiplies queries by it."""
    paths = [path for path in trace.called if isinstance(modules[path], _HEAD_LINEARS)]
    values_in = {path.rpartition(".")[0]: path for path in paths if not trace.called[path].transposed}
    for keys in paths:
        parent = keys.rpartition(".")[0]
        if trace.called[keys].transposed and parent in values_in:
            of_keys, of_values = trace.called[keys], trace.called[values_in[parent]]
            parts = HeadParts(keys, values_in[parent], len(modules[keys].weight), of_keys.width)
            path, outputs = f"{parent}.{_KEYS_AND_VALUES}", parts.heads * (of_keys.width + of_values.width)
            yield LinearSpec(path, of_values.x.shape[-1], outputs, path, parts=parts)


def _head(
    model: nn.Module, modules: Mapping[str, nn.Module], traces: list[Trace], refused: dict[str, str]
) -> LinearSpec | None:
    """The linear that makes logits. If it cannot be adapted, it is refused. In a tied model it has the path that
    Transformers gives it."""
    at, tied = traces[0].head, _HEAD if owner_of(model) is model else f"language_model.{_HEAD}"
    if at is None:
        refused[tied] = f"LoRA on {_HEAD}, whose weight the model reads by itself,"
        return None
    embedding = at if isinstance(modules[at], _EMBEDDINGS) else ""
    path, product = tied if embedding else at, traces[0].called[at]
    if kind := _unfit(at, path.rpartition(".")[2], traces):
        refused[path] = kind
        return None
    return LinearSpec(path, product.x.shape[-1], product.width, path, embedding=embedding)


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


# -- the pass that is traced ---------------------------------------------------------------------


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
    logits: mx.array = field(init=False)
    within: str = ""

    def of_all_tokens(self, path: str) -> bool:
        """Whether the module gets every token, or as many experts of each."""
        return path in self.called and not self.called[path].vectors % self.tokens

    @property
    def head(self) -> str | None:
        """The path of the module whose product is the logits: the last one, if it is as wide."""
        path = next(reversed(self.called), None)
        return path if path is not None and self.called[path].width == self.logits.shape[-1] else None


def _traced(model: nn.Module, modules: Mapping[str, nn.Module], tokens: int) -> Trace:
    """Builds a pass of so many tokens. `modules`: those of the model, by path.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    trace, kinds = Trace(tokens), {}
    for path, module in modules.items():
        if type(module) in _LINEARS + _EXPERT_LINEARS + _HEAD_LINEARS + _EMBEDDINGS:
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
    product = "as_linear" if kind in _EMBEDDINGS else "__call__"

    def own(name: str) -> Callable[..., mx.array]:
        def run(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            trace.within = path
            y: mx.array = getattr(kind, name)(self, x, *args, **kwargs)
            trace.within = ""
            if name == product:
                noted = trace.called.setdefault(path, Product(x))
                noted.outputs.append(y)
                noted.transposed |= kind in _HEAD_LINEARS and not all([*args, *kwargs.values()])
            return y

        return run

    def get(self: nn.Module, name: str) -> Any:
        if name in self and trace.within != path and kind not in _EXPERT_LINEARS:
            trace.used.add(path)
        return kind.__getattr__(self, name)

    def put(self: nn.Module, name: str, value: Any) -> None:
        if name in self:
            trace.used.add(path)
        kind.__setattr__(self, name, value)

    methods = {name: own(name) for name in ("__call__", product)}
    return type(kind.__name__, (kind,), {**methods, "__getattr__": get, "__setattr__": put})


# -- what has no gradient ------------------------------------------------------------------------

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


# -- Transformers' names -------------------------------------------------------------------------
#
# mlx-lm's `sanitize` turns the names of a checkpoint into those of its model. So a name that other models have in
# Transformers is this model's name too if `sanitize` makes the linear's own name of it.

_NAMES = (
    {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
    {
        "mlp.gate_proj": "shared_mlp.input_linear",
        "mlp.up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    },
)
"""Sets of ends of paths in mlx-lm, with those that linears of the same use have in Transformers. Two that have the same
there are one linear, with the outputs of the first before those of the second."""


def _transformers_paths(model: nn.Module, linears: Mapping[str, LinearSpec]) -> dict[str, str]:
    """Transformers' paths of the linears that have another one there, by their own path."""
    found: dict[str, str] = {}
    for names in _NAMES:
        tried = {
            path: f"{path.removesuffix(end)}{names[end]}"
            for end in names
            for path, spec in linears.items()
            if not spec.experts and re.search(rf"(^|\.){re.escape(end)}$", path)
        }
        own = _sanitized(model, tried, linears) if tried else frozenset()
        found |= {path: name for path, name in tried.items() if f"{path}.weight" in own}
    return found


def _sanitized(model: nn.Module, tried: Mapping[str, str], linears: Mapping[str, LinearSpec]) -> frozenset[str]:
    """The names of the weights that `sanitize` makes of the model's own, of which those of some linears have other
    names. Nothing is computed."""
    weights = {name: each for name, each in tree_flatten(model.parameters()) if name.rpartition(".")[0] not in tried}
    outputs = dict.fromkeys(tried.values(), 0)
    for path, name in tried.items():
        outputs[name] += linears[path].out_features
        weights[f"{name}.weight"] = mx.zeros((outputs[name], linears[path].in_features))
    try:
        return frozenset(model.sanitize(weights))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # these are not a whole checkpoint's weights
        return frozenset()
