"""Curriculum: tasks are drawn by what the recent tasks of their levels taught.

    environment ── tasks ──▶ Curriculum ── tasks of drawn levels ──▶ Rollouts
                                 ▲                                      │
                                 └──────── rewards of their groups ─────┘

A level's share of the tasks is, besides a floor, proportional to n s: n is how often the environment has the level, and
s is the share of its recent tasks whose group had different rewards. Groups whose rewards are all equal teach nothing,
so levels that are always or never solved come rarely, and one that is solved now and then comes often, however low its
mean reward still is. If s is the same for all levels, tasks come as often as in the environment.

Rewards arrive at any time. So that the order of the tasks does not depend on it, the reward of a task counts from the
`lag`-th task after it on, and not before. A later one counts on arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from statistics import fmean
from threading import Lock

from mlx_parallm.config import CurriculumConfig
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.status import LEVEL_PREFIX, LevelCard

WITHOUT, OTHER = "(none)", "(other)"
"""The level of tasks that have none, and that of tasks of further levels when there are `MOST_LEVELS`."""

MOST_LEVELS = 64
_AHEAD = 128
"""Tasks of the environment that are looked at before they are drawn, to know its levels and how frequent they are."""

_MOST_LOOKS = 1000
"""Further tasks that are looked at for one of the drawn level, before one of another level is taken."""

_MOST_WAITING = 256
"""Tasks of one level that wait to be drawn. If there are more, the oldest are left out."""

_MOST_UNREWARDED = 4096
"""Tasks whose rewards are still awaited. If there are more, those of the oldest are not counted."""

_MOST_AHEAD = 512
"""Tasks taken since the last `settle` that may wait again in a state."""

LAG = 8
"""Tasks after which a reward counts, at least."""

_PRIOR = 0.5
"""Success of a level that was never tried, and its `s`. It counts as one task, so that new levels are tried soon."""

_SKIPPED, _SEEN, _TAKEN, _LAG = (LEVEL_PREFIX + name for name in ("skipped", "seen", "taken", "lag"))
"""Keys of a state that belong to no level."""

_CAME, _MEAN = (LEVEL_PREFIX + name for name in ("came", "mean"))
"""Keys of a reward that has come and does not count yet, before a number: that of its task modulo the lag. The first
one's value is twice the place of its level, + 1 if its answers had different rewards; -1 if there is none."""


@dataclass(slots=True)
class _Level:
    """`rewards` / `weight` is the success, and `signals` / `weight` is `s`. `waiting`: the newest tasks of the level,
    oldest first."""

    name: str
    seen: int = 0
    drawn: int = 0
    rewards: float = _PRIOR
    signals: float = _PRIOR
    weight: float = 1.0
    waiting: deque[Task] = field(default_factory=deque)

    def learn(self, reward: float, differ: bool, memory: int) -> None:
        """Counts the mean reward of a task, and whether its answers had different rewards."""
        keep = 1 - 1 / memory
        self.rewards = keep * self.rewards + reward
        self.signals = keep * self.signals + differ
        self.weight = keep * self.weight + 1

    @property
    def success(self) -> float:
        return self.rewards / self.weight

    @property
    def promise(self) -> float:
        """How much the tasks of the level may teach."""
        return self.seen * self.signals / self.weight


@dataclass(frozen=True, slots=True)
class _Reward:
    """The rewards of one task. `differ`: its answers had different rewards."""

    level: str
    mean: float
    differ: bool


