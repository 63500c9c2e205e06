"""Compares one tiny random model of any family with mlx-lm's own code: served, with adapters, and its gradients."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import Harness, make_harness
from lora import changes, random_adapter
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING, quantize_model

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.core.requests import RequestFinished
from mlx_parallm.engine.startup import Prover
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.device import on_cpu, prepare_device
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.model.packing import to_float32
from mlx_parallm.train.branches import Branch, Bucket
from mlx_parallm.train.context import LoraSpan as Trained
from mlx_parallm.train.context import Params
from mlx_parallm.train.model import TrainableModel

CONFIGURATIONS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "model" / "configurations.json").read_text()
)
"""By their model type, with a number from the second one on: those of mlx-lm's own tests, some of them smaller. One of
each model file that these lack follows, written for our tests: `ours` and the model type."""

ELSEWHERE = {
    "bitnet": "mlx-lm needs Metal",
    "olmo": "mlx-lm needs a package",
    "phi3small": "mlx-lm corrupts memory",
    "ours muse_spark": "mlx-lm needs Metal",
}
"""Those that mlx-lm cannot run here."""
COMPATIBLE = frozenset({"afm7", "gpt_bigcode", "llama4"})
"""Those that run row by row, with a compatible plan: they compute with the length of one row."""
OWN_CACHES = frozenset({"ours deepseek_v41"})
"""Those whose caches are of a class of their own: row by row too, without a prefix cache, and not trained."""

RANK, SCALE = 4, 0.5
_MANY = 1 << 22

_BEHIND = 1e-3
"""The most by which a drawn token's logit may be below the largest one, relative to the largest minus the mean."""

_SHARED, _RESTS, _ALONE = 6, (4, 3), 5
"""Tokens that two rows begin with, that follow them in each, and of a third row. Its neighbours are padded."""


def build(name: str, **changed: Any) -> nn.Module:
    """The model of one of the configurations, in float32, with some settings changed."""
    prepare_device()
    model = random_model(CONFIGURATIONS[name] | changed)
    mx.eval(model.parameters())
    return model


def random_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json in float32, with weights that are not computed yet. Matrices keep the size of what
    passes through; vectors differ a little from what mlx-lm begins with."""
    kind = config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    arrays = [(path, each) for path, each in tree_flatten(model.parameters()) if mx.issubdtype(each.dtype, mx.floating)]
    keys = mx.random.split(mx.random.key(0), len(arrays))
    model.update(tree_unflatten([(path, _random(each, key)) for (path, each), key in zip(arrays, keys, strict=True)]))
    model.eval()
    return model


TRUE_SIZES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "model" / "true_sizes.json").read_text())
"""Configurations of releases in their true widths, with few layers and experts, and where the values are from."""


def true_model(release: str, bits: int) -> nn.Module:
    """A model of TRUE_SIZES with weights of 16 or 4 bits as a server loads it: on a CPU, others are float32."""
    config = TRUE_SIZES[release]["config"]
    model = random_model(config)
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        model, _ = quantize_model(model, config, None, bits)
    if on_cpu():
        to_float32(model)
    mx.eval(model.parameters())
    return model


def _random(array: mx.array, key: mx.array) -> mx.array:
    """Random weights: uniform for large arrays, because a CPU draws these four times as fast, and normal for others."""
    if array.size > _MANY:
        return mx.random.uniform(-1.0, 1.0, array.shape, key=key) * (3 / array.shape[-1]) ** 0.5
    noise = mx.random.normal(array.shape, key=key)
    return noise / array.shape[-1] ** 0.5 if array.ndim > 1 else array.astype(mx.float32) + 0.05 * noise


class Plain:
    """mlx-lm's model alone, with factors merged into its weights."""

    def __init__(self, name: str) -> None:
        self._model = build(name)
        self._modules = dict(self._model.named_modules())
        self._weights = {path: part.weight for path, part in self._modules.items() if "weight" in part}

    def run(self, tokens: Sequence[int], params: Params) -> mx.array:
        """Logits [T, vocab], which may be differentiated."""
        try:
            for path, pair in params.items():
                change = SCALE * (pair["a"] @ pair["b"]).swapaxes(-1, -2)
                for at, part in changes(self._modules, path, change):
                    self._modules[at].weight = self._weights[at] + part
            logits: mx.array = self._model(mx.array([list(tokens)]), cache=make_prompt_cache(self._model))
            return logits[0]
        finally:
            for path, weight in self._weights.items():
                self._modules[path].weight = weight


