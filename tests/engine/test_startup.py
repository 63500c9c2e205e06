"""What is measured before the server takes requests."""

from __future__ import annotations

import math
import threading
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from harness import Harness, make_harness
from tiny import FAMILIES, VOCAB_SIZE, tiny_model

from mlx_parallm.batch.attention import AttentionChoice
from mlx_parallm.batch.attention_times import AttentionTimes
from mlx_parallm.batch.spans import Span
from mlx_parallm.config import Attention
from mlx_parallm.engine import startup
from mlx_parallm.engine.budget import Chunk, CostModel
from mlx_parallm.engine.startup import calibrate, calibrate_steps, choose_attention, prove
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import ConfigError, EngineDeadError
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model import families
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.families import Finding, family_of


def test_every_term_is_measured_and_no_row_is_left() -> None:
    runner = make_harness().runner
    cost = calibrate(runner)
    assert min(cost.fixed, cost.per_token) > 0
    assert min(cost.per_sample, cost.per_pair) >= 0
    assert not list(runner.cache.rows)
    runner.cache.check_integrity()


def test_kernels_that_are_compiled_at_first_use_do_not_count_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit takes a millisecond here, and 4 s more if no unit before had as many tokens and as long a context: on an
    H100, MLX compiles a kernel in 3 to 5 s. Terms that are measured so stay wrong for as long as a server runs."""
    known = set[tuple[tuple[int, ...], int, int]]()

    def seconds(runner: object, check: object, chunks: list[int], context: int, samples: int = 0) -> float:
        shape = (tuple(chunks), context, tuple(samples))
        compiled = 0.0 if shape in known else 4.0
        known.add(shape)
        return 1e-3 + compiled

    monkeypatch.setattr("mlx_parallm.engine.startup._seconds", seconds)
    monkeypatch.setattr("mlx_parallm.engine.startup.on_cpu", lambda: False)
    runner = make_harness().runner
    cost = calibrate_steps(runner, calibrate(runner))
    assert cost.seconds([Chunk(512, 1024)], samples=1) < 0.01
    assert cost.step_seconds(8) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_with_versions_that_were_not_tried_tested_families_are_checked_too(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(families, "TRIED", {"mlx": ("0.1", "0.2"), "mlx-lm": families.TRIED["mlx-lm"]})
    compared: list[Finding] = []
    for name in ("batch", "adapters"):
        check = getattr(startup.Prover, name)
        monkeypatch.setattr(
            startup.Prover, name, lambda prover, check=check: compared.append(check(prover)) or compared[-1]
        )
    model = tiny_model(family)
    bank, card = make_harness(model).runner._bank, SimpleNamespace(vocab_size=VOCAB_SIZE)
    manager: Any = SimpleNamespace(model=model, family=family_of(model), plan=prepare(model), card=card, bank=bank)
    prove(manager, bank)
    assert [each.problem for each in compared] == ["", ""]
    assert caplog.messages[0].startswith(f"mlx {metadata.version('mlx')} was not tried")
    monkeypatch.undo()
    assert families.untried_packages() == ()


def test_a_pool_without_memory_for_all_rows_is_measured_nevertheless() -> None:
    runner = make_harness(budget_tokens=128, max_length=2048).runner
    assert calibrate(runner).fixed > 0
    assert not list(runner.cache.rows)


def test_the_choice_of_attention_does_not_change_the_logits() -> None:
    harness = make_harness()
    runner = harness.runner
    choose_attention(runner, Attention.AUTO, prover_of(harness))
    assert runner.attention == AttentionChoice(1)
    spans = [Span(opened(runner.cache.open(70 + row)), 60 + row, 1) for row in range(4)]
    logits = []
    for dense_rows in (0, 4, math.inf):
        runner.attention = AttentionChoice(dense_rows)
        logits.append(runner.compute(spans, [5, 6, 7, 8]))
    assert mx.allclose(logits[0], logits[1], atol=1e-5)
    assert mx.allclose(logits[0], logits[2], atol=1e-5)


def test_a_cpu_has_no_kernel() -> None:
    harness = make_harness()
    with pytest.raises(ConfigError, match="--attention kernel cannot be used: MLX computes on the CPU; leave it out"):
        choose_attention(harness.runner, Attention.KERNEL, prover_of(harness))


AGREES, DIFFERS = 1e-5, 1e-1


@pytest.mark.parametrize(
    ("wanted", "proved", "milliseconds", "difference", "chosen"),
    [
        (Attention.AUTO, True, 1.0, AGREES, True),
        (Attention.AUTO, False, 1.0, AGREES, False),
        (Attention.AUTO, True, 3.0, AGREES, False),
        (Attention.AUTO, True, 1.0, DIFFERS, False),
        (Attention.AUTO, True, RuntimeError, AGREES, False),
        (Attention.AUTO, True, ValueError, AGREES, False),
        (Attention.PLAIN, True, 1.0, AGREES, False),
        (Attention.KERNEL, False, 3.0, AGREES, True),
        (Attention.KERNEL, True, 1.0, DIFFERS, None),
        (Attention.KERNEL, True, RuntimeError, AGREES, None),
    ],
)
def test_a_gpu_uses_the_kernel_where_it_is_proved(
    wanted: Attention,
    proved: bool,
    milliseconds: float | type[Exception],
    difference: float,
    chosen: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`milliseconds`: of the kernel, where attention by blocks takes 2; or how MLX refuses it. `chosen`: None if
    the server does not start."""

    def measured(spec: object, dtype: object, kernel: bool) -> AttentionTimes:
        if kernel and not isinstance(milliseconds, float):
            raise milliseconds("the compiler refuses it")
        batches = [(1, 500), (4, 500), (16, 500), (16, 4000)]
        columns = (dict.fromkeys(batches, each) for each in (9.0, 2.0))
        kernels = dict.fromkeys(batches, milliseconds) if kernel and isinstance(milliseconds, float) else {}
        return AttentionTimes(*columns, kernels, difference, 1e-3)

    for name, value in {"on_cpu": False, "obstacle": None, "is_proved": proved}.items():
        monkeypatch.setattr(startup, name, lambda *_, value=value: value)
    monkeypatch.setattr("mlx_parallm.batch.attention_times.measure_attention", measured)
    monkeypatch.setattr(startup.Prover, "batch", lambda _: Finding("batch", 0.0))
    harness = make_harness()
    if chosen is None:
        with pytest.raises(ConfigError, match="does not compute what attention without it does"):
            choose_attention(harness.runner, wanted, prover_of(harness))
    else:
        choose_attention(harness.runner, wanted, prover_of(harness))
        assert harness.runner.attention == AttentionChoice(0, chosen)


