"""LessonProgress: what a lesson has taught so far, and when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mlx_parallm.extras.lessons.cards import LessonAnswer, LessonOutcome, LessonPoint, LessonPrompt, LessonShowing
from mlx_parallm.rl.evaluation import interval

LEARNT = 0.95
"""Mean reward of the last answers at which a lesson is learnt."""

RARE = 0.1
"""Mean reward of an update's worth of answers below which examples help."""

_LEARNT_UPDATES, _SILENT_UPDATES = 2, 3
"""A lesson is learnt, or has nothing to learn from, if that was so for the answers of so many updates. A fourth update
without a signal would be skipped; see `updates.selection`."""

_MAX_POINTS = 1000
_MAX_FAILURES = 3
"""Groups in a row that could not be scored, after which the lesson fails."""

_UNREWARDED = (
    "No answer has earned a reward yet, so there is nothing to learn from. Choose prompts whose answers meet the rule "
    "now and then, ask for it in one of the prompts, or make the rule easier."
)
_ALIKE = (
    "All answers to a prompt earn the same reward, so there is nothing to choose from. Choose a rule that tells "
    "answers to one prompt apart."
)
_KNOWN = "The model does this already. Choose a rule that its answers rarely meet."


class LessonProgress:
    """Takes note of groups that were scored and of updates that were made. Event loop's thread only.

    Attributes:
        updates: those that were made.
        examples: answers that were imitated because hardly any answer had earned a reward, up to now.
        showing: the examples that are imitated now; None: there are none.
        outcome: why the lesson should end; None: it should not.
        reason: the same in words.

    Args:
        prompts: the conversations that are answered.
        per_update: answers that make an update.
        most_updates: updates after which the lesson ends; None: it goes on.
    """

    def __init__(
        self, prompts: Iterable[tuple[Mapping[str, str], ...]], per_update: int, most_updates: int | None
    ) -> None:
        self.updates = self.examples = 0
        self.showing: LessonShowing | None = None
        self.outcome: LessonOutcome | None = None
        self.reason = ""
        self._per_update, self._most_updates = per_update, most_updates
        self._prompts = [LessonPrompt(messages) for messages in prompts]
        self._points: deque[LessonPoint] = deque(maxlen=_MAX_POINTS)
        self._rewards: list[float] = []  # since the last update
        self._recent: deque[float] = deque(maxlen=_LEARNT_UPDATES * per_update)  # the last rewards
        self._silent = 0  # answers since the last group whose rewards differ
        self._failures = 0

    @property
    def prompts(self) -> tuple[LessonPrompt, ...]:
        """The prompts, with the first answers and the newest ones."""
        return tuple(self._prompts)

    @property
    def points(self) -> tuple[LessonPoint, ...]:
        """The curve. The last point is of the answers since the last update, if there are any."""
        return (*self._points, self._point()) if self._rewards else tuple(self._points)

    def scored(self, number: int, answers: Sequence[LessonAnswer]) -> None:
        """The group of task `number` has its rewards."""
        place, rewards = number % len(self._prompts), [answer.reward for answer in answers]
        prompt = self._prompts[place]
        self._prompts[place] = replace(prompt, before=prompt.before or tuple(answers), now=tuple(answers))
        self._rewards += rewards
        self._recent.extend(rewards)
        self._silent = 0 if len(set(rewards)) > 1 else self._silent + len(rewards)
        self._failures = 0
        if len(self._recent) == self._recent.maxlen and fmean(self._recent) >= LEARNT:
            self.end(LessonOutcome.LEARNT, f"{LEARNT:.0%} of the reward or more was earned by the last answers")
        elif self._silent >= _SILENT_UPDATES * self._per_update:
            self.end(LessonOutcome.NO_SIGNAL, f"the last {self._silent} answers to each prompt were rewarded alike")

    @property
    def needs_examples(self) -> bool:
        """Whether so few of the last answers have earned a reward that sampling alone would take long."""
        return len(self._recent) >= self._per_update and fmean(self._recent) < RARE

    def shown(self) -> None:
        """Examples were imitated. What was sampled before says nothing any more."""
        self._silent = 0
        self._recent.clear()

    def failed(self, reason: str) -> None:
        """A group could not be sampled or scored."""
        self._failures += 1
        if self._failures == _MAX_FAILURES:
            self.end(LessonOutcome.FAILED, reason)

    def updated(self) -> None:
        """An update has changed the adapter."""
        if self._rewards:
            self._points.append(self._point())
            self._rewards = []
        self.updates += 1
        if self.updates == self._most_updates:
            self.end(LessonOutcome.FINISHED, f"its {self.updates} updates are made")

    def end(self, outcome: LessonOutcome, reason: str) -> None:
        """The lesson should end, unless it should already for another reason."""
        if self.outcome is None:
            self.outcome, self.reason = outcome, reason

    def _point(self) -> LessonPoint:
        low, high = interval(self._rewards)
        return LessonPoint(self.updates, fmean(self._rewards), low, high, len(self._rewards), time.time())

    @property
    def advice(self) -> str:
        """What to change, for people; empty if there is nothing, or if examples may help."""
        if self.outcome is LessonOutcome.LEARNT:
            return "" if self.updates else _KNOWN
        if self.showing is not None or self._silent < self._per_update or fmean(self._recent) >= LEARNT:
            return ""
        return _ALIKE if any(self._recent) else _UNREWARDED
