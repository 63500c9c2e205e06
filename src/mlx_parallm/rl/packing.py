"""Samples → the portions of an update, and the arrays of a micro-batch: made from samples here, never elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain, groupby, islice
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.rl.packed_attention import Bucket, Lie
from mlx_parallm.rl.samples import Sample

T = TypeVar("T")

_PADDING = 8
"""Tokens of padding, or an eighth of its tokens, that a bucket may hold: less than one more attention call costs."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What one micro-step takes of an update. `size`: its tokens, prompts and padding included."""

    samples: tuple[Sample, ...]
    size: int

    @property
    def trained_tokens(self) -> int:
        """Those of its completions."""
        return sum(len(sample.completion_ids) for sample in self.samples)


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


def portions(samples: Sequence[Sample], most: int) -> Iterator[Portion]:
    """Of at most `most` tokens, padding included, and one sample at least. Samples of a prompt, and of a length, stay
    together if they fit.

    The same samples are always split alike, whatever their order, so that a replayed update is the same to the bit.
    """
    filling = empty = _Filling()
    for group in _by_prompt(sorted(samples, key=_order)):
        if filling.samples and reduce(_Filling.with_sample, group, filling).size > most:
            yield filling.portion()
            filling = empty
        for sample in group:
            more = filling.with_sample(sample)
            if filling.samples and more.size > most:
                yield filling.portion()
                more = empty.with_sample(sample)
            filling = more
    if filling.samples:
        yield filling.portion()


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """The arrays of one micro-batch, in which samples of one prompt stand together."""
    lies = reduce(_Filling.with_sample, samples, _Filling()).lies
    starts = accumulate((lie.tokens for lie in lies), initial=0)
    rows = iter(samples)
    groups = [tuple(islice(rows, lie.rows)) for lie in lies]
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


@dataclass(frozen=True, slots=True)
class _Filling:
    """A micro-batch as samples are added to it, and how its tokens come to lie."""

    samples: tuple[Sample, ...] = ()
    lies: tuple[Lie, ...] = ()

    @property
    def size(self) -> int:
        return sum(lie.tokens for lie in self.lies)

    def with_sample(self, sample: Sample) -> _Filling:
        """The last token of a completion predicts nothing that is trained, and is not there."""
        another = not self.samples or sample.prompt_ids != self.samples[-1].prompt_ids
        before, last = (self.lies, Lie(len(sample.prompt_ids), ())) if another else (self.lies[:-1], self.lies[-1])
        lies = (*before, _with_row(last, len(sample.completion_ids) - 1))
        return _Filling((*self.samples, sample), lies)

    def portion(self) -> Portion:
        return Portion(self.samples, self.size)


def _with_row(lie: Lie, width: int) -> Lie:
    """In the last bucket, unless that takes more padding than it is worth."""
    if lie.buckets:
        *before, last = lie.buckets
        joined = last.with_row(width)
        if joined.padding <= max(_PADDING, joined.tokens // 8):
            return Lie(lie.prompt, (*before, joined))
    return Lie(lie.prompt, (*lie.buckets, Bucket(1, width, 0)))


def _order(sample: Sample) -> tuple[object, ...]:
    return (sample.prompt_ids, len(sample.completion_ids), sample.completion_ids, sample.advantage, sample.group)


def _by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Runs of samples with one prompt."""
    return [list(run) for _, run in groupby(samples, key=lambda sample: sample.prompt_ids)]


def _tokens(group: Sequence[Sample], lie: Lie) -> Iterator[int]:
    yield from group[0].prompt_ids
    for sample, width in zip(group, lie.widths(), strict=True):
        yield from _padded(sample.completion_ids[:-1], width, 0)


def _positions(group: Sequence[Sample], lie: Lie, start: int) -> Iterator[int]:
    """The prompt's last token predicts a completion's first one, its first the second, and so on."""
    last = start + lie.prompt - 1
    first = last + 1
    for sample, width in zip(group, lie.widths(), strict=True):
        yield last
        yield from range(first, first + len(sample.completion_ids) - 1)
        first += width


def _padded(values: Sequence[T], width: int, fill: T) -> list[T]:
    return [*values, *([fill] * (width - len(values)))]
