"""Attention in a kernel: its text runs here on a shim, thread by thread, and is compared with dense attention."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batch.gpu_shim import HostKernel, KernelError, needs_compiler
from family_checks import CONFIGURATIONS, random_model
from harness import Harness, make_harness, tokens_in

from mlx_parallm.batch import paged_attention
from mlx_parallm.batch.attention import AttentionChoice, DenseSpan
from mlx_parallm.batch.block_attention import BlockAttention
from mlx_parallm.batch.paged_attention import MOST_TOKENS, PagedAttention, obstacle
from mlx_parallm.batch.spans import SeenBlocks, Span, in_order
from mlx_parallm.engine.startup import Prover
from mlx_parallm.kv.blocks import BLOCK_TOKENS, blocks_for
from mlx_parallm.kv.prefix import first_visible
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layer_state import KVLayout, LayerSpec

pytestmark = needs_compiler

TOLERANCES = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}
QUICK, ALL = 20, 200
SPEC = LayerSpec(2, 64, 64)


@dataclass
class Case:
    """Sequences with their blocks in a pool, whose other places have NaN."""

    rows: list[SeenBlocks]
    window: int | None
    keys: mx.array
    values: mx.array
    queries: mx.array
    sinks: mx.array | None

    def attend(self, seed: int = 0, broken: tuple[str, str, str] | None = None) -> mx.array:
        """In the kernel, whose threads run in an order that `seed` decides. `broken`: a kernel, and what is replaced by
        what in its text."""

        def kernel(name: str, *_: object) -> HostKernel:
            return HostKernel(name, seed, broken[1:] if broken and broken[0] == name else None)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged_attention, "kernel", kernel)
            attention = PagedAttention(self.rows, self.window)
            return attention.attend(self.keys, self.values, self.queries, self.scale, self.sinks)

    @property
    def scale(self) -> float:
        return float(self.queries.shape[-1] ** -0.5)

    def expected(self) -> mx.array:
        """Of dense attention, in float32."""
        keys, values, queries = (array.astype(mx.float32) for array in (self.keys, self.values, self.queries))
        found, start = [], 0
        for row in self.rows:
            own = queries[start : start + row.tokens]
            found.append(DenseSpan(row, self.window).attend(keys, values, own, self.scale, self.sinks))
            start += row.tokens
        return mx.concatenate(found)

    def error(self, outputs: mx.array) -> float:
        """The largest difference. Infinite if an output is no number."""
        difference = float(mx.abs(outputs.astype(mx.float32) - self.expected()).max().item())
        return difference if difference == difference else float("inf")


def case(
    lengths: list[tuple[int, int]],
    spec: LayerSpec = SPEC,
    group: int = 3,
    dtype: mx.Dtype = mx.float32,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    """`lengths`: of each sequence, the tokens before, and the new ones."""
    numbers = np.random.default_rng(seed)
    counts = [blocks_for(start + tokens) for start, tokens in lengths]
    total = sum(counts) + 2
    free = numbers.permutation(total).tolist()
    keys, values = (
        numbers.normal(size=(spec.kv_heads, total, BLOCK_TOKENS, width)).astype(np.float32)
        for width in (spec.head_dim_k, spec.head_dim_v)
    )
    rows, written = [], np.zeros((total, BLOCK_TOKENS), bool)
    for (start, tokens), count in zip(lengths, counts, strict=True):
        table = [free.pop() for _ in range(count)]
        for position in range(start + tokens):
            written[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = True
        first = first_visible(start, spec.window)
        rows.append(SeenBlocks(table[first:], first * BLOCK_TOKENS, start, tokens))
    for array in keys, values:
        array[:, ~written] = np.nan
    heads = spec.kv_heads * group
    queries = 2 * numbers.normal(size=(sum(tokens for _, tokens in lengths), heads, 1, spec.head_dim_k))
    return Case(
        rows,
        spec.window,
        mx.array(keys).astype(dtype),
        mx.array(values).astype(dtype),
        mx.array(queries.astype(np.float32)).astype(dtype),
        mx.array(numbers.normal(size=heads).astype(np.float32)) if sinks else None,
    )


def random_case(seed: int) -> Case:
    choose = random.Random(seed)
    width_k, width_v = choose.choice([(32, 32), (64, 64), (128, 128), (96, 64), (64, 128), (256, 256)])
    group = choose.choice([1, 2, 3, 4, 6, 12])
    window = choose.choice([None, None, 1, 40, 64, 130])
    most = choose.choice([1, 1, 5, MOST_TOKENS])
    longest = choose.choice([70, 200, 1200])
    rows = choose.randint(1, 4)
    lengths = [(choose.randrange(longest // rows), choose.randint(1, most)) for _ in range(rows)]
    spec = LayerSpec(choose.choice([1, 2]), width_k, width_v, window)
    return case(lengths, spec, group, choose.choice(list(TOLERANCES)), choose.random() < 0.3, seed)


def check_random(seed: int) -> None:
    one = random_case(seed)
    outputs = one.attend(seed=1)
    assert outputs.shape == (*one.queries.shape[:2], 1, one.values.shape[-1])
    assert one.error(outputs) < TOLERANCES[outputs.dtype]
    assert mx.array_equal(outputs, one.attend(seed=2)), "it depends on the order of the threads"


@pytest.mark.parametrize("seed", range(0, QUICK, 10))
def test_any_shape_gives_what_dense_attention_gives_in_any_order_of_threads(seed: int) -> None:
    for number in range(seed, seed + 10):
        check_random(number)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_200_shapes() -> None:
    for number in range(QUICK, ALL):
        check_random(number)


DECODING, SPLIT, DRAFTS = [(70, 1), (129, 1)], [(900, 1), (3, 1)], [(100, 5), (60, 8)]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kernel", "text", "instead", "lengths"),
    [
        pytest.param("attend", "BARRIER();", "", DECODING, id="a missing barrier"),
        pytest.param("attend", "last + 1 - first", "last - first", DECODING, id="one token too few"),
        pytest.param("attend", "b < held", "b < held - 1", DECODING, id="the last block is not read"),
        pytest.param("attend", "blocks[at + b]", "blocks[at + b] + 1", DECODING, id="another block"),
        pytest.param("attend", "blocks[at + b])", "blocks[at + b] + 1000)", DECODING, id="beyond the pool"),
        pytest.param("attend", "t < to;", "t < to - lane / 31;", DECODING, id="threads that part"),
        pytest.param("attend", "&& first + t > own - window", "", DRAFTS, id="beyond the window"),
        pytest.param("attend", "first + t <= own &&", "", DRAFTS, id="a draft that sees its next token"),
        pytest.param("attend", "highest + LOG(sum)", "LOG(sum)", SPLIT, id="a part of a wrong size"),
        pytest.param("merge", "sum += weight", "sum += 1", SPLIT, id="parts that are not weighted"),
    ],
)
def test_a_mistake_in_a_kernel_is_found(kernel: str, text: str, instead: str, lengths: list[tuple[int, int]]) -> None:
    spec = LayerSpec(2, 64, 64, 50 if "window" in text else None)
    one = case(lengths, spec, group=2)
    right = one.attend(seed=1)
    assert one.error(right) < TOLERANCES[mx.float32]
    try:
        broken = [one.attend(seed, (kernel, text, instead)) for seed in (1, 2)]
    except KernelError:
        return
    assert any(one.error(outputs) > 1e-3 for outputs in broken)


@pytest.mark.parametrize("lengths", [DECODING, SPLIT], ids=["one part", "several parts"])
def test_the_next_tokens_need_no_new_arrays(lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "kernel", lambda name, *_: HostKernel(name))
    later = case([(start + 3, tokens) for start, tokens in lengths], LayerSpec(2, 64, 64, 100))
    rows = [SeenBlocks(row.block_ids, row.first, row.start - 3, row.tokens) for row in later.rows]
    attention = PagedAttention(rows, later.window)
    attention.attend(later.keys, later.values, later.queries, later.scale)
    for _ in range(3):
        attention.advance()
    assert later.error(attention.attend(later.keys, later.values, later.queries, later.scale)) < 1e-5


def test_metal_gets_the_arrays_that_the_text_names(tmp_path: Any) -> None:
    """MLX makes the signature of the function when a graph is exported, on any machine."""
    one, file = case(SPLIT, sinks=True), str(tmp_path / "graph.mlxfn")

    def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return PagedAttention(one.rows, None).attend(keys, values, queries, one.scale, one.sinks)

    paged_attention.kernel.cache_clear()
    mx.export_function(file, attend, one.queries, one.keys, one.values)
    text = (tmp_path / "graph.mlxfn").read_bytes().decode(errors="replace")
    for argument in ("const device float* queries", "const device int32_t* parts", "const device int32_t* starts"):
        assert argument in text
    assert text.count("uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]") == 2
    assert text.count("const device int32_t* owners") == 1


# ---- in a model ------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "gemma3_text": {"sliding_window": 40, "sliding_window_pattern": 2, "num_hidden_layers": 2},
    "gpt_oss": {"sliding_window": 40},
}


def model_of(family: str) -> nn.Module:
    return random_model(CONFIGURATIONS[family] | {"head_dim": 32} | FAMILIES[family])


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Lets models use the kernel, and counts its calls and those of products of several rows."""
    counted: Counter[str] = Counter()

    def kernel(name: str, *_: object) -> HostKernel:
        counted[name] += 1
        return HostKernel(name)

    monkeypatch.setattr(paged_attention, "kernel", kernel)
    attend = BlockAttention.attend

    def counting(self: BlockAttention, *arguments: Any) -> mx.array:
        counted["by blocks"] += 1
        return attend(self, *arguments)

    monkeypatch.setattr(BlockAttention, "attend", counting)
    return counted


