"""A decode step launches no more kernels and moves no more bytes on Metal than its record says. No Metal is needed."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import activations

from benchmarks import step
from benchmarks.lib.step.budget import Rates, budget, row_factor
from benchmarks.lib.step.cases import (
    Case,
    as_record,
    by_operation,
    cases,
    counted,
    excess,
    micro_steps,
    read_record,
    whole_steps,
)
from benchmarks.lib.step.compared import counted as compare
from benchmarks.lib.step.counting import Counts, count
from benchmarks.lib.step.decode import Rows
from benchmarks.lib.step.engines import Batch
from benchmarks.lib.step.graph import Kind, placeholder
from benchmarks.lib.step.models import BUNDLED, TINY, parameters
from benchmarks.lib.step.stand_ins import gpu_graphs
from benchmarks.lib.step.training import COMPILED, OURS, TOGETHER

pytestmark = pytest.mark.ci


def counts_of(function, *shapes, kind=Kind.OTHER):
    """The counts of a function of float32 arrays of these shapes."""
    with gpu_graphs() as recorder:
        return count(lambda: lambda: function(*(placeholder(shape, mx.float32, kind) for shape in shapes)), recorder)


# -- the record ----------------------------------------------------------------------------------


def test_a_decode_step_launches_and_moves_no_more_than_its_record_says():
    more = excess(as_record(counted(cases())) | whole_steps(), read_record("") | read_record("engine"))
    assert not more, "\n".join([
        "A decode step costs more on Metal than its record says:",
        *more,
        "`python benchmarks/step.py --only counts operations compared` shows what it launches and moves.",
        "If it has to, record it with `python benchmarks/step.py --record-counts`, and say why in the commit message.",
    ])  # fmt: skip


def test_a_training_micro_step_launches_no_more_than_its_record_says():
    """And at most 1.6 times as many kernels as mlx-lm's own code under `mx.compile`."""
    found = micro_steps()
    assert excess(found, read_record("training")) == []
    for name in (OURS, TOGETHER):
        assert found[f"training: {name}"]["kernels"] <= 1.6 * found[f"training: {COMPILED}"]["kernels"]


def test_two_percent_more_is_allowed_and_three_are_not():
    record = {"a": {"launches": 100, "bytes": 1000}}
    assert excess({"a": {"launches": 102, "bytes": 900}}, record) == []
    assert excess({"a": {"launches": 100, "bytes": 1030}}, record) == ["a: bytes 1,000 → 1,030 (+3.0%)"]
    assert excess({"b": record["a"]}, record) == ["a: only in the record", "b: not in the record"]


def test_counting_twice_gives_the_same():
    case = Case(TINY, Rows.of([70] * 3, adapters=2))
    assert counted([case]) == counted([case])


def test_a_step_of_mlx_lm_takes_18_kernels_a_layer():
    """17 as ours for one row, and one for the offset of its cache. Beside the layers: a lookup, a norm, the head, two
    for logprobs of the whole vocabulary, the argmax, and five for the mask."""
    batch = Batch(1, 100)
    compared = compare(TINY, [batch])[batch]
    assert compared.theirs.kernels == 2 * 18 + 11
    assert compared.theirs.waits == compared.ours.waits == 1
    assert (compared.ours.copies, compared.theirs.copies) == (0, 1)


def test_waiting_twice_and_launching_ahead_are_seen():
    with gpu_graphs() as recorder:
        first, second = placeholder((4,), mx.float32, Kind.OTHER), placeholder((4,), mx.float32, Kind.OTHER)
        mx.async_eval(first)
        mx.async_eval(second)
        mx.eval(first)
        assert (recorder.waits, recorder.ahead) == (1, 1)
        mx.async_eval(first)
        assert recorder.ahead == 2
        mx.synchronize()
        mx.async_eval(first)
        assert (recorder.waits, recorder.ahead) == (2, 2)


# -- models --------------------------------------------------------------------------------------


def test_one_row_of_a_llama_takes_14_kernels_a_layer():
    """Two norms, four products, of which one makes q, k and v, and one gate and up; two rotary embeddings, two writes
    of keys and values, attention, one fused activation and two sums. Beside the layers: a lookup of the embedding
    (dequantized), a norm, the head and the argmax."""
    found = counted([Case(BUNDLED, Rows.of([512]))])
    counts = next(iter(found.values()))
    per_layer = 2 + 4 + 2 + 2 + 1 + 1 + 2
    assert counts.launches == 30 * per_layer + 7
    assert counts.repeated == 0


