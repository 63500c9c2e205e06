"""What scores the answers of a lesson's rule, and the tasks that its prompts are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import assert_never

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.extras.lessons.cards import LessonRule, LessonSpec, RuleKind
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.scoring.judges import INSTRUCTION, JUDGE

_LEAST_PER_UPDATE = 24
"""Answers that an update takes at least. With fewer, its direction is mostly chance."""


def collection_of(rule: LessonRule) -> CollectionSpec:
    """How the answers of a rule are scored."""
    match rule.kind:
        case RuleKind.WORD:
            return CollectionSpec("regex", {"pattern": word_pattern(rule.text)})
        case RuleKind.PATTERN:
            return CollectionSpec("regex", {"pattern": rule.text})
        case RuleKind.JUDGE:
            return CollectionSpec(JUDGE, {INSTRUCTION: rule.text})
        case _:
            assert_never(rule.kind)


def word_pattern(text: str) -> str:
    """A regular expression for a word or phrase in upper or lower case, which is no part of a longer word. Between the
    words of a phrase may be any white space."""
    words = r"\s+".join(re.escape(word) for word in text.split())
    start, end = text.strip()[0], text.strip()[-1]
    return f"(?i){_NO_LETTER_BEFORE if _in_word(start) else ''}{words}{_NO_LETTER_AFTER if _in_word(end) else ''}"


_NO_LETTER_BEFORE, _NO_LETTER_AFTER = r"(?<!\w)", r"(?!\w)"


def _in_word(character: str) -> bool:
    return re.match(r"\w", character) is not None


def tasks_of(spec: LessonSpec) -> Iterator[Task]:
    """The prompts in turn, without end: task n is prompt n % len(prompts)."""
    collection = collection_of(spec.rule)
    return itertools.cycle([Task(prompt, collection) for prompt in spec.prompts])


def answers_per_update(spec: LessonSpec) -> int:
    """The answers of an update: a group for each prompt, or for each prompt the same number of groups if these are too
    few."""
    of_all = len(spec.prompts) * spec.group_size
    return of_all * -(-_LEAST_PER_UPDATE // of_all)
