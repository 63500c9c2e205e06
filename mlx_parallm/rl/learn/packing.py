"""Splits the samples of an update into micro-batches, and makes the arrays of each micro-batch.

The arrays of training are made from samples here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby, islice
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.rl.learn.attention import Segment
from mlx_parallm.rl.objectives.batches import Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The samples that an update adds to one micro-step.

    segments: how their tokens are laid out: one segment for each run of samples with the same prompt.
    size: number of tokens, each prompt once, padding included.
    """

    samples: tuple[Sample, ...] = ()
    segments: tuple[Segment, ...] = ()
    size: int = 0

    @property
    def trained_tokens(self) -> int:
        """Completion tokens."""
        return sum(len(sample.completion_ids) for sample in self.samples)

    def with_sample(self, sample: Sample) -> SampleBatch:
        """This batch with another sample, whose last token is left out because it predicts nothing."""
        before, last = self.segments, Segment(len(sample.prompt_ids), ())
        if self.samples and self.samples[-1].prompt_ids == sample.prompt_ids:
            before, last = self.segments[:-1], self.segments[-1]
        segments = (*before, last.with_row(len(sample.completion_ids) - 1))
        return SampleBatch((*self.samples, sample), segments, sum(segment.tokens for segment in segments))


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
    """Splits the samples of an update into batches of at most `most` tokens, padding included. A sample that is longer
    is a batch of its own.

    Samples with the same prompt stay together if they fit, and so do those of similar lengths. The same samples are
    always split alike, whatever their order, so that a replayed update is the same to the bit.
    """
    batch = empty = SampleBatch()
    for _, group in groupby(sorted(samples, key=_order), key=lambda sample: sample.prompt_ids):
        same_prompt = list(group)
        if batch.samples and reduce(SampleBatch.with_sample, same_prompt, batch).size > most:
            yield batch
            batch = empty
        for sample in same_prompt:
            larger = batch.with_sample(sample)
            if batch.samples and larger.size > most:
                yield batch
                larger = empty.with_sample(sample)
            batch = larger
    if batch.samples:
        yield batch


def _order(sample: Sample) -> tuple[object, ...]:
    return (sample.prompt_ids, len(sample.completion_ids), sample.completion_ids, sample.advantage, sample.group)


def pack(batch: SampleBatch) -> MicroBatch:
    """The arrays of one micro-batch."""
    samples = batch.samples
    tokens, positions = _laid_out(batch)
    lengths = [len(sample.completion_ids) for sample in samples]
    longest, ends = max(lengths), accumulate(lengths)
    places = [_padded(range(end - length, end), longest, 0) for end, length in zip(ends, lengths, strict=True)]
    return MicroBatch(
        tokens=mx.array(tokens, mx.int32),
        segments=batch.segments,
        positions=mx.array(positions, mx.int32),
        targets=mx.array([token for s in samples for token in s.completion_ids], mx.int32),
        temperatures=mx.array([s.temperature for s in samples for _ in s.completion_ids], mx.float32),
        places=mx.array(places, mx.int32),
        mask=mx.array([_padded([1.0] * length, longest, 0.0) for length in lengths], mx.float32),
        sampling_logprobs=mx.array([_padded(s.sampling_logprobs, longest, 0.0) for s in samples], mx.float32),
        known=mx.array([[bool(s.sampling_logprobs)] for s in samples]),
        advantages=mx.array([s.advantage for s in samples], mx.float32),
        on_policy=mx.array([[s.on_policy] for s in samples]),
    )


def _laid_out(batch: SampleBatch) -> tuple[list[int], list[int]]:
    """The tokens and the positions of a micro-batch.

    The prompt's last token predicts the completion's first token, which predicts its second token, and so on.
    """
    tokens: list[int] = []
    positions: list[int] = []
    rows = iter(batch.samples)
    for segment in batch.segments:
        group = tuple(islice(rows, segment.rows))
        tokens += group[0].prompt_ids
        last = len(tokens) - 1
        for sample, width in zip(group, segment.widths(), strict=True):
            inputs = sample.completion_ids[:-1]
            positions += [last, *range(len(tokens), len(tokens) + len(inputs))]
            tokens += inputs + (0,) * (width - len(inputs))
    return tokens, positions


def _padded(values: Sequence[T], width: int, fill: T) -> list[T]:
    return [*values, *([fill] * (width - len(values)))]
