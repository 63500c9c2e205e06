"""How large micro-steps are by default: as memory, and the longest stall of a decode step, allow."""

from __future__ import annotations

import pytest
from family_checks import COMPATIBLE, build
from peaks import GROUPS, Group, Trained

from mlx_parallm.batch.distributions import BLOCK
from mlx_parallm.train.footprint import LARGEST, SMALLEST, Footprint, TrunkMemory

GB, KB = 1 << 30, 1 << 10
LEAST, MOST = 0.5, 1.05
"""Bounds of a measured peak relative to the expected one, which is interpolated between sizes. What is taken is not the
same in each run: when the device frees an array decides which of two peaks there is."""

KINDS = (
    "llama", "gpt_oss", "gemma3n", "gemma4_text", "deepseek_v3", "qwen3_moe", "qwen3_5", "kimi_linear", "mamba2",
    "nemotron_h", "lfm2", "granitemoehybrid",
)  # fmt: skip
"""Attention, windows and sinks, shared keys, latents, experts, the gated delta rule with one decay and with many,
Mamba 2, hybrids, and short convolutions."""
LOOPS = ("mamba", "rwkv7", "recurrent_gemma", "jamba")
"""Kinds that mlx-lm computes token by token, which is slow. What they take differs more from what is expected, because
MLX has thousands of small arrays to free."""
MOST_OF_LOOP = 1.4


def made_up(layers: int, width: int, parameters: int, vocabulary: int) -> Footprint:
    """One whose layers take `width` bytes a token in all."""

    def trunk(tokens: int, _context: int) -> TrunkMemory:
        return TrunkMemory(layers * tokens * 4 * KB, 3 * tokens * width, layers * tokens * width, tokens * width)

    return Footprint(trunk, parameters, 1024, vocabulary)


SMALL, LARGE = made_up(30, 20 * KB, 4_000_000, 49152), made_up(32, 200 * KB, 200_000_000, 128256)


def ratios(name: str) -> dict[tuple[Group, bool], float]:
    """Of each group, with layers computed again and not: the measured peak relative to the expected one."""
    peaks = Trained(build(name), name in COMPATIBLE).peaks(GROUPS)
    return {(each.group, each.checkpointed): round(each.measured / each.expected, 3) for each in peaks}


@pytest.mark.parametrize("name", [KINDS[0], *(pytest.param(name, marks=pytest.mark.ci) for name in KINDS[1:])])
def test_a_micro_step_takes_what_is_expected(name: str) -> None:
    found = ratios(name)
    assert {at: each for at, each in found.items() if not LEAST <= each <= MOST} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_micro_step_of_a_loop_over_tokens_takes_about_what_is_expected(name: str) -> None:
    found = ratios(name)
    assert {at: each for at, each in found.items() if not LEAST <= each <= MOST_OF_LOOP} == {}


def test_segments_are_short_where_their_memory_grows_with_the_square_of_their_tokens() -> None:
    """Jamba's loop keeps all states for each token: with 256 tokens a segment, the tiny model took 2 GB."""
    segments = {name: Trained(build(name)).footprint.segment for name in ("jamba", "mamba2", "qwen3_5")}
    assert segments == {"jamba": 32, "mamba2": 256, "qwen3_5": 256}


def test_memory_grows_with_tokens_context_and_kept_activations() -> None:
    footprint = Trained(build("llama")).footprint

    def size(tokens: int, context: int, checkpointed: bool = True) -> int:
        return footprint.micro_step_bytes(tokens, context, checkpointed)

    assert size(4096, 512) > 1.2 * size(2048, 512)
    assert size(8192, 8192) < 5 * size(2048, 2048), "scores are made in blocks"
    assert size(1024, 256, False) > 1.5 * size(1024, 256)
    assert size(512, 512, False) > size(512, 256, False)
    assert size(300, 100) < size(300, 200) < size(400, 200)


def test_logits_are_padded_unless_the_vocabulary_is_of_whole_blocks() -> None:
    whole, one_more = (made_up(2, KB, 1000, vocabulary) for vocabulary in (8 * BLOCK, 8 * BLOCK + 1))
    sizes = [each.micro_step_bytes(64, 64, True) for each in (whole, one_more)]
    assert sizes[1] - sizes[0] > 64 * 4 * 8 * BLOCK / 2, "a copy of the logits, and not just one column more"


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("cpu", [False, True])
def test_the_choice_keeps_to_memory_and_time(cpu: bool, checkpointed: bool) -> None:
    for model in (SMALL, LARGE):
        for memory in (GB, 4 * GB, 64 * GB):
            tokens = model.micro_batch_tokens(memory, 0.1, cpu, checkpointed)
            assert SMALLEST <= tokens <= LARGEST
            assert tokens & (tokens - 1) == 0
            if tokens > SMALLEST:
                assert model.micro_step_bytes(tokens, tokens, checkpointed) <= memory / 4
                assert model.fits(tokens, tokens, checkpointed, memory)
                assert model.layer_seconds(tokens, cpu) <= 0.05


def test_more_memory_and_longer_stalls_allow_more_and_a_small_machine_gets_the_least() -> None:
    def tokens(model: Footprint, memory: int, stall_s: float, cpu: bool) -> int:
        return model.micro_batch_tokens(memory, stall_s, cpu, checkpointed=True)

    assert tokens(SMALL, 64 * GB, 0.5, True) > tokens(SMALL, 64 * GB, 0.1, True)
    assert tokens(SMALL, 64 * GB, 0.1, False) > tokens(SMALL, 2 * GB, 0.1, False)
    assert tokens(LARGE, 1, 0.1, True) == SMALLEST
