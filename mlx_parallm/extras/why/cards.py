"""What is said of the way in which a version came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.core.json_values import ANSWER, Figure, JsonObject, UnixTime
from mlx_parallm.core.requests import Signal


@dataclass(frozen=True, slots=True)
class KeyPart:
    """What one API key has contributed."""

    __pydantic_config__ = ANSWER

    key: str | None
    """Its name; empty: the server has sampled for tasks of its own. null: it is not known, or it is of keys whose
    trajectories the asking key may not read, all of them together."""
    trajectories: int
    """Trajectories of it that were learnt from. An episode counts as one."""
    share: float
    """Its part, 0 to 1. Of an update: the sum of the shares of its trajectories. Of a version: the mean over its
    updates, each weighted by the length of its step, which is its learning rate times its step scale."""


@dataclass(frozen=True, slots=True)
class WhySample:
    """One answer of an update, or one episode."""

    __pydantic_config__ = ANSWER

    trajectory_id: str | None
    """The id of the answer, or of the last one of the episode; null if a client sent it with the update, or if the key
    may not read it."""
    key: str | None
    """The key that has sent it; as in `keys`."""
    readable: bool
    """Whether the asking key may read it. If not, only figures are here."""
    prompt: str
    """The end of its prompt, without special tokens."""
    answer: str
    """The beginning of the answer; of an episode, of the last one."""
    reward: Figure | None
    """Its reward; null if it had none."""
    advantage: Figure | None
    """How much better than expected it was: the mean over its tokens. null if nothing was learnt from it."""
    share: float
    """Its part of the update, 0 to 1: the sum of the absolute weights of its tokens in the loss, divided by that of all
    samples."""
    reason: str
    """Why nothing was learnt from it; empty if something was."""
    scoring_function: str
    """What rewarded it."""
    versions: Sequence[str]
    """The versions that sampled it; empty if they are not known."""
    sampled_at: UnixTime | None
    """When, in ISO-8601, UTC; null if that is not known."""


@dataclass(frozen=True, slots=True)
class WhyUpdate:
    """One update of a version."""

    __pydantic_config__ = ANSWER

    number: int
    """Its number among the changes of the adapter."""
    at: UnixTime
    """When it was made, in ISO-8601, UTC."""
    step: int
    """Steps of the optimizer up to it."""
    version: str | None
    """The version that was made of it; null if none was: it counts for the next one."""
    status: str
    """`published`, or `trained` without a version."""
    signal: Signal
    """What it learnt from."""
    learning_rate: Figure
    """The length of its step: the learning rate times the step scale."""
    reward_mean: Figure | None
    """The mean reward of its trajectories; null if they had none."""
    trajectories: int | None
    """Trajectories that it learnt from; null if that is not known."""
    left_out: int
    """Trajectories in it that it learnt nothing from."""
    forgotten: int
    """Trajectories that were removed from it later, on request. It was made again without them."""
    keys: Sequence[KeyPart]
    """The keys that have sent them."""
    scoring_functions: Sequence[str]
    """What rewarded them."""
    changed_settings: JsonObject
    """The settings that differ from those of the update before it, with their new values."""
    problem: str
    """Why its trajectories are not known; empty if they are."""
    samples: Sequence[WhySample]
    """Its trajectories, largest share first, if one update was asked for."""


@dataclass(frozen=True, slots=True)
class WhyVersion:
    """What a version consists of."""

    __pydantic_config__ = ANSWER

    version: str
    """The version; the adapter's name alone is the policy in training, of which no version was made yet."""
    base_model: str
    """Fingerprint of the base model."""
    start: str
    """The version that the updates start from, which none of them has made; empty: a new policy, which equals the base
    model."""
    missing: Sequence[int]
    """If the beginning of its history is not known: the first and the last number of the changes that are missing. Then
    `start` is not known either."""
    checkpoints: Sequence[str]
    """Its checkpoints."""
    updates_total: int
    """Updates that it consists of, as far as they are known."""
    trajectories: int
    """Trajectories that they learnt from, as far as they are known."""
    keys: Sequence[KeyPart]
    """The keys that have sent them, largest share first."""
    settings: JsonObject
    """The settings of its last update; empty if they are not known."""
    updates: Sequence[WhyUpdate]
    """The newest of its updates, or the one that was asked for; newest first."""


@dataclass(frozen=True, slots=True)
class WhyPush(WhySample):
    """A sample that pushed an answer."""

    update: int = 0
    """The number of its update."""
    score: Figure = 0.0
    """By how much the sample is estimated to have changed the log-probability of the answer, in nats: above 0 if it
    made the answer more likely. Of a pair of answers, the pair, with the chosen answer as the sample."""
    cosine: Figure = 0.0
    """How alike two directions are, -1 to 1: the one in which the sample has moved the policy, and the one in which the
    answer becomes more likely. It is the score without regard to the weight of the sample and the lengths."""


@dataclass(frozen=True, slots=True)
class UpdatePush:
    """What one update did to an answer, by its samples that were looked at."""

    __pydantic_config__ = ANSWER

    update: int
    """Its number."""
    score: Figure
    """The sum of the scores of its samples, in nats."""
    samples: int
    """Its samples that were looked at."""


@dataclass(frozen=True, slots=True)
class WhyAnswer:
    """Which samples pushed an answer most, by products of gradients. That is an estimate of the first order, at the
    weights of one moment. It does not say what the answer would be without a sample."""

    __pydantic_config__ = ANSWER

    version: str
    """The version that gave the answer."""
    weights: str
    """The policy at which gradients were computed: that version, or the nearest one whose weights are here."""
    preconditioned: bool
    """Whether gradients were scaled as AdamW scales them. If not, its state is not here."""
    ranked_by: str
    """`cosine` or `score`: what the samples are ranked by."""
    logprob: Figure
    """Log-probability of the answer at these weights, in nats."""
    samples_total: int
    """Samples that the version has learnt from, as far as they are known. A pair counts as one."""
    samples_unreadable: int
    """Samples that the key may not read, which are left out."""
    samples_looked_at: int
    """Samples that were looked at: those with the largest shares of the longest steps."""
    problems: Sequence[str]
    """What of the version's history is not known."""
    towards: Sequence[WhyPush]
    """The samples that pushed towards the answer most, the first one most."""
    away: Sequence[WhyPush]
    """Those that pushed away from it most, the first one most."""
    updates: Sequence[UpdatePush]
    """What each update did, newest first."""
