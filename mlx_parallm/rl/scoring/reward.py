"""The configured reward, and the scorers that a name stands for.

A reward is one term or a weighted sum: `rewards.py:score`, or `0.7*rewards.py:correct + 0.2*judge + 0.1*length`. Its
terms are functions of files and modules, judges, and all scorers that requests can name. Requests call the whole of it
`reward`; they cannot name its terms that are code. Only child processes load scorers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_parallm.core import CollectionSpec
from mlx_parallm.errors import ConfigError, InvalidRequestError, shown
from mlx_parallm.rl.scoring import gym, reward_models
from mlx_parallm.rl.scoring.functions import load_function
from mlx_parallm.rl.scoring.judges import JUDGES, Judge
from mlx_parallm.rl.scoring.registry import NAME, PARAM, Term, load_one, split_terms, terms
from mlx_parallm.rl.scoring.sample import GroupScorer, Scorer, ScorerInput, as_number

REWARD = "reward"
"""The name of the configured reward in a request's `scoring_function`. No other scorer can have it."""

_FUNCTION = r"[^*+:]+\.py:[A-Za-z_][A-Za-z0-9_]*"
_MAX_CHARACTERS = 8192


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The configured reward. A file in a term has its whole path."""

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RewardSpec:
        return RewardSpec(tuple(Term(**term) for term in value["terms"]), Judge(**value["judge"]))


def is_function(scorer: str) -> bool:
    """Whether a term of the configured reward names a function of a file or a module."""
    return ":" in scorer and not scorer.startswith((gym.PREFIX, reward_models.PREFIX))


def read_reward(text: str) -> tuple[Term, ...]:
    """The terms of the configured reward.

    Raises:
        ConfigError: the text cannot be read.
    """
    found = split_terms(text, rf"(?:{_FUNCTION}|{NAME})", _MAX_CHARACTERS)
    if found is None or any(term.scorer == REWARD or term.scorer.endswith(".py") for term in found):
        raise ConfigError(
            f"reward: {shown(text)} cannot be read: give FILE.py:NAME, judge, rank or a scorer's name, or a sum "
            "such as '0.8*rewards.py:correct + 0.2*judge'"
        )
    return tuple(Term(term.weight, _with_whole_path(term.scorer.strip())) for term in found)


def _with_whole_path(scorer: str) -> str:
    file, _, name = scorer.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{name}" if re.fullmatch(_FUNCTION, scorer) else scorer


def names_reward(collection: CollectionSpec) -> bool:
    """Whether the configured reward is a part of the collection's scorer."""
    return collection.scorer is not None and any(term.scorer == REWARD for term in terms(collection.scorer))


# ---- loading -------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def load(name: str, reward: RewardSpec | None = None) -> GroupScorer:
    """The scorer of a name that a request may give, or of a weighted sum of such names.

    Raises:
        Exception: a package's scorer and a function of a file may raise anything when they are imported.
    """
    return _sum([(term.weight, _named(term.scorer, reward)) for term in terms(name)])


def load_term(scorer: str, judge: Judge) -> GroupScorer:
    """A term of the configured reward."""
    if scorer in JUDGES:
        return JUDGES[scorer](judge)
    return load_function(scorer) if is_function(scorer) else _of_group(load_one(scorer))


def _named(name: str, reward: RewardSpec | None) -> GroupScorer:
    if name != REWARD:
        return _of_group(load_one(name))
    if reward is None:
        raise InvalidRequestError(f"{PARAM}: there is no {REWARD} here", PARAM)
    return _sum([(term.weight, load_term(term.scorer, reward.judge)) for term in reward.terms])


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