class Curriculum(Iterator[Task]):
    """The tasks of an environment, in an order that depends on their rewards.

    It is the same order whenever the seed, the environment and the rewards are the same, and each reward comes before
    the `lag`-th task after its own is taken. `next` may run on any thread, but not on two at once.

    Args:
        tasks: of the environment, from its first one.
        taken: tasks that were taken before.
        state: what `state` was when the last of them was taken or before. Those taken since are taken again, and left
            out. If it lacks the curriculum, the curriculum begins after the first `taken` tasks.
        lag: the reward of a task counts from the choice of so many tasks after it on.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        settings: CurriculumConfig,
        seed: int,
        taken: int = 0,
        state: Mapping[str, float] | None = None,
        lag: int = LAG,
    ) -> None:
        self._settings, self._seed, self._lag = settings, seed, lag
        self._levels: dict[str, _Level] = {}
        self._unrewarded: dict[int, str] = {}  # level by number of the task, oldest first
        self._rewarded = deque[tuple[int, float, bool]]()  # not looked at yet; any thread adds to it
        self._came: dict[int, _Reward] = {}  # by number of the task; those that may be needed for a state
        self._counted: set[int] = set()  # of `_came`
        self._ahead: dict[int, Mapping[str, float]] = {}  # the state before each task since the last `settle`
        self._cards: tuple[LevelCard, ...] = ()
        self._state: Mapping[str, float] = {}
        self._drawing = Lock()
        state = state if state and _SEEN in state else {_SKIPPED: taken, _SEEN: 0}
        self._skipped, self._seen = int(state[_SKIPPED]), 0
        self._taken = int(state.get(_TAKEN, taken))
        self._ended = False
        deque(islice(tasks, self._skipped), maxlen=0)
        self._tasks = tasks
        self._restore(state)
        while self._taken < taken:
            with suppress(Exception):  # what the environment raises takes the place of a task
                next(self)
        self.settle()

    @property
    def cards(self) -> tuple[LevelCard, ...]:
        """The levels that are known, in the order of their first tasks, with all rewards that have come; the shares are
        those of the next task. Any thread may read them."""
        return self._cards

    @property
    def state(self) -> Mapping[str, float]:
        """All that another process needs to continue from where rewards were looked at last. Any thread may read it."""
        return self._state

    @property
    def settled_tasks(self) -> int:
        """Tasks that were taken before `state`."""
        return int(self._state[_TAKEN])

    # -- rewards ---------------------------------------------------------------------------------

    def learn(self, number: int, rewards: Sequence[float]) -> None:
        """Notes the rewards of a task by its number, 0 the first of the run."""
        if rewards:
            mean = fmean(min(max(reward, 0.0), 1.0) for reward in rewards)
            self._rewarded.append((number, mean, max(rewards) > min(rewards)))

    def settle(self, before: int | None = None) -> None:
        """Looks at the rewards that have come. `next` does so too; while it is at work on another thread, this returns
        at once.

        `before`: in `state`, this task and those that were taken after it wait again. None: none does.
        """
        if self._drawing.acquire(blocking=False):
            try:
                self._look_at_rewards()
                self._note_state(self._taken if before is None else before)
                self._forget(self._taken if before is None else before)
            finally:
                self._drawing.release()

    def _look_at_rewards(self) -> None:
        """Counts the rewards that have come and count for the next task, in the order of their tasks."""
        for number, mean, differ in [self._rewarded.popleft() for _ in range(len(self._rewarded))]:
            if (level := self._unrewarded.pop(number, None)) is not None:
                self._came[number] = _Reward(level, mean, differ)
        for number in sorted(self._came.keys() - self._counted):
            if number <= self._taken - self._lag:
                one = self._came[number]
                self._levels[one.level].learn(one.mean, one.differ, self._settings.memory)
                self._counted.add(number)

    def _note_state(self, before: int) -> None:
        """Makes `state` and `cards`."""
        state = self._ahead.get(before) or self._levels_state()
        self._state = {**state, **self._rewards_state(before)}
        known = {name: replace(level) for name, level in self._levels.items()}
        for number in sorted(self._came.keys() - self._counted):
            one = self._came[number]
            known[one.level].learn(one.mean, one.differ, self._settings.memory)
        self._cards = tuple(
            LevelCard(level.name, level.success, share, level.drawn)
            for level, share in zip(known.values(), self._shares(), strict=True)
        )

    def _forget(self, before: int) -> None:
        """Forgets what only states from before this task need."""
        self._ahead = {number: state for number, state in self._ahead.items() if number >= before}
        self._came = {number: one for number, one in self._came.items() if number >= before - self._lag}
        self._counted &= self._came.keys()

    def _levels_state(self) -> Mapping[str, float]:
        """The state before the next task is taken, without the rewards that do not count for it."""
        state: dict[str, float] = {_SKIPPED: self._skipped, _SEEN: self._seen, _TAKEN: self._taken, _LAG: self._lag}
        for level in self._levels.values():
            values = {
                "drawn": level.drawn,
                "rewards": level.rewards,
                "signals": level.signals,
                "weight": level.weight,
                "waiting": len(level.waiting),
            }
            state |= {f"{LEVEL_PREFIX}{level.name}/{key}": value for key, value in values.items()}
        return state

    def _rewards_state(self, before: int) -> Mapping[str, float]:
        """The rewards that have come and do not count yet for this task, for a state. It has all keys, because a later
        state replaces only what it has."""
        places = {name: place for place, name in enumerate(self._levels)}
        counted = before - self._lag
        state: dict[str, float] = {}
        for number in range(counted, before):
            one, slot = self._came.get(number) if number > counted else None, number % self._lag
            state[f"{_CAME}{slot}"] = -1 if one is None else 2 * places[one.level] + one.differ
            state[f"{_MEAN}{slot}"] = 0.0 if one is None else one.mean
        return state

    # -- tasks -----------------------------------------------------------------------------------

    def __next__(self) -> Task:
        """Raises StopIteration: the environment has no more tasks. Raises what the environment raises."""
        with self._drawing:
            return self._next()

    def _next(self) -> Task:
        self._look_at_rewards()
        self._ahead[self._taken] = self._levels_state()
        if len(self._ahead) > _MOST_AHEAD:
            self._forget(self._taken - _MOST_AHEAD // 2)
        number, self._taken = self._taken, self._taken + 1
        while not self._ended and self._seen < self._taken - self._skipped + _AHEAD:
            self._look()
        level = self._drawn_level(number)
        task = level.waiting.popleft()
        level.drawn += 1
        self._unrewarded[number] = level.name
        while len(self._unrewarded) > _MOST_UNREWARDED:
            del self._unrewarded[next(iter(self._unrewarded))]
        self._look_at_rewards()
        self._note_state(self._taken)
        return task

    def _look(self) -> None:
        """Puts the next task of the environment into its level."""
        try:
            self._seen += 1
            task = next(self._tasks)
        except StopIteration:
            self._ended = True
            return
        name = WITHOUT if task.level is None else task.level
        if name not in self._levels and len(self._levels) >= MOST_LEVELS:
            name = OTHER
        level = self._levels.setdefault(name, _Level(name))
        level.seen += 1
        level.waiting.append(task)
        if len(level.waiting) > _MOST_WAITING:
            level.waiting.popleft()

    def _drawn_level(self, number: int) -> _Level:
        """A level that has a task waiting, chosen by the shares."""
        levels = [*self._levels.values()]
        if not levels:
            raise StopIteration
        chosen = Random(f"curriculum/{self._seed}/{number}").choices(levels, self._shares())[0]
        looks = 0
        while not chosen.waiting and not self._ended and looks < _MOST_LOOKS:
            self._look()
            looks += 1
        if not chosen.waiting:
            chosen = max(self._levels.values(), key=lambda level: len(level.waiting))
        if not chosen.waiting:
            raise StopIteration
        return chosen

    def _shares(self) -> list[float]:
        """The probabilities of the levels."""
        levels, floor = self._levels.values(), self._settings.floor
        seen, promised = sum(level.seen for level in levels), sum(level.promise for level in levels)
        if not promised:
            return [level.seen / seen for level in levels]
        return [floor * level.seen / seen + (1 - floor) * level.promise / promised for level in levels]

    def _restore(self, state: Mapping[str, float]) -> None:
        """Looks at the tasks that were looked at before, and leaves those that were waiting."""
        while not self._ended and self._seen < state[_SEEN]:
            with suppress(Exception):  # what the environment raises took the place of a task then too
                self._look()
        for level in self._levels.values():
            of_level = LEVEL_PREFIX + level.name
            level.drawn = int(state.get(f"{of_level}/drawn", 0))
            level.rewards = state.get(f"{of_level}/rewards", _PRIOR)
            level.weight = state.get(f"{of_level}/weight", 1.0)
            level.signals = state.get(f"{of_level}/signals", _PRIOR * level.weight)
            while len(level.waiting) > state.get(f"{of_level}/waiting", 0):
                level.waiting.popleft()
        names, lag = [*self._levels], int(state.get(_LAG, self._lag))
        for number in range(max(0, self._taken - lag), self._taken):
            came = int(state.get(f"{_CAME}{number % lag}", -1))
            if 0 <= came < 2 * len(names):
                mean = state.get(f"{_MEAN}{number % lag}", 0.0)
                self._came[number] = _Reward(names[came // 2], mean, bool(came % 2))