class Served:
    """The same model with a bank and a KV pool."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        self.layout: AdapterLayout = adapter_layout(self.model)
        self.plan = prepare(self.model, name in COMPATIBLE)
        kept, self.vocab = self.plan.layout, self.plan.vocab_size
        self.bank = AdapterBank(self.layout, 2, 8, kept.dtype)
        install_adapters(self.model, self.bank)
        cache = LoRABatchedKVCache(kept, DeviceMemory(1 << 30), 4096)
        self.runner = BatchRunner(self.model, cache, self.bank, self.plan)
        self.prover = Prover(self.model, self.bank, self.plan, self.runner)

    @property
    def targets(self) -> set[str]:
        """The paths that are compared: all but a tied head, which a merged embedding would not equal."""
        return {spec.path for spec in self.layout if not spec.embedding}

    def adapter(self, seed: int) -> AdapterWeights:
        pairs = random_adapter(self.layout, seed, RANK, {spec.target for spec in self.layout}, scale=SCALE).pairs
        return AdapterWeights({path: pair for path, pair in pairs.items() if path in self.targets})


def errors_served(name: str) -> tuple[float, float, float]:
    """Relative errors of a batch: of the base model, and of a row with each of two adapters and one of the base. Then
    how much an adapter changes."""
    plain, served = Plain(name), Served(name)
    rows = served.prover.rows()
    adapters = [served.adapter(seed) for seed in (1, 2)]
    for slot, weights in enumerate(adapters, 1):
        for _ in served.bank.write(slot, weights):
            pass
    params = [_params(weights) for weights in adapters]
    base = [plain.run(row, {}) for row in rows]
    merged = [plain.run(rows[0], params[0]), plain.run(rows[1], params[1]), base[2]]
    alone, together = served.prover.logits(rows, (0, 0, 0)), served.prover.logits(rows, (1, 2, 0))
    return _worst(alone, base), _worst(together, merged), relative_error(merged[0], base[0])


def error_after_reuse(name: str) -> tuple[int, float]:
    """How many tokens a row has from the prefix cache, and the relative error of those after them."""
    ids, found, got = Served(name).prover.reused()
    return found, relative_error(got, Plain(name).run(ids, {})[found:])


def wrong_requests(name: str, lookahead: bool = True, **switches: Any) -> list[str]:
    """Of 20 random requests, those whose tokens are not the likeliest of mlx-lm's model alone, with what was wrong.

    Three adapters and the base, prompts that begin alike and are computed in chunks, and so little memory that rows
    are preempted. `switches`: of `make_harness`.
    """
    plain, model = Plain(name), build(name)
    harness = make_harness(
        model, budget_tokens=12 * BLOCK_TOKENS, states=12, max_batched_tokens=48, max_rows=6, lookahead=lookahead,
        compatible=name in COMPATIBLE, **switches,
    )  # fmt: skip
    random = np.random.default_rng(0)
    layout, vocabulary = harness.adapters.bank.layout, harness.runner._plan.vocab_size
    targets = {spec.target for spec in layout if spec is not layout.head}
    adapters = [random_adapter(layout, seed, RANK, targets, scale=SCALE) for seed in (1, 2, 3)]
    refs = [harness.publish(str(number), weights) for number, weights in enumerate(adapters)]
    system = [int(token) for token in random.integers(0, vocabulary, 80)]
    asked: list[tuple[list[int], int]] = []
    for number in range(20):
        own = [int(token) for token in random.integers(0, vocabulary, int(random.integers(1, 90)))]
        adapter = int(random.integers(0, 4))
        prompt = own if number % 2 else [*system[: int(random.integers(10, 81))], *own]
        asked.append((prompt, adapter))
        adapted = {"adapter": refs[adapter]} if adapter < 3 else {}
        harness.submit(str(number), prompt, int(random.integers(2, 12)), **adapted)
        for _ in range(int(random.integers(0, 3))):
            harness.loop.step()
    harness.run()
    found = []
    for number, (prompt, adapter) in enumerate(asked):
        if problem := _unlikely(plain, prompt, harness, str(number), _params(adapters[adapter]) if adapter < 3 else {}):
            found.append(f"request {number}, adapter {adapter}: {problem}")
    return found


def _unlikely(plain: Plain, prompt: Sequence[int], harness: Harness, request: str, params: Params) -> str:
    """What is wrong with a request's answer; "" if every token is one of the likeliest, apart from rounding."""
    end = harness.terminal(request)
    if not isinstance(end, RequestFinished):
        return str(end)
    answer = harness.tokens(request)
    logits = plain.run([*prompt, *answer], params)[len(prompt) - 1 : -1].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(answer)[:, None], axis=-1)[:, 0]
    behind: Any = ((logits.max(-1) - chosen) / (logits.max(-1) - logits.mean(-1))).max().item()
    return "" if behind <= _BEHIND else f"a token is {behind:.1e} behind the likeliest one"