def harness_of(family: str, **options: Any) -> Harness:
    harness = make_harness(model_of(family), **options)
    harness.runner.attention = AttentionChoice(kernel=True)
    return harness


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_windows_and_sinks_gives_in_a_batch_what_it_gives_alone(family: str, parts: Counter[str]) -> None:
    """Single tokens, a short chunk beside them, adapters, and sequences that are longer than a window."""
    model = model_of(family)
    harness = make_harness(model)
    harness.runner.attention = AttentionChoice(kernel=True)
    prover = Prover(model, harness.runner._bank, prepare(model), harness.runner)
    assert prover.batch(beyond_windows=True).problem == ""
    assert prover.adapters().problem == ""
    assert parts["attend"] > 0


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}, {"speculates": True}], ids=str)
def test_answers_are_those_of_plain_attention(options: dict[str, Any], parts: Counter[str]) -> None:
    """Of several sequences that share a prompt, with drafts of what is repeated, and of quantized blocks."""
    answers = []
    for kernel in False, True:
        harness = harness_of("llama", **options)
        harness.runner.attention = AttentionChoice(kernel=kernel)
        harness.submit_all(([*range(20, 90), *([5, 6, 7] * number), 5, 6] for number in range(3)), 12)
        harness.run()
        answers.append([tokens_in(event for name, event in harness.events if name == str(n)) for n in range(3)])
    assert answers[0] == answers[1]
    assert parts["attend"] > 0


def test_chunks_of_prompts_are_products_of_matrices(parts: Counter[str]) -> None:
    runner = harness_of("llama").runner
    rows = [runner.cache.open(length) for length in (40, 50)]
    spans = [Span(row, 0, tokens) for row, tokens in zip(rows, (40, 50), strict=True) if row is not None]
    mx.eval(runner.compute(in_order(spans), [5] * 90))
    assert set(parts) == {"by blocks"}


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((LayerSpec(2, 64, 64),), None),
        ((LayerSpec(2, 64, 64, window=9), LayerSpec(1, 512, 512)), None),
        ((LayerSpec(2, 80, 80),), "80 numbers"),
        ((LayerSpec(2, 64, 64), LayerSpec(2, 1024, 64)), "1024 numbers"),
        ((LayerSpec(1, 576, 0, latent=512),), "latent"),
        ((), "no attention"),
    ],
)
def test_what_keeps_a_model_from_it_is_said(
    layers: tuple[LayerSpec, ...], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout(layers, mx.bfloat16)
    assert "CPU" in (obstacle(layout) or "")
    monkeypatch.setattr(paged_attention, "on_cpu", lambda: False)
    found = obstacle(layout)
    assert found is None if why is None else why in (found or "")
