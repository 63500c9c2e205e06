"""Splits the data of an update into micro-batches, and makes the arrays of each micro-batch.

What several rows of a micro-batch begin with is there once (see `train.branches`): a group of samples is a branch with
the prompt, and one bucket or a few. The arrays of training are made from data here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.train.branches import Branch, Bucket, Piece
from mlx_parallm.train.data import Datum

# -- layout --------------------------------------------------------------------------------------

_PADDING = 8
"""Padding tokens that a bucket may have; it may have more, up to an eighth of its tokens. They cost less than another
attention call."""

_WORTH_A_BRANCH = 4
"""A branch must save at least so many tokens. It costs an attention call, and splits buckets."""


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one row, int32 [T]. `key`: rows are in the order of their tokens if they are in that of their keys,
    which are compared faster."""

    ids: NDArray[np.int32]
    key: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> Row:
        array = np.array(ids, np.int32)
        return cls(array, array.astype(">i4").tobytes())


def laid_out(rows: Sequence[Row]) -> tuple[Branch, Sequence[int]]:
    """How these rows lie, whatever their order, and the indices of the rows in the order in which they lie. What all of
    them share is always a branch."""
    ids = [row.ids for row in rows]
    branch, order = _branch(ids, sorted(range(len(rows)), key=lambda row: rows[row].key), 0)
    return branch, order


def _branch(rows: Sequence[NDArray[np.int32]], members: list[int], start: int) -> tuple[Branch, list[int]]:
    """The branch of these rows, sorted by their tokens, which share `start` tokens or more with each other."""
    stop = _common(rows, members)
    alone: list[int] = []
    shared: list[list[int]] = []
    for part in _parts(rows, members, stop, stop):
        if len(part) == 1:
            alone += part
        else:
            shared.append(part)
    alone.sort(key=lambda row: len(rows[row]))
    branches = [_branch(rows, part, stop) for part in shared]
    order = alone + [row for _, inner in branches for row in inner]
    buckets = _buckets(len(rows[row]) - stop for row in alone)
    return Branch(start, stop - start, buckets, tuple(branch for branch, _ in branches)), order


def _parts(rows: Sequence[NDArray[np.int32]], members: list[int], stop: int, at: int) -> Iterator[list[int]]:
    """Splits rows that agree below `at` into those that get a branch of their own from `stop` on, and single ones."""
    for ended, part in groupby(members, lambda row: None if len(rows[row]) == at else int(rows[row][at])):
        same = list(part)
        common = _common(rows, same)
        if len(same) == 1 or ended is None:
            yield from ([row] for row in same)
        elif (common - stop) * (len(same) - 1) >= _WORTH_A_BRANCH:
            yield same
        else:
            yield from _parts(rows, same, stop, common)


def _common(rows: Sequence[NDArray[np.int32]], members: Sequence[int]) -> int:
    """How many tokens sorted rows begin with in common: as many as the first and the last of them."""
    first, last = rows[members[0]], rows[members[-1]]
    length = min(len(first), len(last))
    differ = np.flatnonzero(first[:length] != last[:length])
    return int(differ[0]) if differ.size else length