def test_a_kernel_that_fails_with_the_model_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batches = dict.fromkeys([(1, 500), (16, 500), (16, 4000)], 2.0)
    times = AttentionTimes(batches, batches, dict.fromkeys(batches, 1.0))
    for name, value in {"on_cpu": False, "obstacle": None, "is_proved": True, "attention_times": (times, "")}.items():
        monkeypatch.setattr(startup, name, lambda *_, value=value: value)
    monkeypatch.setattr(startup.Prover, "batch", lambda _: Finding("batch", 0.3, "results differ by 0.3"))
    harness = make_harness()
    choose_attention(harness.runner, Attention.AUTO, prover_of(harness))
    assert not harness.runner.attention.kernel
    assert "attention does not use its kernel: results differ by 0.3" in caplog.text


@pytest.mark.parametrize("row", [0, 1, 2])
def test_logits_of_any_row_that_are_no_numbers_are_found(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = startup.Prover.logits

    def broken(self: startup.Prover, *arguments: Any) -> list[mx.array]:
        found = right(self, *arguments)
        found[row] = found[row] * math.nan
        return found

    prover = prover_of(make_harness())
    assert not prover.batch().problem
    monkeypatch.setattr(startup.Prover, "logits", broken)
    assert prover.batch().problem


def prover_of(harness: Harness) -> startup.Prover:
    model = tiny_model("llama")
    return startup.Prover(model, harness.runner._bank, prepare(model), harness.runner)


def opened(row: KVRow | None) -> KVRow:
    assert row is not None
    return row


def test_units_of_a_few_tokens_are_timed_for_drafts() -> None:
    cost = calibrate_steps(make_harness().runner, CostModel())
    tokens, seconds = zip(*cost.steps, strict=True)
    assert tokens == (1, 2, 4, 8, 16, 32)
    assert seconds[0] > 0
    assert list(seconds) == sorted(seconds)
    assert cost.uneven >= 0.0


def test_on_a_gpu_more_rows_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "on_cpu", lambda: False)
    runner = make_harness(tiny_model("qwen3_next")).runner
    assert [tokens for tokens, _ in calibrate_steps(runner, CostModel()).steps] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_measuring_ends_when_the_engine_is_stopped_and_leaves_no_row(after: int) -> None:
    """On a busy machine it takes minutes, and Ctrl-C must not wait for it."""
    runner, stopped = make_harness().runner, threading.Event()
    processor = ContinuousBatchProcessor(lambda: pytest.fail("not started"))
    units = 0

    def check() -> None:
        nonlocal units
        if units == after:
            processor.stop()
            stopped.set()
        units += 1
        processor.raise_if_stopped()

    with pytest.raises(EngineDeadError, match="stopped while it started"):
        calibrate_steps(runner, calibrate(runner, check) if after < 5 else CostModel(), check)
    assert (stopped.is_set(), units) == (True, after + 1)
    assert not list(runner.cache.rows)
