"""Quantized keys and values: rows equal their solo runs however they are cut, shared, preempted and cached."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from harness import Harness, make_harness
from mlx_lm.models.cache import KVCache
from tiny import save_tiny, tiny_model

from mlx_parallm.app.device import build_runner
from mlx_parallm.batch.spans import Span
from mlx_parallm.config import Config, ServerConfig
from mlx_parallm.core.requests import RequestFinished, SamplingParams
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.disk import HostBlock, block_names, decode, encode, model_key, shapes
from mlx_parallm.kv.host import HostCopies
from mlx_parallm.kv.quantized import pack, unpack
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layer_state import KVLayout, LayerSpec
from mlx_parallm.model.manager import SharedModelManager

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(256) for _ in range(length)] for length in (120, 60, 200, 20)]
TOLERANCE = 0.02
"""Of logprobs, because a key that differs by rounding may be quantized to the next step."""
SCORED = SamplingParams(temperature=0.0, top_logprobs=0)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return tiny_model(request.param, head_dim=32, num_hidden_layers=2, sliding_window=70, sliding_window_pattern=2)


@pytest.fixture(scope="module")
def alone(model: nn.Module) -> list[list[float]]:
    """The logprobs of each prompt's greedy answer, of 8 bits."""
    return [answers(make_harness(model, kv_bits=8), [prompt])[0] for prompt in PROMPTS]


def answers(harness: Harness, prompts: Sequence[Sequence[int]], tokens: int = 10) -> list[list[float]]:
    """The logprobs of greedy answers."""
    harness.submit_all(prompts, tokens, sampling=SCORED)
    harness.run()
    assert all(isinstance(harness.terminal(str(number)), RequestFinished) for number in range(len(prompts)))
    return [logprobs(harness, str(number)) for number in range(len(prompts))]


def logprobs(harness: Harness, request: str, index: int = 0) -> list[float]:
    return [scored.logprob for output in harness.outputs(request, index) for scored in output.logprobs]


def after_each_token(model: nn.Module, tokens: list[int], cuts: Sequence[int], bits: int | None) -> mx.array:
    """Logits [n, vocab] of a row that is computed in chunks that end at `cuts`."""
    runner = make_harness(model, kv_bits=bits).runner
    row = runner.cache.open(len(tokens))
    assert row is not None
    logits = []
    for stop in cuts:
        logits.append(runner.compute([Span(row, row.computed, stop - row.computed)], tokens[row.computed : stop]))
        mx.eval(logits, runner.cache.arrays())
        row.computed = stop
    return mx.concatenate(logits)


# ---- the numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("bits", "size"), [(8, 64), (8, 96), (4, 128), (4, 32)])
def test_a_number_differs_by_about_a_step(bits: int, size: int, dtype: mx.Dtype) -> None:
    numbers = (4 * mx.random.normal((3, 5, size), key=mx.random.key(0))).astype(dtype)
    words = pack(numbers, bits)
    got = unpack(words, bits, size, dtype)
    assert got.dtype == dtype
    step = (numbers.max(-1, keepdims=True) - numbers.min(-1, keepdims=True)).astype(mx.float32) / (2**bits - 1)
    assert mx.all(
        mx.abs(got.astype(mx.float32) - numbers.astype(mx.float32)) <= (2.5 if dtype == mx.bfloat16 else 1.5) * step
    )
    assert words.nbytes <= {8: 0.57, 4: 0.32}[bits] * 2 * numbers.size


def test_a_head_that_groups_do_not_divide_is_refused_by_its_size() -> None:
    with pytest.raises(UnsupportedModelError, match=r"--kv-bits 8 .* groups of 32 .* have 80"):
        KVLayout((LayerSpec(2, 80, 80),), mx.float16).quantized(8)


# ---- rows ------------------------------------------------------------------------------------------


def test_a_model_with_attention_of_its_own_is_refused_by_its_name(tmp_path: Path) -> None:
    save_tiny("gemma2", tmp_path / "small", head_dim=32)
    manager = SharedModelManager(tmp_path / "small", progress=False)
    config = Config(server=ServerConfig(kv_bits=8))
    with pytest.raises(UnsupportedModelError, match=r"--kv-bits 8 .* small \(gemma2\) has its own; leave"):
        build_runner(manager, manager.install_bank(1, 4), config)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_token_attends_to_does_not_depend_on_how_its_row_was_cut(model: nn.Module, bits: int) -> None:
    tokens, full = PROMPTS[2], after_each_token(model, PROMPTS[2], [200], None)
    want = after_each_token(model, tokens, [200], bits)
    for cuts in ([1, 63, 64, 200], [100, 130, 131, 200], [*range(125, 132), 200]):
        assert distance(after_each_token(model, tokens, cuts, bits), want) <= 0.1 * distance(full, want)
    assert distance(full, want) > 0.01, "something is quantized"


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_that_of_the_model_alone_with_rounded_blocks(model: nn.Module, bits: int) -> None:
    """The reference: mlx-lm's caches, whose keys and values are rounded when a block is full."""
    tokens, layers = PROMPTS[2], prepare(model).layout.attention
    full, got = (after_each_token(model, tokens, [200], each) for each in (None, bits))
    caches, want = [KVCache() for _ in layers], []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        want.append(model(mx.array([tokens[start : start + BLOCK_TOKENS]]), cache=caches)[0])
        for cache, spec in zip(caches, layers.values(), strict=True):
            arrays, at = (cache.keys, cache.values), slice(start, cache.offset)
            block = [each[:, :, at] for each in arrays]
            rounded = [_rounded(each, bits) for each in ([mx.concatenate(block, -1)] if spec.latent else block)]
            block = mx.split(rounded[0], [spec.latent], -1) if spec.latent else rounded
            for each, part in zip(arrays, block, strict=True):
                each[:, :, at] = part
    assert distance(got, mx.concatenate(want)) <= 0.1 * distance(got, full)