def _worst(got: Sequence[mx.array], want: Sequence[mx.array]) -> float:
    return max(relative_error(one, other) for one, other in zip(got, want, strict=True))


def _params(weights: AdapterWeights) -> dict[str, dict[str, mx.array]]:
    return {path: {"a": mx.array(pair.a), "b": mx.array(pair.b)} for path, pair in weights.pairs.items()}


def error_of_gradients(name: str, recomputed: bool) -> tuple[float, list[str]]:
    """The largest relative error of a factor's gradient, and the linears whose gradients are zero although the layout
    does not say so.

    Two rows share their beginning, and a third is alone. The reference differentiates mlx-lm's model with merged
    weights, row by row.
    """
    plain, served = Plain(name), Served(name)
    trainable = TrainableModel(served.model, served.bank, served.plan, lambda *_: recomputed)
    shared = [(5 * at + 3) % served.vocab for at in range(_SHARED)]
    first, second = ([(11 * at + 17 * n + 1) % served.vocab for at in range(size)] for n, size in enumerate(_RESTS))
    alone = [(13 * at + 2) % served.vocab for at in range(_ALONE)]
    padding = _RESTS[0] - _RESTS[1]
    tokens = [*shared, *first, *second, *[0] * padding, *alone]
    branches = [Branch(0, _SHARED, (Bucket(2, _RESTS[0], padding),)), Branch(0, 0, (Bucket(1, _ALONE, 0),))]
    weights = mx.random.normal((len(tokens), served.vocab), key=mx.random.key(9))
    padded = slice(_SHARED + sum(_RESTS), _SHARED + sum(_RESTS) + padding)
    weights[padded] = 0.0
    params = _params(served.adapter(1))

    def packed(params: Params) -> mx.array:
        spans = [Trained(len(tokens), params, SCALE)]
        hidden = trainable.trunk(mx.array(tokens), branches, spans, learns=True).hidden
        return (trainable.logits(hidden, spans) * weights).sum()

    def reference(params: Params) -> mx.array:
        rest, last = _SHARED + _RESTS[0], len(tokens) - _ALONE
        value = (plain.run([*shared, *first], params) * weights[:rest]).sum()
        value += (plain.run([*shared, *second], params)[_SHARED:] * weights[rest : rest + _RESTS[1]]).sum()
        return value + (plain.run(alone, params) * weights[last:]).sum()

    plain._model.train()  # so that mlx-lm uses no kernel without a gradient
    got, want = (_flat(mx.grad(function)(params)) for function in (packed, reference))
    largest = max(mx.linalg.norm(each).item() for each in want.values())
    error = max(
        (mx.linalg.norm(got[path] - each) / (mx.linalg.norm(each) + 1e-3 * largest)).item()
        for path, each in want.items()
    )
    still = {path.rpartition(".")[0] for path, each in want.items() if not mx.abs(each).max().item()}
    return error, sorted(still - {spec.path for spec in served.layout if spec.chooses})


def _flat(gradients: Mapping[str, Any]) -> dict[str, mx.array]:
    flat = {f"{path}.{factor}": array for path, pair in gradients.items() for factor, array in pair.items()}
    mx.eval(flat)
    return flat
