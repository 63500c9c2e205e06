"""How many attention calls a layer makes in one forward pass."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest
from family_checks import Served
from harness import make_harness

from mlx_parallm.batch.attention import DenseSpan
from mlx_parallm.batch.block_attention import BlockAttention
from mlx_parallm.batch.forward import GroupPass
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.kv.row import KVRow

LONG, SHORT = 65, 40
SIXTEEN = [60 + row for row in range(16)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls in all layers: by pairs of row and block, and dense."""
    counted: Counter[str] = Counter()
    for kind, name in (BlockAttention, "by pairs"), (DenseSpan, "dense"):
        attend = kind.attend

        def counting(self, *args, attend=attend, name=name, **options):
            counted[name] += 1
            return attend(self, *args, **options)

        monkeypatch.setattr(kind, "attend", counting)
    return counted


def computed(runner: BatchRunner, lengths: list[int], tokens: int) -> list[Span[KVRow]]:
    """Rows with so many computed tokens, and spans of their next `tokens`."""
    rows = [runner.cache.open(length + tokens) for length in lengths]
    return [Span(row, length, tokens) for row, length in zip(rows, lengths, strict=True) if row is not None]


@pytest.mark.parametrize(
    ("decoding", "short", "long", "by_pairs", "dense"),
    [
        (SIXTEEN, [], [], 1, 0),
        (SIXTEEN, [0], [], 1, 1),
        (SIXTEEN, [0, 100, 30], [], 2, 0),
        (SIXTEEN, [], [0, 200], 1, 2),
        (SIXTEEN, [0, 100, 30], [0, 200], 2, 2),
        ([], [], [300], 0, 1),
    ],
)
def test_one_for_all_rows_that_decode_one_for_all_short_chunks_and_one_for_each_long_one(
    decoding: list[int], short: list[int], long: list[int], by_pairs: int, dense: int, calls: Counter[str]
) -> None:
    runner = make_harness().runner
    spans = in_order([
        *computed(runner, decoding, 1), *computed(runner, short, SHORT), *computed(runner, long, LONG)
    ])  # fmt: skip
    mx.eval(runner.compute(spans, [5] * sum(span.tokens for span in spans)))
    layers = len(runner.cache.layout.layers)
    assert calls == Counter({"by pairs": by_pairs * layers, "dense": dense * layers})


def test_rows_of_very_different_lengths_attend_in_calls_of_their_own(calls: Counter[str]) -> None:
    """Padding all of them to the longest would cost more than a call."""
    runner = make_harness(max_length=4096).runner
    spans = in_order(computed(runner, [*SIXTEEN, 3000], 1))
    mx.eval(runner.compute(spans, [5] * len(spans)))
    assert calls == Counter({"by pairs": 2 * len(runner.cache.layout.layers)})


def test_few_rows_that_decode_attend_one_by_one_if_their_blocks_lie_side_by_side(calls: Counter[str]) -> None:
    """Their keys are read where they are. Others would have to be copied."""
    runner = make_harness().runner
    runner.dense_rows, layers = 2, len(runner.cache.layout.layers)
    spans = computed(runner, [150, 40], 1)
    mx.eval(runner.compute(spans, [5, 5]))
    assert calls == Counter({"dense": 2 * layers})
    calls.clear()
    apart = spans[1].row
    assert runner.cache.open(10) is not None
    assert runner.cache.extend(apart, 100), "its second block comes after that of the row in between"
    mx.eval(runner.compute([spans[0], Span(apart, 90, 1)], [5, 5]))
    assert calls == Counter({"by pairs": layers})


@pytest.mark.parametrize("dense_rows", [0, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_index_arrays_move_on_with_the_rows_and_are_made_again_for_another_block(
    family: str, dense_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows move too. The logits are those of arrays that are made for each pass."""
    runner, made = Served(family).runner, Counter[str]()
    runner.dense_rows = dense_rows
    rows = [row for length in (100, 120) if (row := runner.cache.open(length + 40)) is not None]
    init = GroupPass.__init__

    def counting(self: GroupPass, *given: object) -> None:
        made["passes"] += 1
        init(self, *given)

    monkeypatch.setattr(GroupPass, "__init__", counting)
    for step in range(40):
        spans, tokens = [Span(row, start + step, 1) for row, start in zip(rows, (100, 120), strict=True)], [step, 7]
        got, before = runner.compute(spans, tokens), made["passes"]
        kept, runner._groups = runner._groups, {}
        want, made["passes"] = runner.compute(spans, tokens), before
        runner._groups = kept
        assert mx.array_equal(got, want)
    at_first, crossing, windows = 1, 2, sum(group.window is not None for group in runner.cache.groups)
    assert made["passes"] <= len(runner.cache.groups) * (at_first + crossing) + 4 * windows