@pytest.mark.parametrize("rows", [2, 40])
def test_several_rows_take_18_kernels_a_layer(rows):
    """Attention takes five: the queries are multiplied with the keys, the scores are scaled, masked and put in order,
    then normalised, the weights are multiplied with the values, and the products of each row are added up. Once a
    step, index arrays are made."""
    case = Case(BUNDLED, Rows.of([512] * rows))
    made = counted([case])[case].launches - (30 * (13 + 5) + 7)
    assert 0 <= made < 30


def test_the_bytes_of_weights_and_keys_are_those_of_the_shapes():
    case = Case(BUNDLED, Rows.of([512] * 2))
    counts = counted([case])[case]
    parameters = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536
    four_bits_and_group_of_32 = parameters // 2 + parameters // 32 * 2 * 4
    norms = (2 * 30 + 1) * 576 * 4
    assert counts.weights == 30 * four_bits_and_group_of_32 + norms
    whole_blocks = 9 * 64
    assert counts.keys_and_values == 2 * whole_blocks * 30 * 2 * 3 * 64 * 4
    parts = (counts.weights, counts.keys_and_values, counts.head, counts.adapters, counts.sampling, counts.activations)
    assert counts.nbytes == sum(parts)


def test_sampling_and_adapters_are_counted_apart():
    greedy, sampled, adapted = (
        Case(TINY, Rows.of([64] * 4)),
        Case(TINY, Rows.of([64] * 4, sampled=True)),
        Case(TINY, Rows.of([64] * 4, adapters=2)),
    )
    found = counted([greedy, sampled, adapted])
    assert found[greedy].sampling_launches == 1
    assert found[sampled].sampling_launches > 10
    assert found[sampled].launches - found[sampled].sampling_launches == found[greedy].launches - 1
    assert found[greedy].adapters == 0 < found[adapted].adapters
    assert found[adapted].sampling == found[greedy].sampling


def test_operations_add_up_to_the_step():
    case = Case(TINY, Rows.of([64] * 4))
    counts, every = counted([case])[case], by_operation(case)
    assert sum(cost.launches for cost in every.values()) == counts.launches - counts.repeated
    assert sum(cost.nbytes for cost in every.values()) == counts.nbytes
    assert max(cost.read.get(Kind.HEAD, 0) for cost in every.values()) == 263 * 64 * 4


# -- operations ----------------------------------------------------------------------------------


def written(x, update):
    x[mx.array([1, 2])] = update
    return x


def attend(q, k):
    return mx.fast.scaled_dot_product_attention(q, k, k, scale=1.0)


PAIRS = mx.array([0, 3, 3], mx.uint32)
OPERATIONS = {
    "views": (lambda x: x.reshape(8, 4).T[1:3, None], [(4, 8)], 0, 0),
    "a view that no strides describe is copied": (lambda x: x.T.reshape(-1), [(4, 8)], 1, 2 * 4 * 8 * 4),
    "a broadcast input is read once": (lambda x, y: x + y, [(4, 8), (8,)], 1, 4 * (32 + 8 + 32)),
    "equal operations are launched twice": (lambda x, y: [(x @ y).sum(), (x @ y).max()], [(4, 4), (4, 4)], 4, None),
    "a gather reads what it takes": (
        *(lambda table: mx.take(table, mx.array([3, 5], mx.uint32), axis=0), [(1000, 16)]),
        *(1, 4 * (2 * 16 + 2 + 2 * 16)),
    ),
    "a gathered product reads a matrix for each pair": (
        *(lambda x, y: mx.gather_mm(x, y, lhs_indices=PAIRS, rhs_indices=PAIRS), [(9, 1, 8), (9, 8, 16)]),
        *(1, 4 * (3 * 8 + 3 * 8 * 16 + 2 * 3 + 3 * 16)),
    ),
    "a scatter writes only the update": (written, [(1000, 8), (2, 8)], 1, 4 * (2 * 8 + 2 + 2 * 8)),
    "a scatter copies what is read too": (lambda x, y: [x.sum(), written(x, y)], [(1000, 8), (2, 8)], 3, None),
    "a transposed matrix is not copied": (lambda x, y: x @ y.T, [(4, 8), (16, 8)], 1, None),
    "a matrix with gaps is copied": (lambda x, y: x @ y[:, ::2], [(4, 8), (8, 32)], 2, None),
    "a concatenation takes a kernel a part": (lambda x, y: mx.concatenate([x, y, x + 1]), [(4, 8), (2, 8)], 4, None),
    "a norm": (lambda x: mx.fast.rms_norm(x, None, 1e-5), [(4, 8)], 1, None),
    "a rotary embedding": (
        *(lambda x: mx.fast.rope(x, 8, traditional=False, base=1e4, scale=1.0, offset=3), [(1, 4, 2, 8)]),
        *(1, None),
    ),
    "a compiled function": (lambda x: activations.swiglu(x, x), [(4, 8)], 1, None),
    "attention": (attend, [(2, 8, 1, 64), (2, 2, 512, 64)], 1, 4 * (2 * 2 * 8 * 64 + 2 * 2 * 2 * 512 * 64)),
    "attention over many keys": (
        *(attend, [(2, 8, 1, 64), (2, 2, 1024, 64)]),
        *(2, 4 * (2 * 2 * 8 * 64 + 2 * 2 * 2 * 1024 * 64)),
    ),
    "a short sort": (lambda x: mx.argsort(x, -1), [(4, 2048)], 1, None),
    "a long sort": (lambda x: mx.argsort(x, -1), [(4, 4 * 2048)], 1 + 2 * 2 + 1, None),
}
"""A function, the shapes of its arguments, its kernels, and the bytes that it moves if they are asserted."""