def _buckets(widths: Iterator[int]) -> tuple[Bucket, ...]:
    """The buckets of rows in ascending order of their widths."""
    buckets: list[Bucket] = []
    for width in widths:
        joined = buckets[-1].with_row(width) if buckets else None
        if joined is not None and joined.padding <= max(_PADDING, joined.tokens // 8):
            buckets[-1] = joined
        else:
            buckets.append(Bucket(1, width, 0))
    return tuple(buckets)


# -- micro-batches -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """The samples that an update adds to one micro-step, and how their tokens lie; see `laid_out`.

    Two batches of equal samples are two batches, so each is equal to itself alone.
    """

    samples: tuple[Datum, ...]
    branch: Branch
    order: Sequence[int]

    @classmethod
    def of(cls, samples: Sequence[Datum]) -> SampleBatch:
        return cls(tuple(samples), *laid_out([_row(sample) for sample in samples]))

    @property
    def size(self) -> int:
        """The number of tokens: what samples share once, padding included."""
        return self.branch.tokens

    @property
    def trained_tokens(self) -> int:
        return sum(len(sample.trained()) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The arrays of B samples with N trained tokens in all; C is the most trained tokens of one sample.

    tokens: int32 [M], as `branch` says, without those after which nothing is trained. Attention is causal, so padding
        changes nothing before it.
    branch: how the tokens lie.
    positions: int32 [N], indices in M of the hidden states that predict the trained tokens.
    targets: int32 [N].  temperatures: fp32 [N].
    rows: int32 [B, C], indices in N of the tokens of each row.
    weights: fp32 [B, C], 0 on padding.  advantages: fp32 [B, C].
    sampling_logprobs: fp32 [B, C].  known: bool [B, 1], whether the row has sampling logprobs.
    on_policy: bool [B, 1].
    shares, loss_scales: fp32 [B], see `TokenBatch`.
    groups: fp32 [G, B], 1 where a row belongs to a group.
    teacher_logprobs, reference_logprobs: fp32 [B, C]; None if a sample has none.
    old_logprobs: fp32 [B, C], of the policy before the first step of the update; None: it is before its first step.
    """

    tokens: mx.array
    branch: Branch
    positions: mx.array
    targets: mx.array
    temperatures: mx.array
    rows: mx.array
    weights: mx.array
    advantages: mx.array
    sampling_logprobs: mx.array
    known: mx.array
    on_policy: mx.array
    shares: mx.array
    loss_scales: mx.array
    groups: mx.array
    teacher_logprobs: mx.array | None
    reference_logprobs: mx.array | None
    old_logprobs: mx.array | None

    def padded(self, flat: mx.array) -> mx.array:
        """[N] → [B, C]; on padding there is the value of some other token."""
        return flat[self.rows]


def split_samples(samples: Sequence[Datum], most: int, whole_groups: bool = False) -> Iterator[SampleBatch]:
    """Splits the samples of an update into batches of at most `most` tokens, padding included. A sample that is longer
    is a batch of its own, and so is a longer group with `whole_groups`.

    Samples of a group stay together if they fit, and so do those of similar lengths. The same samples are always split
    alike, whatever their order, so that a replayed update is the same to the bit.
    """
    rows = {id(sample): _row(sample) for sample in samples}

    def batch_of(members: Sequence[Datum]) -> SampleBatch:
        return SampleBatch(tuple(members), *laid_out([rows[id(sample)] for sample in members]))

    batch: list[Datum] = []
    for group in _groups(samples):
        if batch and batch_of([*batch, *group]).size > most:
            yield batch_of(batch)
            batch = []
        for sample in group:
            if batch and not whole_groups and batch_of([*batch, sample]).size > most:
                yield batch_of(batch)
                batch = []
            batch.append(sample)
    if batch:
        yield batch_of(batch)


def minibatches(samples: Sequence[Datum], count: int) -> list[list[Datum]]:
    """Splits the samples of an update into at most `count` parts of whole groups, alike whatever their order."""
    groups = _groups(samples)
    parts = [groups[at::count] for at in range(min(count, len(groups)))]
    return [[sample for group in part for sample in group] for part in parts]


def _groups(samples: Sequence[Datum]) -> list[list[Datum]]:
    """The samples of each group by length, and the groups in the order of what they begin with."""
    groups: dict[int, list[Datum]] = {}
    for sample in sorted(samples, key=_order):
        groups.setdefault(sample.group, []).append(sample)
    return sorted(groups.values(), key=lambda group: min(sample.token_ids for sample in group))


def _order(sample: Datum) -> tuple[object, ...]:
    return (
        len(sample.token_ids),
        sample.token_ids,
        sample.advantages,
        sample.loss_weights,
        sample.sampling_logprobs,
        sample.targets,
        sample.group,
    )


def pack(batch: SampleBatch, old_logprobs: Sequence[Sequence[float]] | None = None) -> MicroBatch:
    """The arrays of one micro-batch. `old_logprobs`: of the trained tokens of each sample, under the policy before the
    first step of the update, if that is not the policy now."""
    samples, branch = batch.samples, batch.branch
    tokens = np.zeros(branch.tokens, np.int32)
    positions: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(samples)
    trained = [np.array(sample.trained()) for sample in samples]
    for row, pieces in zip(batch.order, branch.rows(), strict=True):
        ids = _row(samples[row]).ids
        at = indices_of(pieces)[: len(ids)]
        tokens[at] = ids
        positions[row] = at[trained[row] - 1]
    lengths = [len(targets) for targets in trained]
    ends = np.cumsum(lengths)
    rows = _table([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)], np.int32)

    def of_targets(values: Sequence[Sequence[float]]) -> mx.array:
        """Values of all tokens of each sample → those of its trained tokens, fp32 [B, C]."""
        return _table([np.asarray(each)[at] for each, at in zip(values, trained, strict=True)], np.float32)

    def if_given(values: Sequence[Sequence[float]]) -> mx.array | None:
        return of_targets(values) if all(values) else None

    return MicroBatch(
        tokens=mx.array(tokens),
        branch=branch,
        positions=mx.array(np.concatenate(positions).astype(np.int32)),
        targets=mx.array(
            [(s.targets or s.token_ids)[at] for s, targets in zip(samples, trained, strict=True) for at in targets]
        ),
        temperatures=mx.array(
            np.concatenate([np.array(s.temperatures())[at] for s, at in zip(samples, trained, strict=True)]), mx.float32
        ),
        rows=rows,
        weights=of_targets([s.loss_weights for s in samples]),
        advantages=of_targets([s.advantages for s in samples]),
        sampling_logprobs=of_targets([s.sampling_logprobs or (0.0,) * len(s.token_ids) for s in samples]),
        known=mx.array([[bool(s.sampling_logprobs)] for s in samples]),
        on_policy=mx.array([[s.on_policy] for s in samples]),
        shares=mx.array([s.share for s in samples], mx.float32),
        loss_scales=mx.array([s.loss_scale for s in samples], mx.float32),
        teacher_logprobs=if_given([s.teacher_logprobs for s in samples]),
        reference_logprobs=if_given([s.reference_logprobs for s in samples]),
        old_logprobs=None if old_logprobs is None else _table([np.array(each) for each in old_logprobs], np.float32),
        groups=mx.array([[float(s.group == group) for s in samples] for group in {s.group: None for s in samples}]),
    )


def _row(sample: Datum) -> Row:
    """The tokens that predict a trained one, and those before them."""
    return Row.of(sample.token_ids[: sample.trained()[-1]])


def indices_of(pieces: Sequence[Piece]) -> NDArray[np.int64]:
    """Where the token at each position of a row lies."""
    return np.concatenate([np.arange(piece.at, piece.at + piece.stop - piece.start) for piece in pieces])


def _table(rows: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> mx.array:
    """Rows of unequal lengths as an array [B, C], padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows))), dtype)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return mx.array(table)
