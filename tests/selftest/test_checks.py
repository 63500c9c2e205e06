"""The checks of the self-test pass on this machine, and each sees a fault of the path that it is for."""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import mlx.core as mx
import pytest

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch import forward
from mlx_parallm.batch.distributions import Filters
from mlx_parallm.kv.arena import Arena
from mlx_parallm.selftest.check import Check, CheckResult, Outcome
from mlx_parallm.selftest.checks import CHECKS
from mlx_parallm.selftest.limits import Limit, Rounding
from mlx_parallm.selftest.models import tiny_models
from mlx_parallm.selftest.run import run_checks
from mlx_parallm.selftest.tested import TestedModel, opened
from mlx_parallm.train.losses import UpdateTotals

pytestmark = pytest.mark.ci

NAMES = [check.name for check in CHECKS]


@dataclass
class Loaded:
    """A tiny 4-bit model in the engine and beside it, and the event loop on which it is asked."""

    model: TestedModel
    runner: asyncio.Runner

    def check(self, *names: str) -> dict[str, CheckResult]:
        """The results of the checks of these names; of all, without names."""
        chosen = [check for check in CHECKS if not names or check.name in names]
        return {result.check.name: result for result in self.runner.run(run_checks(self.model, chosen))}


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("models")
    (choice,) = [each for each in tiny_models(folder) if "4-bit" in each.name]
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        model = runner.run(stack.enter_async_context(opened(choice.name, choice.path, folder / "run")))
        yield Loaded(model, runner)
        runner.run(stack.aclose())


def test_all_pass(tested: Loaded) -> None:
    results = tested.check()
    assert {name: result.problem for name, result in results.items()} == dict.fromkeys(NAMES, "")
    for result in results.values():
        assert result.outcome.difference <= result.outcome.limit.value


def slots_off_by_one(patch: pytest.MonkeyPatch) -> None:
    original = AdapterBank.forward

    def shifted(bank: AdapterBank, slots, lengths):
        return original(bank, [slot and slot % 3 + 1 for slot in slots], lengths)

    patch.setattr(AdapterBank, "forward", shifted)


def last_token_unseen_after_a_block(patch: pytest.MonkeyPatch) -> None:
    """The attention of single tokens ends one token early, in rows that have a second block."""
    original = forward.seen_blocks

    def shortened(span, table, window):
        seen = original(span, table, window)
        return replace(seen, start=seen.start - 1) if span.tokens == 1 and span.start >= 64 else seen

    patch.setattr(forward, "seen_blocks", shortened)


def filters_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Filters, "apply", lambda filters, weights: weights)


def gradients_halved(patch: pytest.MonkeyPatch) -> None:
    original = UpdateTotals.of
    doubled = classmethod(lambda cls, samples: replace(original(samples), sequences=2 * len(samples)))
    patch.setattr(UpdateTotals, "of", doubled)


@pytest.mark.parametrize(
    ("fault", "seen_by", "not_seen_by", "advice"),
    [
        (slots_off_by_one, "mixed adapters", "batched decode", "Serve the base model only"),
        (last_token_unseen_after_a_block, "batched decode", "quantized weights", "--max-batch-size 1"),
        (filters_ignored, "sampling filters", "sampling seeds", "sample with temperature 0"),
        (gradients_halved, "training gradients", "training logprobs", "Do not train on this device"),
    ],
)
def test_a_broken_path_is_seen(
    tested: Loaded,
    fault: Callable[[pytest.MonkeyPatch], None],
    seen_by: str,
    not_seen_by: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    results = tested.check(seen_by, not_seen_by)
    assert results[not_seen_by].passed
    failed = results[seen_by]
    assert not failed.passed
    assert "is above the limit" in failed.problem
    assert advice in failed.as_json()["advice"]
    monkeypatch.undo()
    assert tested.check(seen_by)[seen_by].passed


def test_steps_that_copy_the_pool_are_seen(tested: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Arena.write

    def held_while_written(arena: Arena, layer: int, *tokens: mx.array) -> None:
        keys = mx.array(arena.keys[layer])
        write(arena, layer, *tokens)
        mx.eval(arena.keys[layer])
        del keys

    monkeypatch.setattr(Arena, "write", held_while_written)
    (failed,) = tested.check("memory of steps").values()
    assert "a step copies the KV pool" in failed.problem
    found = failed.as_json()
    assert "debug.lookahead" in found["advice"]
    assert found["figures"]["apart_bytes"] > found["figures"]["array_bytes"] / 2


def test_an_error_fails_its_own_check_only(tested: Loaded) -> None:
    async def raises(model: TestedModel) -> Outcome:
        raise RuntimeError("[metal::malloc] no memory")

    broken = Check("broken", "nothing", "Look here.", raises)
    first, second = tested.runner.run(run_checks(tested.model, [broken, CHECKS[0]]))
    assert first.problem == "it ended with an error: RuntimeError: [metal::malloc] no memory"
    assert first.as_json()["limit"] is None
    assert second.passed


# -- outcomes and limits -------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [math.nan, math.inf, 2e-5])
def test_what_is_no_small_number_fails(difference: float) -> None:
    check = Check("one", "two things", "Do this.", None)
    result = CheckResult(check, Outcome.of([1e-6, difference, 0.0], Limit(1e-5, "the tests")))
    assert not result.passed
    json.dumps(result.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("parameters", "measured", "limit", "source"),
    [
        (10**5, 1e-6, 1e-5, "1e-05 for a tiny model"),
        (10**8, 1e-6, 1e-4, "0.0001 for a model of this size"),
        (10**8, 0.02, 0.08, "4 times the rounding of mlx-lm's own forward pass on this device, 0.02"),
    ],
)
def test_limits_follow_the_device_where_it_rounds_more(
    parameters: int, measured: float, limit: float, source: str
) -> None:
    found = Rounding(measured, measured, parameters, float32=False).of_logprobs
    assert found.value == pytest.approx(limit)
    assert source in found.source


def test_the_limit_of_gradients_follows_products_in_tf32() -> None:
    in_tf32 = Rounding(logprobs=1e-3, gradients=2e-6, parameters=10**5, float32=True)
    assert in_tf32.of_gradients.value == pytest.approx(4e-3)
    in_16_bits = Rounding(logprobs=0.05, gradients=0.01, parameters=10**5, float32=False)
    assert in_16_bits.of_gradients.value == pytest.approx(0.04)
