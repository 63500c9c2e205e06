"""Samples become micro-batches: how an update is split, and the arrays of one micro-batch.

The arrays of training are made from samples here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain, groupby, islice
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.rl.learn.attention import Bucket, Segment
from mlx_parallm.rl.objectives.batches import Sample

T = TypeVar("T")

_PADDING = 8
"""Tokens of padding that a bucket may have (or an eighth of its tokens): they cost less than another attention call."""


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The samples of one micro-step. `size`: its tokens, prompts and padding included."""

    samples: tuple[Sample, ...]
    size: int

    @property
    def trained_tokens(self) -> int:
        """Completion tokens."""
        return sum(len(sample.completion_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The arrays of B samples with N completion tokens in all; C is the length of the longest completion.

    tokens: int32 [M]. Each prompt once, then the completions of its samples, right-padded and without their last tokens
        (they predict nothing that is trained). Attention is causal, so padding changes nothing before it.
    segments: how the tokens are laid out.
    positions: int32 [N], indices in M of the hidden states that predict the completion tokens.
    targets: int32 [N].  temperatures: fp32 [N].
    places: int32 [B, C], indices in N of each row's tokens.  mask: fp32 [B, C], 0 on padding.
    sampling_logprobs: fp32 [B, C].  known: bool [B, 1], whether the row has sampling logprobs.
    advantages: fp32 [B].  on_policy: bool [B, 1].
    """

    tokens: mx.array
    segments: tuple[Segment, ...]
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
        """[N] → [B, C]; on padding there is the value of some other token."""
        return flat[self.places]


def split_samples(samples: Sequence[Sample], most: int) -> Iterator[SampleBatch]:
    """Splits the samples of an update into batches of at most `most` tokens, padding included, or of one sample.

    Samples with the same prompt stay together if they fit, and so do those of similar lengths. The same samples are
    always split alike, whatever their order, so that a replayed update is the same to the bit.
    """
    layout = empty = _Layout()
    for group in _by_prompt(sorted(samples, key=_order)):
        if layout.samples and reduce(_Layout.with_sample, group, layout).size > most:
            yield layout.batch()
            layout = empty
        for sample in group:
            larger = layout.with_sample(sample)
            if layout.samples and larger.size > most:
                yield layout.batch()
                larger = empty.with_sample(sample)
            layout = larger
    if layout.samples:
        yield layout.batch()


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """The arrays of one micro-batch. Samples with the same prompt must follow each other."""
    segments = reduce(_Layout.with_sample, samples, _Layout()).segments
    starts = accumulate((segment.tokens for segment in segments), initial=0)
    rows = iter(samples)
    groups = [tuple(islice(rows, segment.rows)) for segment in segments]
    lengths = [len(sample.completion_ids) for sample in samples]
    longest, ends = max(lengths), list(accumulate(lengths))
    places = [_padded(range(end - length, end), longest, 0) for end, length in zip(ends, lengths, strict=True)]
    positions = [_positions(*each) for each in zip(groups, segments, starts, strict=False)]
    return MicroBatch(
        tokens=mx.array(list(chain(*map(_tokens, groups, segments))), mx.int32),
        segments=segments,
        positions=mx.array(list(chain(*positions)), mx.int32),
        targets=mx.array([token for s in samples for token in s.completion_ids], mx.int32),
        temperatures=mx.array([s.temperature for s in samples for _ in s.completion_ids], mx.float32),
        places=mx.array(places, mx.int32),
        mask=mx.array([_padded([1.0] * length, longest, 0.0) for length in lengths], mx.float32),
        sampling_logprobs=mx.array([_padded(s.sampling_logprobs, longest, 0.0) for s in samples], mx.float32),
        known=mx.array([[bool(s.sampling_logprobs)] for s in samples]),
        advantages=mx.array([s.advantage for s in samples], mx.float32),
        on_policy=mx.array([[s.on_policy] for s in samples]),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """The segments of a micro-batch while samples are added to it."""

    samples: tuple[Sample, ...] = ()
    segments: tuple[Segment, ...] = ()

    @property
    def size(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    def with_sample(self, sample: Sample) -> _Layout:
        """Adds a sample, without its last token, to the segment of its prompt if that is the last one."""
        new_prompt = not self.samples or sample.prompt_ids != self.samples[-1].prompt_ids
        before = self.segments if new_prompt else self.segments[:-1]
        last = Segment(len(sample.prompt_ids), ()) if new_prompt else self.segments[-1]
        segments = (*before, _with_row(last, len(sample.completion_ids) - 1))
        return _Layout((*self.samples, sample), segments)

    def batch(self) -> SampleBatch:
        return SampleBatch(self.samples, self.size)


def _with_row(segment: Segment, width: int) -> Segment:
    """Adds a row to the last bucket, or to a new one if it would cause too much padding."""
    if segment.buckets:
        *before, last = segment.buckets
        joined = last.with_row(width)
        if joined.padding <= max(_PADDING, joined.tokens // 8):
            return Segment(segment.prompt, (*before, joined))
    return Segment(segment.prompt, (*segment.buckets, Bucket(1, width, 0)))


def _order(sample: Sample) -> tuple[object, ...]:
    return (sample.prompt_ids, len(sample.completion_ids), sample.completion_ids, sample.advantage, sample.group)


def _by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Runs of samples with the same prompt."""
    return [list(run) for _, run in groupby(samples, key=lambda sample: sample.prompt_ids)]


def _tokens(group: Sequence[Sample], segment: Segment) -> Iterator[int]:
    yield from group[0].prompt_ids
    for sample, width in zip(group, segment.widths(), strict=True):
        yield from _padded(sample.completion_ids[:-1], width, 0)


def _positions(group: Sequence[Sample], segment: Segment, start: int) -> Iterator[int]:
    """The prompt's last token predicts a completion's first one, its first token the second one, and so on."""
    last = start + segment.prompt - 1
    first = last + 1
    for sample, width in zip(group, segment.widths(), strict=True):
        yield last
        yield from range(first, first + len(sample.completion_ids) - 1)
        first += width


def _padded(values: Sequence[T], width: int, fill: T) -> list[T]:
    return [*values, *([fill] * (width - len(values)))]
