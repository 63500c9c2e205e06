"""The advantages of the tokens of episodes, and the data that are made of their turns.

turn 0   prompt A | sampled B
turn 1   A B | tool result C | sampled D        its prompt continues A B: both turns are one datum
turn 2   prompt E | sampled F                   its prompt does not: a datum of its own

A turn that a client gives may have context between its sampled tokens; its mask says where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import fsum, sqrt

from mlx_parallm.core.requests import FinishReason
from mlx_parallm.rl.trajectories import Episode, Turn, finish_reason
from mlx_parallm.train.data import Datum, SampledSpan


def sampled_spans(turn: Turn) -> Iterator[tuple[int, int]]:
    """Where tokens of the completion were sampled, as [start, stop)."""
    if not turn.mask:
        yield 0, len(turn.completion_ids)
        return
    for sampled, places in groupby(range(len(turn.mask)), key=turn.mask.__getitem__):
        if sampled:
            span = [*places]
            yield span[0], span[-1] + 1


def token_advantages(
    episodes: Sequence[Episode], advantages: Sequence[float], divisor: float | None
) -> list[list[list[float]]]:
    """The advantage of each token of the completions of the episodes of one group: [episode][turn][token].

    Those that a client has given with a turn are taken as they are. Otherwise:

    Without rewards of tokens, or without a divisor, every token of an episode has the advantage of the episode. That is
    (R - mean R) / divisor, where R is its whole reward. With them, a token is credited with what comes from it on only:
    the rewards of earlier tokens are subtracted from R, and those of earlier turns from the mean, each as they are in
    the mean of the group.
    """
    computed = _computed_advantages(episodes, advantages, divisor)
    return [
        [[*turn.advantages] or values for turn, values in zip(episode.turns, of_turns, strict=True)]
        for episode, of_turns in zip(episodes, computed, strict=True)
    ]


def token_deviation(episodes: Sequence[Episode]) -> float:
    """How far the credits of the tokens of one group are from 0, by rewards of tokens alone: the root of the mean
    square. 0 if the episodes do not differ in them."""
    if len({tuple(episode.token_rewards) for episode in episodes}) < 2:
        return 0.0
    credits = _computed_advantages(episodes, [0.0] * len(episodes), 1.0)
    values = [value for of_episode in credits for of_turn in of_episode for value in of_turn]
    return sqrt(fsum(value * value for value in values) / len(values))


def _computed_advantages(
    episodes: Sequence[Episode], advantages: Sequence[float], divisor: float | None
) -> list[list[list[float]]]:
    if divisor is None or not any(episode.token_rewards for episode in episodes):
        return [
            [[advantage] * len(turn.completion_ids) for turn in episode.turns]
            for episode, advantage in zip(episodes, advantages, strict=True)
        ]
    turns = max(len(episode.turns) for episode in episodes)
    means = [fsum(episode.rewards_before(turn) for episode in episodes) / len(episodes) for turn in range(turns)]
    return [
        [_of_turn(episode, turn, advantage, means[turn], divisor) for turn in range(len(episode.turns))]
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]


def _of_turn(episode: Episode, turn: int, advantage: float, mean: float, divisor: float) -> list[float]:
    tokens = len(episode.turns[turn].completion_ids)
    rewards = episode.token_rewards[turn] if episode.token_rewards else ()
    earlier = accumulate(rewards or (0.0,) * tokens, initial=episode.rewards_before(turn))
    return [advantage + (mean - before) / divisor for before, _ in zip(earlier, range(tokens), strict=False)]


def data_of(
    episode: Episode,
    advantages: Sequence[Sequence[float]],
    group: int,
    on_policy: bool,
    mask_truncated: bool,
) -> Iterator[Datum]:
    """The data of one episode. A turn joins the longest datum that its prompt continues. Together they count as one
    sequence: the share of each is that of its tokens.

    Args:
        advantages: for each turn, those of the tokens of its completion.
        mask_truncated: learn nothing from turns that the token limit cut off.
    """
    drafts: list[_Draft] = []
    for turn, values in zip(episode.turns, advantages, strict=True):
        continued = [draft for draft in drafts if draft.is_continued_by(turn.prompt_ids)]
        if continued:
            draft = max(continued, key=lambda each: len(each.ids))
        else:
            drafts.append(draft := _Draft())
        draft.add(turn, values, trains=not (mask_truncated and finish_reason(turn) is FinishReason.LENGTH))
    whole = fsum(weight for draft in drafts for weight in draft.weights)
    for draft in drafts:
        if any(draft.weights):
            # Without logprobs it is unknown what sampled a turn. The trainer's own logprobs take their place.
            yield draft.datum(group, on_policy or not draft.has_logprobs, fsum(draft.weights) / whole)


@dataclass(slots=True)
class _Draft:
    """A datum that later turns may continue."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    sampled: list[SampledSpan] = field(default_factory=list)
    has_logprobs: bool = True
    has_reference: bool = True

    def is_continued_by(self, prompt_ids: Sequence[int]) -> bool:
        return len(prompt_ids) > len(self.ids) and list(prompt_ids[: len(self.ids)]) == self.ids

    def add(self, turn: Turn, advantages: Sequence[float], trains: bool) -> None:
        context, completion = turn.prompt_ids[len(self.ids) :], turn.completion_ids
        at = len(self.ids) + len(context)
        self.ids += [*context, *completion]
        self.weights += [0.0] * (len(context) + len(completion))
        self.advantages += [0.0] * len(context) + [*advantages]
        self.has_logprobs = self.has_logprobs and bool(turn.sampling_logprobs)
        self.logprobs += [0.0] * len(context) + list(turn.sampling_logprobs or (0.0,) * len(completion))
        self.has_reference = self.has_reference and bool(turn.reference_logprobs)
        self.reference += [0.0] * len(context) + list(turn.reference_logprobs or (0.0,) * len(completion))
        for start, stop in sampled_spans(turn):
            self.weights[at + start : at + stop] = [1.0 if trains else 0.0] * (stop - start)
            self.sampled.append(SampledSpan(at + start, at + stop, turn.temperature, turn.adapter, finish_reason(turn)))

    def datum(self, group: int, on_policy: bool, share: float) -> Datum:
        return Datum(
            tuple(self.ids),
            tuple(self.weights),
            tuple(self.advantages),
            tuple(self.logprobs) if self.has_logprobs else (),
            reference_logprobs=tuple(self.reference) if self.has_reference else (),
            sampled=tuple(self.sampled),
            group=group,
            on_policy=on_policy,
            share=share,
        )
