"""Samples → micro-batches, and their arrays: made from samples in one function, never elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.rl.samples import Sample
from mlx_parallm.rl.trainable import Lie

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B samples of N completion tokens in all; C is the longest completion.

    tokens: int32 [M], each prompt once, then its samples' completions but for their last tokens (they predict nothing
        that is trained), right-padded: under a causal mask padding changes nothing before it.  lies: how they lie.
    positions: int32 [N], in M, of the hidden states that predict the completion tokens.
    targets: int32 [N].  temperatures: fp32 [N].
    places: int32 [B, C], where in N each row's tokens are; mask: fp32 [B, C], 0 on padding.
    sampling_logprobs: fp32 [B, C]; known: bool [B, 1], whether the row has them.
    advantages: fp32 [B].  on_policy: bool [B, 1].
    """

    tokens: mx.array
    lies: tuple[Lie, ...]
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
    """At most `most_tokens`, padding included, and one sample at least. Samples of a prompt stay together if they fit.

    The same samples are always split alike, whatever their order, so that a replayed update is the same to the bit.
    """
    waiting: list[Sample] = []
    for group in _by_prompt(sorted(samples, key=_order)):
        if waiting and _size([*waiting, *group]) > most_tokens:
            yield tuple(waiting)
            waiting = []
        for sample in group:
            if waiting and _size([*waiting, sample]) > most_tokens:
                yield tuple(waiting)
                waiting = []
            waiting.append(sample)
    if waiting:
        yield tuple(waiting)


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """The arrays of one micro-batch, in which samples of one prompt stand together."""
    groups = _by_prompt(samples)
    lies = tuple(map(_lie, groups))
    starts = accumulate((lie.tokens for lie in lies), initial=0)
    lengths = [len(sample.completion_ids) for sample in samples]
    longest, ends = max(lengths), list(accumulate(lengths))
    spans = [_padded(range(end - length, end), longest, 0) for end, length in zip(ends, lengths, strict=True)]
    positions = [_positions(group, lie, start) for group, lie, start in zip(groups, lies, starts, strict=False)]
    return MicroBatch(
        tokens=mx.array([t for group, lie in zip(groups, lies, strict=True) for t in _tokens(group, lie)], mx.int32),
        lies=lies,
        positions=mx.array(list(chain(*positions)), mx.int32),
        targets=mx.array([token for s in samples for token in s.completion_ids], mx.int32),
        temperatures=mx.array([s.temperature for s in samples for _ in s.completion_ids], mx.float32),
        places=mx.array(spans, mx.int32),
        mask=mx.array([_padded([1.0] * length, longest, 0.0) for length in lengths], mx.float32),
        sampling_logprobs=mx.array([_padded(s.sampling_logprobs, longest, 0.0) for s in samples], mx.float32),
        known=mx.array([[bool(s.sampling_logprobs)] for s in samples]),
        advantages=mx.array([s.advantage for s in samples], mx.float32),
        on_policy=mx.array([[s.on_policy] for s in samples]),
    )


def _order(sample: Sample) -> tuple[object, ...]:
    return (sample.prompt_ids, len(sample.completion_ids), sample.completion_ids, sample.advantage, sample.group)


def _by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Runs of samples with one prompt."""
    return [list(run) for _, run in groupby(samples, key=lambda sample: sample.prompt_ids)]


def _size(samples: Sequence[Sample]) -> int:
    return sum(_lie(group).tokens for group in _by_prompt(samples))


def _lie(group: Sequence[Sample]) -> Lie:
    width = max(len(sample.completion_ids) for sample in group) - 1
    return Lie(len(group[0].prompt_ids), len(group), width)


def _tokens(group: Sequence[Sample], lie: Lie) -> Iterator[int]:
    yield from group[0].prompt_ids
    for sample in group:
        yield from _padded(sample.completion_ids[:-1], lie.width, 0)


def _positions(group: Sequence[Sample], lie: Lie, start: int) -> Iterator[int]:
    """The prompt's last token predicts a completion's first one, its first the second, and so on."""
    for row, sample in enumerate(group):
        yield start + lie.prompt - 1
        first = start + lie.prompt + row * lie.width
        yield from range(first, first + len(sample.completion_ids) - 1)


def _padded(values: Sequence[T], width: int, fill: T) -> list[T]:
    return [*values, *([fill] * (width - len(values)))]
