"""What the scheduler decides by: predicted seconds, the time between decode steps, and the tokens that keys have got.

All times are in seconds on one monotonic clock. A step is a forward unit with decode rows. Its rows wait for staging
and training that run before it, and for the chunks of prompts in it; all of these share one budget.

forward unit ──▶ staging, training ──▶ the next one: decode rows, and chunks of prompts
             └─────────────────── DecodeGap ─────────────────────────────────────────┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.figures import DECODE_GAPS, TRAINING_SHARES, Histogram
from mlx_parallm.engine.sequence import Sequence

# ---- predictions -------------------------------------------------------------------------------

_NEWEST_RATIO = 0.2
"""Weight of the newest observation in the running scale while observations come often."""

_MEMORY_S = 30.0
"""After this many seconds without an observation, the next one gets a weight of about two thirds."""

_MIN_RATIO, _MAX_RATIO = 0.1, 10.0
"""Bounds of one observation against the measured terms, so that one outlier cannot spoil the scale."""

_NEWEST_PART = 0.15
"""Weight of the newest observation in `CostModel.chunk_scale` and `CostModel.growth_scale`."""

_GROWTH_MEMORY_S = 60.0
"""Seconds of units without drafts in which two thirds of that scale are forgotten, so that drafts are tried again."""


class Chunk(NamedTuple):
    """`tokens` new tokens of one sequence, which attend to `context` tokens that are already in its row."""

    tokens: int
    context: int


@dataclass(slots=True)
class CostModel:
    """Predicts the seconds of a forward unit.

    The formula is fixed + per_sample·S + the sum over its chunks of per_token·T + per_pair·T·(C + T/2). T is a chunk's
    tokens, C its context, and S the number of tokens that the unit samples. A decode row is a chunk of one token. The
    first term stands for reading the weights, the second for the output layer and sampling, the third for the matrix
    products, the fourth for attention. The engine measures the terms at start; the defaults are a rough guess.

    `scale` is the running ratio of observed seconds to those that the terms give. Every unit corrects it, so it follows
    the load of the machine within seconds.

    `chunk_scale` corrects the two terms of the chunks against the others, because a start beside other programs can
    measure them several times too long or too short. Chunks of prompts would then be cut too small, or delay decode
    rows, for as long as the process runs. It is learnt from units in which the chunks have another share of the time
    than usual: if one with a larger share takes longer than predicted, tokens cost more.

    `steps`: pairs of a number of rows and the seconds of a unit that samples a token of each, in ascending order. They
    are measured too, because the time of a few tokens need not grow evenly: some devices multiply two rows by a matrix
    in the time of one, and eight in three times as long. A unit of at most so many tokens takes longer or shorter than
    the formula says by as much as such a step does. Without them, only the formula counts.

    `uneven`: seconds by which a unit is longer in which some rows have more tokens than others, because attention takes
    them in a call of its own. It is measured, and part of what drafts cost. `growth_scale` corrects that as
    `chunk_scale` corrects chunks: by how much longer units with drafts take than the others, so that a machine which
    slows down does not make drafts dearer. `again`: the tokens of a wrong draft are computed once more in the next
    unit, because recurrent states go back to the one before it.
    """

    fixed: float = 0.01
    per_token: float = 1e-4
    per_pair: float = 1e-8
    per_sample: float = 0.0
    scale: float = 1.0
    chunk_scale: float = 1.0
    steps: tuple[tuple[int, float], ...] = ()
    uneven: float = 0.0
    again: bool = False
    growth_scale: float = 1.0
    _observed_at: float | None = None
    _drafted: float = 0.0  # running share of units with drafts
    _share: float | None = None  # running share of the chunks in the time of a unit

    def seconds(self, chunks: Iterable[Chunk] = (), samples: int = 0) -> float:
        """Predicted seconds of a unit of these chunks."""
        return self.scale * self._unscaled(chunks, samples)[0]

    def chunk_seconds(self, chunk: Chunk) -> float:
        """Predicted seconds by which this chunk makes a unit longer."""
        return self.scale * self._of_chunks(chunk.tokens, chunk.tokens * (chunk.context + chunk.tokens / 2))

    def _unscaled(self, chunks: Iterable[Chunk], samples: int) -> tuple[float, float]:
        """The seconds before `scale`: of a unit, and those of them that the chunks take. Called several times a step
        with a chunk for each row."""
        tokens, pairs = 0, 0.0
        for count, context in chunks:
            tokens += count
            pairs += count * (context + count / 2)
        of_chunks = self._of_chunks(tokens, pairs)
        seconds = self.fixed + self.per_sample * samples + self._bend(tokens) + of_chunks
        # Terms that were measured too long can make the bend longer than the rest, if few of the tokens are sampled.
        seconds = max(seconds, min(self.fixed, self.steps[0][1]) if self.steps else self.fixed)
        return seconds, min(of_chunks, seconds)

    def _of_chunks(self, tokens: int, pairs: float) -> float:
        return self.chunk_scale * (self.per_token * tokens + self.per_pair * pairs)

    def _bend(self, tokens: int) -> float:
        """How much longer a unit of so few tokens takes than the formula says."""
        if not self.steps or not self.steps[0][0] <= tokens <= self.steps[-1][0]:
            return 0.0
        return self._step(tokens) - self._even_step(tokens)

    def growth(self, before: int, after: int) -> float:
        """How many times as long a unit of `after` tokens takes as one of `before` decode rows, if the tokens that are
        more are drafts of the same rows."""
        if after <= before:
            return 1.0
        return max(self.growth_scale * (self._step(after) + self.uneven) / self._step(before), 1.0)

    def step_seconds(self, tokens: int) -> float:
        """Predicted seconds of a unit that samples a token after each of so many; 0 for none."""
        return self.scale * self._step(tokens) if tokens else 0.0

    def _step(self, tokens: int) -> float:
        """The seconds of a unit of so many tokens: on a straight line between the two measured numbers next to it."""
        for (fewer, short), (more, long) in pairwise(self.steps):
            if tokens <= more:
                return short + (long - short) * (tokens - fewer) / (more - fewer)
        return self._even_step(tokens)

    def _even_step(self, tokens: int) -> float:
        return self.fixed + tokens * (self.per_token + self.per_sample)

    def tokens_within(self, seconds: float, context: int, least: int, most: int) -> int:
        """The largest chunk, in tokens, that makes a unit at most `seconds` longer.

        Args:
            context: tokens that the chunk attends to.
            least, most: bounds of the result; `least` is returned when nothing fits.
        """
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.chunk_seconds(Chunk(middle, context)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(
        self, chunks: Iterable[Chunk], samples: int, seconds: float, now: float, growth: float | None = None
    ) -> None:
        """Corrects the scales by a unit that took `seconds` and ended at `now`.

        Args:
            growth: how many times as long its drafts were to make it; it is described as it would be without them.
                None: it had no drafts.

        `scale` is of all terms, because load, heat and clock rate change them alike. The older the last observation,
        the less the old scale counts, and the less the difference from it says about `chunk_scale`.
        """
        unscaled, of_chunks = self._unscaled(chunks, samples)
        share = of_chunks / unscaled
        usual = share if self._share is None else self._share
        ratio = min(max(seconds / unscaled / (growth or 1.0), _MIN_RATIO), _MAX_RATIO)
        idle = 0.0 if self._observed_at is None else now - seconds - self._observed_at
        weight = max(_NEWEST_RATIO, 1.0 - math.exp(-idle / _MEMORY_S))
        surprise = min(max(math.log(ratio / self.scale), -1.0), 1.0)
        corrected = self.chunk_scale * math.exp(_NEWEST_PART * (1.0 - weight) * surprise * (share - usual))
        self.chunk_scale = min(max(corrected, _MIN_RATIO), _MAX_RATIO)
        self._share = usual + _NEWEST_RATIO * (share - usual)
        drafted = growth is not None
        dearer = math.exp(_NEWEST_PART * (1.0 - weight) * surprise * (drafted - self._drafted))
        self.growth_scale = min(max(self.growth_scale * dearer, _MIN_RATIO), _MAX_RATIO)
        if not drafted:
            self.growth_scale += min(seconds / _GROWTH_MEMORY_S, 1.0) * (1.0 - self.growth_scale)
        self._drafted += _NEWEST_RATIO * (drafted - self._drafted)
        self.scale += weight * (ratio - self.scale)
        self._observed_at = now

    def forget(self) -> None:
        """Lets the next unit set the scale alone, whatever was observed before. Call it when the machine has slept: its
        clock rate may be another one."""
        self._observed_at, self.growth_scale = -math.inf, 1.0


# ---- time between decode steps -----------------------------------------------------------------

_STAGING_SHARE = 0.5
"""Staging time allowed between two steps, as a share of a step's own time. Requests wait for it as they do for chunks
of their prompts. With much less, few slots that change hands often are empty for most of the time."""

_CHUNK_STALL_S = 0.3
"""Longest time that chunks of prompts may add to a step, in seconds, even if the stall budget is larger."""

_NEWEST_STEP = 0.2
"""Weight of the newest step in the running average of a step's own time."""

