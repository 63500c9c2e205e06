"""How many attention calls a layer makes in one forward pass."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest
from family_checks import Served

from mlx_parallm.batch.attention import AttentionChoice, DenseSpan
from mlx_parallm.batch.block_attention import BlockAttention
from mlx_parallm.batch.forward import GroupPass
from mlx_parallm.batch.spans import Span

LONG, SHORT = 65, 40


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


@pytest.mark.parametrize("dense_rows", [0, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_index_arrays_move_on_with_the_rows_and_are_made_again_for_another_block(
    family: str, dense_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows move too. The logits are those of arrays that are made for each pass."""
    runner, made = Served(family).runner, Counter[str]()
    runner.attention = AttentionChoice(dense_rows)
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