def _rounded(numbers: mx.array, bits: int) -> mx.array:
    return unpack(pack(numbers, bits), bits, numbers.shape[-1], numbers.dtype)


def distance(one: mx.array, other: mx.array) -> float:
    """The root of the mean square of what logits differ by, after the first block. It is not 0 for equal rows, because
    a key that differs by rounding may be quantized to the next step."""
    return float(mx.sqrt(mx.square(one - other)[BLOCK_TOKENS:].mean()).item())


def test_the_first_64_tokens_are_exact(model: nn.Module) -> None:
    first = after_each_token(model, PROMPTS[2][:64], [30, 64], 4)
    assert mx.allclose(first, after_each_token(model, PROMPTS[2][:64], [30, 64], None), atol=1e-5)


def test_rows_of_a_batch_and_cached_ones_equal_their_solo_runs(model: nn.Module, alone: list[list[float]]) -> None:
    harness = make_harness(model, kv_bits=8)
    for got, want in zip(answers(harness, PROMPTS), alone, strict=True):
        assert_close(got, want)
    harness.answer("again", PROMPTS[2], 10, sampling=SCORED)
    assert harness.loop.stats().prefix_cache_hits_total == 3 * BLOCK_TOKENS
    assert_close(logprobs(harness, "again"), alone[2])


def test_preempted_rows_equal_their_solo_runs(model: nn.Module, alone: list[list[float]]) -> None:
    others = [[7, *prompt] for prompt in PROMPTS]
    for _ in range(6):  # which rows run together depends on the time that units take
        small = make_harness(model, kv_bits=8, budget_tokens=600)
        for got, want in zip(answers(small, [*PROMPTS, *others]), alone, strict=False):
            assert_close(got, want)
        if small.loop.stats().preemptions_total:
            return
    pytest.fail("no row was preempted")


@pytest.mark.parametrize("length", [100, 128, 129])
def test_samples_of_a_prompt_share_it(model: nn.Module, length: int) -> None:
    prompt = PROMPTS[2][:length]
    (want,) = answers(make_harness(model, kv_bits=8), [prompt], 5)
    harness = make_harness(model, kv_bits=8)
    harness.answer("group", prompt, 5, sampling=SCORED, n=3)
    for sample in range(3):
        assert_close(
            [scored.logprob for output in harness.outputs("group", sample) for scored in output.logprobs], want
        )


@pytest.mark.parametrize("by_model", [False, True], ids=["text", "draft model"])
def test_drafts_end_with_their_block(model: nn.Module, by_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts of the next block would have replaced the row's tail. A draft model's own keys stay as they are."""
    monkeypatch.setattr("mlx_parallm.engine.speculate._LEAST_GAIN", 1.0)  # random text gains little
    prompts = [(PROMPTS[1][:9] * 7)[:length] for length in range(50, 64)]
    want = answers(make_harness(model, kv_bits=8, lookahead=False), prompts)
    draft = tiny_model("llama", head_dim=32) if by_model else None
    drafting = make_harness(model, kv_bits=8, lookahead=False, speculates=not by_model, draft=draft)
    for got, expected in zip(answers(drafting, prompts), want, strict=True):
        assert_close(got, expected)
    assert drafting.loop.counters.drafted.total() > 0


def test_quantized_blocks_come_back_from_their_files_to_the_bit(model: nn.Module) -> None:
    cache = (runner := make_harness(model, kv_bits=4).runner).cache
    row, names = computed(runner, PROMPTS[2]), shapes(cache.layout)
    cache.close(row, "root", PROMPTS[2])
    ((node, is_state),) = HostCopies(cache).unsaved(1)
    (name, *_) = block_names(b"", PROMPTS[2])
    arrays = HostCopies(cache).read(node, is_state)
    saved = encode(HostBlock(name, arrays), names)
    assert all(np.array_equal(*each) for each in zip(decode(saved, name.ids, names), arrays, strict=True))
    keys = [model_key("m", replace(cache.layout, bits=bits)) for bits in (None, 8, 4)]
    assert len({*keys}) == 3, "a server with other bits does not take these files"


def computed(runner, tokens: list[int]) -> KVRow:
    row = runner.cache.open(len(tokens))
    assert row is not None
    mx.eval(runner.compute([Span(row, 0, len(tokens))], tokens), runner.cache.arrays())
    row.computed = len(tokens)
    return row


def assert_close(got: Sequence[float], want: Sequence[float]) -> None:
    assert len(got) == len(want)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= TOLERANCE