_POOLING_SHARE = 0.15
"""Share of the time of steps that prompts whose hidden states are pooled get. Unlike a prompt that waits for its first
token, they come by the hundred, and nobody reads along."""

_WINDOW_S = 10.0
"""Length of the windows in which training's share of time is measured."""


class DecodeGap:
    """The time since the last forward unit was launched, and the budget for what delays the rows of the next one.

    `stall_s`: seconds by which other work may delay a step; units are sized to what is left of it. `waited_s`: seconds
    of other work in this gap. `staged_s`: the part that staging took. `trained`: a training unit ran in this gap.
    `training_gave_way`: a training unit was due in this gap and gave way to prompts; `training_gave_way_before`: one
    did in the gap before, so it runs in this one. `lengths`: the times from the end of each step to the end of the
    next one, without those in which no row waited. `pooling_s`: what is left of the share of prompts whose hidden
    states are pooled. As long as anything is left, they may take a whole chunk, and then wait until their share has
    made up for it.
    """

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self.waited_s = self.staged_s = self.pooling_s = 0.0
        self.trained = self.training_gave_way = self.training_gave_way_before = False
        self.lengths: Histogram = DECODE_GAPS
        self._stepped_at: float | None = None  # the end of the last step; None when no row waited since
        self._step_seconds = 0.0  # running average of a step's own time

    def add_wait_time(self, seconds: float) -> None:
        """Adds time that went to messages or to the admission of rows."""
        self.waited_s += seconds

    def add_staging(self, seconds: float) -> None:
        """Adds a unit of staging."""
        self.staged_s += seconds
        self.waited_s += seconds

    def add_training(self, seconds: float) -> None:
        """Adds a unit of training."""
        self.waited_s += seconds
        self.trained = True

    @property
    def chunk_s(self) -> float:
        """Seconds that chunks of prompts may take in one unit."""
        return min(_CHUNK_STALL_S, self.stall_s)

    @property
    def remaining_s(self) -> float:
        """The part of `stall_s` that is left: how long rows may still wait for their next step."""
        return max(self.stall_s - self.waited_s, 0.0)

    @property
    def is_half_free(self) -> bool:
        """Whether less than half of the budget is used."""
        return self.remaining_s > 0.5 * self.stall_s

    @property
    def is_fresh(self) -> bool:
        """Whether the gap has held no training yet and has time for a unit of any length."""
        return not self.trained and self.is_half_free

    @property
    def interrupted(self) -> bool:
        """Whether staging or training ran in this gap."""
        return self.trained or self.staged_s > 0.0

    def may_stage(self, urgent: bool, rows_wait: bool) -> bool:
        """Whether staging may run now, because it has not used its share of this gap. Its first unit is always allowed,
        unless rows wait for a step and training took half of the budget.

        If staging had no limit, versions that compete for the same slots could be staged in turns forever, because the
        rows that hold the slots would never end.
        """
        if rows_wait and self.trained and not self.is_half_free:
            return False
        return self.staged_s == 0.0 or self.staging_left(urgent) > 0.0

    def staging_left(self, urgent: bool) -> float:
        """Seconds of this gap that are left for staging: of the whole budget if it is urgent, else of a share."""
        allowance = self.stall_s if urgent else _STAGING_SHARE * self._step_seconds
        return max(allowance - self.staged_s, 0.0)

    def close(self) -> None:
        """Ends this gap with the launch of a forward unit, and begins the next one."""
        self.waited_s = self.staged_s = 0.0
        self.trained = False
        self.training_gave_way_before, self.training_gave_way = self.training_gave_way, False

    def add_step(self, seconds: float, now: float, pooled: float) -> None:
        """Records a step that took `seconds` and ended at `now`, of which prompts that are pooled took about `pooled`
        seconds. What they leave of their share is not saved up for long."""
        self.pooling_s = min(self.pooling_s + _POOLING_SHARE * seconds - pooled, self.chunk_s)
        self._step_seconds += _NEWEST_STEP * (seconds - self._step_seconds)
        if self._stepped_at is not None:
            self.lengths = self.lengths.with_value(now - self._stepped_at)
        self._stepped_at = now

    def no_row_waited(self) -> None:
        """Forgets when the last step ended: nothing that ran since then has delayed a row."""
        self._stepped_at = None

    def idle(self) -> None:
        """Forgets the gap: no request has work for the device."""
        self.no_row_waited()
        self.waited_s = self.staged_s = 0.0
        self.trained = False