@pytest.mark.parametrize(("function", "shapes", "launches", "nbytes"), OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation(function, shapes, launches, nbytes):
    counts = counts_of(function, *shapes)
    assert (counts.launches, counts.nbytes if nbytes is not None else None) == (launches, nbytes)


def test_products_norms_and_sorts_of_a_compiled_function_are_launched_singly():
    def block(x, y):
        return mx.sort(mx.fast.rms_norm(x * 2 + 1, None, 1e-5) @ y, -1) * 3 - 1

    def launches(shape, function):
        return counts_of(lambda x, y: function(x, y), (4, 8), (8, shape)).launches

    assert launches(16, lambda x, y: mx.compile(block)(x, y)) == 2 + 3  # two fusions
    assert launches(16, block) == 4 + 3
    assert launches(4 * 2048, lambda x, y: mx.compile(block)(x, y)) == 2 + 3 + 5


def test_nothing_is_changed_after_counting():
    device, activation = mx.default_device(), activations.swiglu
    counts_of(lambda x: x + 1, (2, 2))
    assert mx.default_device() == device
    assert activations.swiglu is activation
    assert mx.fast.rms_norm(mx.ones((2, 4)), None, 1e-5).tolist()[0][0] == pytest.approx(1.0, rel=1e-3)


# -- the arithmetic for a Mac --------------------------------------------------------------------


def test_the_budget_is_bytes_at_the_bandwidth_plus_launches():
    counts = Counts(
        launches=1000,
        repeated=0,
        sampling_launches=0,
        nbytes=0,
        weights=4_368_000_000,
        keys_and_values=436_800_000,
        head=0,
        adapters=0,
        sampling=0,
        activations=0,
    )
    alone = budget(counts, rows=1)
    assert (alone.weights, alone.keys_and_values, alone.products) == pytest.approx((10.0, 1.0, 0.0))
    assert alone.launches == pytest.approx(2.75)
    assert alone.total == pytest.approx(13.75)
    assert budget(counts, rows=32).products == pytest.approx(35.0)


def test_quantized_products_take_longer_by_tiles_of_32_rows():
    assert [row_factor(rows) for rows in (1, 2, 10, 32, 33, 64, 65)] == [1.0, 1.0, 4.5, 4.5, 9.0, 9.0, 13.5]
    assert row_factor(4) < row_factor(6) < row_factor(8)


@pytest.mark.parametrize(("slower", "status"), [(1.0, 0), (1.5, 1)])
def test_a_report_is_compared_with_the_arithmetic_of_its_own_rates(
    slower: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Rates(4e11, 3e-6, tuple((rows, 1 + 0.1 * rows) for rows in (1, 2, 4, 8, 16, 32)))
    rows = (1, 16)
    found = counted(Case(BUNDLED, Rows.of([64] * count)) for count in rows)
    taken = [slower * budget(counts, count, rates).total for counts, count in zip(found.values(), rows, strict=True)]
    facts = {"read_bytes_per_s": rates.bandwidth, "launch_s": rates.launch, "products_s": dict(rates.products)}
    figures = [
        {"name": f"{count} row{'s' if count > 1 else ''}, base", "ours": 1e3 * count / milliseconds}
        for count, milliseconds in zip(rows, taken, strict=True)
    ]
    report = {
        "machine": {"backend": "metal"},
        "model": {"parameters": parameters(BUNDLED)},
        "setting": {"context": 64, "rows": rows},
        "sections": {"device": {"facts": facts}, "decode": {"figures": figures}},
    }
    (file := tmp_path / "report.json").write_text(json.dumps(report))
    monkeypatch.setattr("sys.argv", ["step.py", "--beside", str(file)])
    assert step.main() == status
    with pytest.raises(ValueError, match="is of a CPU"):
        Rates.of_report(report | {"machine": {"backend": "cpu"}})
