"""How large micro-steps are by default: as memory, and the longest stall of a decode step, allow."""

from __future__ import annotations

import pytest

from mlx_parallm.adapters.weights import LinearSpec
from mlx_parallm.rl.learn.footprint import LARGEST, SMALLEST, Footprint

GB = 1 << 30


def footprint(layers: int, hidden: int, mlp: int, heads: int, vocabulary: int) -> Footprint:
    """A dense model whose query, key and value projections are square."""
    shapes = {"q": (hidden, hidden), "k": (hidden, hidden), "v": (hidden, hidden), "o": (hidden, hidden)}
    shapes |= {"gate": (hidden, mlp), "up": (hidden, mlp), "down": (mlp, hidden)}
    linears = [LinearSpec(f"{at}.{name}", *shape, name) for at in range(layers) for name, shape in shapes.items()]
    return Footprint.of(layers, linears, heads, vocabulary)


SMALL, LARGE = footprint(30, 576, 1536, 9, 49152), footprint(32, 4096, 14336, 32, 128256)


def test_dimensions_are_those_of_one_layer() -> None:
    assert (SMALL.layers, SMALL.hidden) == (30, 576)
    assert SMALL.features == 4 * 2 * 576 + 3 * (576 + 1536)
    assert SMALL.parameters == 4 * 576**2 + 3 * 576 * 1536


def test_memory_grows_with_tokens_context_and_kept_activations() -> None:
    def size(tokens: int, context: int, checkpointed: bool = True) -> int:
        return SMALL.micro_step_bytes(tokens, context, checkpointed)

    base = size(2048, 512)
    assert size(4096, 512) > 1.5 * base
    assert size(8192, 8192) < 5 * size(2048, 2048), "scores are made in blocks"
    assert size(2048, 512, False) > 4 * base
    assert size(512, 1024, False) > size(512, 256, False)


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


def test_a_trained_head_needs_more_memory_the_more_blocks_of_positions_it_has() -> None:
    shapes = [LinearSpec(f"{at}.q", 576, 576, "q") for at in range(2)]
    plain, head = (Footprint.of(2, shapes, 9, 49152, head_rank=rank) for rank in (0, 16))
    more = [head.micro_step_bytes(tokens, 64, True) - plain.micro_step_bytes(tokens, 64, True) for tokens in (256, 512)]
    assert more[1] - more[0] == 4 * 16 * (576 + 49152)
    assert more[0] > 4 * 256 * 49152, "the logits' change, in float32"