class TrainingSpacer:
    """Spaces training units so that they take `share`, in (0, 1], of device time while rows decode, and measures it.

    Training units are long and cannot be interrupted, so the share is kept by the time between them. A new share
    applies already to the time after the last unit.

    `last`: the share of time that training got in the last window of 10 seconds. `contended`: the shares in windows
    throughout which both rows and training wanted the device.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.last = 0.0
        self.contended: Histogram = TRAINING_SHARES
        self._began = 0.0  # when the last unit was due, or when it began if that was earlier
        self._seconds = 0.0  # how long it took
        self._ended = 0.0
        self._waited = False
        self._window_began: float | None = None
        self._in_window = 0.0
        self._all_contended = True

    @property
    def _due_at(self) -> float:
        """When the next unit is due, counted from when the last one was due, not from when it began. So after a late
        unit the next one comes sooner, but not before the late one has ended."""
        return max(self._began + self._seconds / self.share, self._ended)

    def is_due(self, now: float, waits: bool, requests_run: bool) -> bool:
        """Whether the next training unit may run beside other work. Call it for each unit that is chosen.

        Args:
            waits: whether training has a unit to run.
            requests_run: whether any request holds a row and may use the device.
        """
        self._measure(now, waits and requests_run)
        if not self._waited and now > self._due_at:
            self._began, self._seconds = now, 0.0  # unused time is not saved up
        self._waited = waits
        return waits and now >= self._due_at

    def _measure(self, now: float, contended: bool) -> None:
        if self._window_began is None:
            self._window_began = now
        self._all_contended = self._all_contended and contended
        if now - self._window_began < _WINDOW_S:
            return
        self.last = self._in_window / (now - self._window_began)
        if self._all_contended:
            self.contended = self.contended.with_value(self.last)
        self._window_began, self._in_window, self._all_contended = now, 0.0, True

    def add_unit(self, seconds: float, now: float) -> None:
        """Records a unit that took `seconds` and ended at `now`."""
        self._began, self._seconds, self._ended = min(self._due_at, now - seconds), seconds, now
        self._in_window += seconds


# ---- tokens of keys ----------------------------------------------------------------------------

Owner = tuple[WorkClass | str, ...]
"""A work class; a work class and a key; or both and the name of an adapter."""

ROW_TOKENS = 64
"""Tokens that a row counts as while it is held, in addition to those that were computed for it."""
AHEAD_TOKENS = 4 * ROW_TOKENS
"""How far ahead a key must be before rows are taken from it for one that holds some. Each row that changes hands makes
the difference smaller by twice `ROW_TOKENS`."""
_MOST_COUNTS = 4096
"""With more counts than this, those of owners that hold no row are forgotten."""


def owners(sequence: Sequence) -> tuple[Owner, Owner, Owner]:
    """The owners of a sequence, from its class to its adapter."""
    key, adapter = (sequence.work_class, sequence.key), sequence.adapter.name
    return key[:1], key, (*key, adapter)


class TokenShares:
    """Divides the rows of one work class between API keys, and those of a key between its adapters, by their tokens.
    Device thread only.

    It is a form of deficit round robin: of the owners that wait, the one for which the fewest tokens were computed gets
    the next row. Deficit round robin itself would have to know the length of an answer before the row is given. Here
    tokens count when they are computed, and a row counts as `ROW_TOKENS` in advance as long as it is held, so that one
    key cannot take all rows before its first token is counted.

    A key that comes while another one holds all rows need not wait for its answers to end: rows are taken back until
    both hold as many. An unused share is not saved up: an owner that begins to wait starts with the count of the owner
    with the fewest tokens among those that wait.

    `rows`: those that each owner holds. Invariant: a class has as many as its keys together, and a key as many as its
    adapters.
    """

    def __init__(self) -> None:
        self.rows: Counter[Owner] = Counter()
        self._tokens: dict[Owner, int] = {}
        self._least: dict[Owner, int] = {}  # what the one behind had got when those below an owner last waited

    def hold(self, sequence: Sequence) -> None:
        """Counts a row that the sequence has got."""
        for owner in owners(sequence):
            self.rows[owner] += 1

    def release(self, sequence: Sequence) -> None:
        """Counts a row that the sequence has given back."""
        for owner in owners(sequence):
            self.rows[owner] -= 1
            if not self.rows[owner]:
                del self.rows[owner]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Counts tokens that are computed for the sequence."""
        key, adapter = (sequence.work_class, sequence.key), sequence.adapter.name
        for owner in (key, (*key, adapter)):
            self._tokens[owner] = self._tokens.get(owner, 0) + tokens
        if len(self._tokens) > _MOST_COUNTS:
            self._tokens = {owner: got for owner, got in self._tokens.items() if owner in self.rows}
            self._least = {owner: got for owner, got in self._least.items() if owner in self.rows}

    def tokens(self, owner: Owner) -> int:
        """What an owner counts as having got."""
        return self._tokens.get(owner, 0)

    def behind(self, waiting: Iterable[Owner]) -> set[Owner]:
        """Those of the owners that wait which have got the least of all that are below the same one."""
        below: dict[Owner, set[Owner]] = {}
        for owner in waiting:
            below.setdefault(owner[:-1], set()).add(owner)
        behind = set[Owner]()
        for above, own in below.items():
            for each in own:
                self._tokens[each] = max(self.tokens(each), self._least.get(above, 0))
            self._least[above] = min(map(self.tokens, own))
            standing = {each: self._standing(each) for each in own}
            least = min(standing.values())
            behind |= {each for each in own if standing[each] == least}
        return behind

    def _standing(self, owner: Owner) -> int:
        """The tokens of an owner, and those that its rows count as."""
        return self.tokens(owner) + ROW_TOKENS * self.rows[owner]

    def reset(self) -> None:
        """Forgets all tokens. Call it when nothing waits and no row is held."""
        self._tokens.clear()
        self._least.clear()

    def row_to_yield(self, rows: Seq[Sequence], to: Sequence, rows_are_short: bool) -> Sequence | None:
        """The row that gives way to a waiting sequence: the youngest one of the key that holds the most, if these are
        at least two more than the waiting sequence's key holds.

        A key without a row gets its first one so in any case. It gets more only from a key that is ahead by
        `AHEAD_TOKENS`, so that keys which hold about their share wait for answers to end. A row that gave way keeps its
        next place until it has sampled `ROW_TOKENS` more.

        Args:
            rows: all rows, in order of admission. Those of another class, or of a better priority, do not give way.
            rows_are_short: the sequence waits for a row, and not for memory.
        """
        own = self.rows[to.work_class, to.key]
        if own and not rows_are_short:
            return None
        rows = [row for row in rows if row.work_class is to.work_class and row.priority >= to.priority]
        held = Counter(row.key for row in rows)
        most = max(held.values(), default=0)
        if most - own < 2:
            return None
        youngest_first = (row for row in reversed(rows) if held[row.key] == most)
        if own == 0:
            return next(youngest_first)
        behind = self._standing((to.work_class, to.key)) + AHEAD_TOKENS
        ahead = (row for row in youngest_first if self._standing((row.work_class, row.key)) >= behind)
        return next((row for row in ahead if row.sampled >= row.keeps_row_until), None)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError if the rows that are counted are not those of the sequences that hold one."""
        assert self.rows == Counter(owner for sequence in live for owner in owners(sequence))
