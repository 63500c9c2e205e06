"""Scorers by name: sums such as `0.8*exact + 0.2*regex`, the operator's reward, and how child processes load them.

A request names a built-in scorer, a package's own, a task of reasoning-gym, a reward model, or `reward`: that is the
operator's reward, whose terms may also be functions of files and modules, and judges. Requests cannot name these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConfigError, shown
from mlx_parallm.rl.scoring import gym
from mlx_parallm.rl.scoring.builtin import BUILTINS
from mlx_parallm.rl.scoring.judges import JUDGES, Judge
from mlx_parallm.rl.scoring.own_functions import load_function
from mlx_parallm.rl.scoring.sample import GroupScorer, Scorer, ScorerError, ScorerInput, as_number, unusable

GROUP = "mlx_parallm.scorers"
"""Entry points of a user's package: name = "module:callable". The names of built-in scorers take precedence."""

REWARD = "reward"
"""The name of the operator's reward in a request's `scoring_function`. No other scorer can have it."""

REWARD_MODEL = "reward_model:"
"""What the names of reward models begin with. The server's process computes their rewards, on the device; a scoring
process gets them with the samples."""

ANSWER = "answer"
"""The key of `metadata` for the right answer."""

_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}(?::[A-Za-z0-9_.-]{1,64})?"
_FUNCTION = r"[^*+:]+\.py:[A-Za-z_][A-Za-z0-9_]*"
_WEIGHT = r"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*\*\s*"
_MAX_TERMS = 16
_MAX_CHARACTERS = 512
_MAX_REWARD_CHARACTERS = 8192


# ---- names ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    weight: float
    scorer: str


def terms(text: str) -> tuple[Term, ...]:
    """The terms of one scorer's name, or of a weighted sum of names.

    `exact` is one term of weight 1. Every term of a sum is written weight*name, with any finite weight.

    Raises:
        InvalidRequestError: the text is neither a name nor a sum.
    """
    found = _split(text, _NAME, _MAX_CHARACTERS)
    if found is None:
        raise unusable(
            f"{shown(text)} cannot be read: give one name, or up to {_MAX_TERMS} terms with finite weights "
            "such as '0.8*exact + 0.2*regex'"
        )
    return found


def scorers_of(collection: CollectionSpec) -> list[str]:
    """The scorers that a collection names. Raises InvalidRequestError: they cannot be read."""
    return [] if collection.scorer is None else [term.scorer for term in terms(collection.scorer)]


def names_reward(collection: CollectionSpec) -> bool:
    """Whether the operator's reward is a part of the collection's scorer."""
    return REWARD in scorers_of(collection)


def lacks_answer(collection: CollectionSpec) -> bool:
    """Whether a built-in scorer of the collection reads `metadata.answer` and there is none."""
    return collection.metadata.get(ANSWER) is None and any(map(_reads_answer, scorers_of(collection)))


def terms_without_answer(collection: CollectionSpec) -> list[str]:
    """The scorers of the collection that do not read `metadata.answer`."""
    return [name for name in scorers_of(collection) if not _reads_answer(name)]


def _reads_answer(scorer: str) -> bool:
    return scorer in BUILTINS and BUILTINS[scorer].key == ANSWER


def is_function(scorer: str) -> bool:
    """Whether a term of the operator's reward names a function of a file or a module."""
    return ":" in scorer and not scorer.startswith((gym.PREFIX, REWARD_MODEL))


def _split(text: str, name: str, most: int) -> tuple[Term, ...] | None:
    """The terms of a text whose names match the regular expression `name`. None: it is no sum, or has more than `most`
    characters."""
    if len(text) > most:
        return None
    if re.fullmatch(name, text):
        return (Term(1.0, text),)
    term, found, at = re.compile(rf"{_WEIGHT}({name})\s*"), [], 0
    while match := term.match(text, at):
        found.append(Term(float(match[1]), match[2]))
        at = match.end()
        if at == len(text) or text[at] != "+":
            break
        at += 1
    if not match or at != len(text) or len(found) > _MAX_TERMS or not all(math.isfinite(t.weight) for t in found):
        return None
    return tuple(found)


