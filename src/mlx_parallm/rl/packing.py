"""Samples → micro-batches, and their arrays: made from samples in one function, never elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import mlx.core as mx

from mlx_parallm.rl.samples import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B samples of N completion tokens in all; C is the longest completion, T the longest sample.

    tokens: int32 [B, T], right-padded: under a causal mask padding changes nothing before it.
    positions: int32 [N], of the hidden states, flattened [B · T], that predict the completion tokens.
    targets: int32 [N].  temperatures: fp32 [N].
    places: int32 [B, C], where in N each row's tokens are; mask: fp32 [B, C], 0 on padding.
    sampling_logprobs: fp32 [B, C]; known: bool [B, 1], whether the row has them.
    advantages: fp32 [B].  on_policy: bool [B, 1].
    """

    samples: tuple[Sample, ...]
    tokens: mx.array
    positions: mx.array
    targets: mx.array
    temperatures: mx.array
    places: mx.array
    mask: mx.array
    sampling_logprobs: mx.array
    known: mx.array
    advantages: mx.array
    on_policy: mx.array

    def padded(self, flat: mx.array) -> mx.array:
        """[N] → [B, C]; what lies on padding is some other token's value."""
        return flat[self.places]


def micro_batches(samples: Sequence[Sample], most_tokens: int) -> Iterator[tuple[Sample, ...]]:
    """Groups of samples of like length, at most `most_tokens` with padding, one sample at least.

    The same samples are always split alike, whatever their order, so that a replayed update is the same to the bit.
    """
    waiting: list[Sample] = []
    for sample in sorted(samples, key=lambda s: (s.tokens, s.prompt_ids, s.completion_ids, s.group, s.advantage)):
        if waiting and sample.tokens * (len(waiting) + 1) > most_tokens:
            yield tuple(waiting)
            waiting = []
        waiting.append(sample)
    if waiting:
        yield tuple(waiting)


def pack(samples: Sequence[Sample]) -> MicroBatch:
    width = max(sample.tokens for sample in samples)
    lengths = [len(sample.completion_ids) for sample in samples]
    longest = max(lengths)
    ends = accumulate(lengths)
    return MicroBatch(
        samples=tuple(samples),
        tokens=mx.array([_padded([*s.prompt_ids, *s.completion_ids], width, 0) for s in samples], mx.int32),
        positions=mx.array(list(chain(*(_positions(s, row * width) for row, s in enumerate(samples)))), mx.int32),
        targets=mx.array([token for s in samples for token in s.completion_ids], mx.int32),
        temperatures=mx.array([s.temperature for s in samples for _ in s.completion_ids], mx.float32),
        places=mx.array(
            [_padded(range(end - n, end), longest, 0) for end, n in zip(ends, lengths, strict=True)], mx.int32
        ),
        mask=mx.array([_padded([1.0] * n, longest, 0.0) for n in lengths], mx.float32),
        sampling_logprobs=mx.array([_padded(s.sampling_logprobs, longest, 0.0) for s in samples], mx.float32),
        known=mx.array([[bool(s.sampling_logprobs)] for s in samples]),
        advantages=mx.array([s.advantage for s in samples], mx.float32),
        on_policy=mx.array([[s.on_policy] for s in samples]),
    )


def _positions(sample: Sample, start: int) -> range:
    """Position p's hidden state predicts token p + 1."""
    first = start + len(sample.prompt_ids) - 1
    return range(first, first + len(sample.completion_ids))


def _padded(values: Sequence[float], width: int, fill: float) -> list[float]:
    return [*values, *([fill] * (width - len(values)))]
