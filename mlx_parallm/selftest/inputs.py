"""What the checks ask: random tokens, random adapters, and answers to train on. The same seed gives the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.selftest.plain import Answered

RANK, SCALE = 8, 2.0
"""Of the adapters."""
_SIZE = 0.25
"""How much an adapter changes what its linears give, relative to that."""


def random_tokens(vocab_size: int, length: int, seed: int) -> list[int]:
    """`length` token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, length)]


def targets_of(layout: AdapterLayout) -> tuple[str, ...]:
    """The names of the linears that the adapters change: the first two of a layer, and the last one."""
    names = list(dict.fromkeys(spec.target for spec in _plain(layout)))
    return tuple(dict.fromkeys([*names[:2], *names[-1:]]))


def _plain(layout: AdapterLayout) -> list[LinearSpec]:
    """The linears of the layers, without experts and routers. Adapters of experts would take much memory; a router that
    is rounded otherwise may choose other experts."""
    return [spec for spec in layout.linears.values() if not spec.experts and not spec.chooses]


def random_adapter(layout: AdapterLayout, seed: int, rank: int = RANK, everywhere: bool = False) -> AdapterWeights:
    """An adapter whose numbers are the same in float32 and bfloat16, so that no format rounds them.

    Args:
        everywhere: it changes all linears of a layer except experts and routers, and not only `targets_of`.
    """
    random, targets, pairs = np.random.default_rng(seed), targets_of(layout), {}
    for spec in _plain(layout):
        if everywhere or spec.target in targets:
            a = random.normal(size=(spec.in_features, rank)) / np.sqrt(spec.in_features)
            b = random.normal(size=(rank, spec.out_features)) * _SIZE / np.sqrt(rank) / SCALE
            pairs[spec.path] = LoRAPair(_in_bfloat16(a), _in_bfloat16(b), SCALE)
    return AdapterWeights(pairs)


def _in_bfloat16(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The values without the bits that bfloat16 lacks, as float32."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def answers(vocab_size: int, lengths: Sequence[int], seed: int, shared_prompt: int = 0) -> list[Answered]:
    """Answers of these lengths, with advantages of both signs.

    Args:
        shared_prompt: all of them have one prompt of so many tokens; 0: each has one of its own.
    """
    common = tuple(random_tokens(vocab_size, shared_prompt, seed))
    return [
        Answered(
            prompt=common or tuple(random_tokens(vocab_size, 9 + 5 * at, seed + at)),
            tokens=tuple(random_tokens(vocab_size, length, seed + 100 + at)),
            advantage=1.0 if at % 2 else -0.5,
        )
        for at, length in enumerate(lengths)
    ]