# ---- the operator's reward -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The operator's reward: one term such as `rewards.py:score`, or a weighted sum such as
    `0.7*rewards.py:correct + 0.2*judge + 0.1*length`. A file in a term has its whole path."""

    terms: tuple[Term, ...]
    judge: Judge = field(default_factory=Judge)

    @property
    def asks_judge(self) -> bool:
        return any(term.scorer in JUDGES for term in self.terms)

    @property
    def functions(self) -> tuple[str, ...]:
        """The terms that name code."""
        return tuple(term.scorer for term in self.terms if is_function(term.scorer))

    @property
    def scorers(self) -> tuple[str, ...]:
        """The terms that requests could name too."""
        return tuple(t.scorer for t in self.terms if t.scorer not in JUDGES and not is_function(t.scorer))

    @property
    def definition(self) -> str:
        """All that rewards depend on: terms, judge, and the text of functions' files, but not what these import.

        Raises:
            OSError: a file cannot be read.
        """
        files = [Path(name.rpartition(":")[0]) for name in self.functions]
        sources = [file.read_text("utf-8", "replace") for file in files if file.suffix == ".py"]
        return repr((self.terms, self.judge, sources))  # without the judge's key, which is not in its repr

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RewardSpec:
        """The reward of which `value` has the fields, as JSON has them."""
        return RewardSpec(tuple(Term(**term) for term in value["terms"]), Judge(**value["judge"]))


def read_reward(text: str) -> tuple[Term, ...]:
    """The terms of the operator's reward.

    Raises:
        ConfigError: the text cannot be read.
    """
    found = _split(text, rf"(?:{_FUNCTION}|{_NAME})", _MAX_REWARD_CHARACTERS)
    if found is None or any(term.scorer == REWARD or term.scorer.endswith(".py") for term in found):
        raise ConfigError(
            f"reward: {shown(text)} cannot be read: give FILE.py:NAME, judge, rank or a scorer's name, or a sum "
            "such as '0.8*rewards.py:correct + 0.2*judge'"
        )
    return tuple(Term(term.weight, _with_whole_path(term.scorer.strip())) for term in found)


def _with_whole_path(scorer: str) -> str:
    file, _, name = scorer.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{name}" if re.fullmatch(_FUNCTION, scorer) else scorer


# ---- loading: runs a scorer's code, so only child processes do it --------------------------------


@lru_cache(maxsize=64)
def load(name: str, reward: RewardSpec | None = None) -> GroupScorer:
    """The scorer of a name that a request may give, or of a weighted sum of such names.

    Raises:
        Exception: a package's scorer and a function of a file may raise anything when they are imported.
    """
    return _sum([(term.weight, _term(term.scorer, reward)) for term in terms(name)])


def _term(name: str, reward: RewardSpec | None) -> GroupScorer:
    if name != REWARD:
        return _of_group(load_one(name))
    if reward is None:
        raise unusable(f"there is no {REWARD} here")
    return _sum([(term.weight, _reward_term(term.scorer, reward.judge)) for term in reward.terms])


def _reward_term(name: str, judge: Judge) -> GroupScorer:
    """A term of the operator's reward."""
    if name in JUDGES:
        return JUDGES[name](judge)
    return load_function(name) if is_function(name) else _of_group(load_one(name))


def load_one(name: str) -> Scorer:
    """The scorer of a name that a request may give, which is no sum.

    Raises:
        Exception: a package's scorer may raise anything when it is imported.
    """
    if name in BUILTINS:
        return BUILTINS[name].load()
    if name.startswith(gym.PREFIX):
        return gym.scorer(name.removeprefix(gym.PREFIX))
    if name.startswith(REWARD_MODEL):
        return _reward_model(name)
    for point in entry_points(group=GROUP, name=name):
        scorer: Scorer = point.load()
        return scorer
    raise unusable(f"{name} is unknown")


def _reward_model(name: str) -> Scorer:
    def score(completion: ScorerInput) -> float:
        if name not in completion.reward_models:
            raise ScorerError(f"{name} has not scored this answer")
        return completion.reward_models[name]

    return score


def _of_group(scorer: Scorer) -> GroupScorer:
    return lambda group: [as_number(scorer(sample)) for sample in group]


def _sum(parts: Sequence[tuple[float, GroupScorer]]) -> GroupScorer:
    """The weighted sum of scorers. One that does not apply to a sample adds nothing to its reward."""

    def score(group: Sequence[ScorerInput]) -> list[float | None]:
        columns = [(weight, scorer(group)) for weight, scorer in parts]
        return [_total([(weight, rewards[at]) for weight, rewards in columns]) for at in range(len(group))]

    return score


def _total(parts: Sequence[tuple[float, float | None]]) -> float | None:
    applied = [weight * reward for weight, reward in parts if reward is not None]
    return math.fsum(applied) if applied else None
