"""EnvironmentRollouts: draws groups of trajectories on the tasks of an environment.

A training run and a server that collects by itself share it.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from mlx_parallm.app.build import Served
from mlx_parallm.app.inference import build_inference
from mlx_parallm.app.training import TrainingRuntime, reward_of
from mlx_parallm.config import Config
from mlx_parallm.core import BASE_ADAPTER, Event, GenerationRequest, LevelCard, TrainingEvent, Trajectory
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.rl.curriculum import Curriculum
from mlx_parallm.rl.environments import Environment, Task, is_of_episodes, read_system_prompt
from mlx_parallm.rl.environments.thread import EnvironmentThread, in_daemon_thread
from mlx_parallm.rl.episodes import Episodes
from mlx_parallm.rl.held_out import without
from mlx_parallm.rl.inference.engine import InferenceEngine
from mlx_parallm.rl.rollouts import DrawEpisodes, DrawResult, Rollouts, RolloutSettings
from mlx_parallm.rl.scoring.catalogue import ScorerCatalogue

_log = logging.getLogger(__name__)


class EnvironmentRollouts:
    """Draws from the inference engine of the configuration, and collects what it draws. Event loop's thread only.

    Args:
        on_drawn: called with the number of answers or episodes that have just ended.
    """

    def __init__(
        self,
        config: Config,
        served: Served,
        training: TrainingRuntime,
        source: Environment,
        group_size: int,
        on_drawn: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._config, self._served, self._training = config, served, training
        self._source, self._group_size, self._on_drawn = source, group_size, on_drawn
        self._thread = EnvironmentThread()
        self._inference: InferenceEngine | None = None
        self._rollouts: Rollouts | None = None
        self._curriculum: Curriculum | None = None
        self._taken = 0

    async def open(self, taken: int, state: Mapping[str, float] | None = None) -> None:
        """Gets the environment's tasks after the first `taken`. Nothing is drawn yet.

        Args:
            state: what `settle` returned when so many were taken.

        Raises:
            ConfigError: the tasks cannot be scored.
        """
        tasks = await in_daemon_thread(partial(self._tasks, taken, state))
        self._taken = taken
        self._rollouts = self._build(tasks, taken)
        if isinstance(tasks, Curriculum):
            self._curriculum = tasks
            self._training.service.add_sink(self._learn_rewards)

    async def open_inference(self) -> None:
        """Raises ConfigError: the engine cannot draw what training needs."""
        self._inference = build_inference(self._config, self._served)
        await self._inference.open(self._training.service.status().current or BASE_ADAPTER)

    @property
    def taken(self) -> int:
        """Tasks taken from the environment so far, those of earlier processes included."""
        return self._taken if self._rollouts is None else self._rollouts.taken

    @property
    def levels(self) -> tuple[LevelCard, ...]:
        """The levels of the curriculum, as far as they are known; empty without a curriculum."""
        return self._curriculum.cards if self._curriculum else ()

    def settle(self) -> Mapping[str, float]:
        """Counts the rewards that have come. Not while tasks are drawn.

        Returns:
            What the curriculum needs to go on from here in another process; empty without a curriculum.
        """
        if self._curriculum is None:
            return {}
        self._curriculum.settle()
        return self._curriculum.state

    async def draw(self, groups: int) -> DrawResult:
        """Answers the next tasks with the live version; see `Rollouts.draw`."""
        assert self._rollouts is not None  # `open` was called
        return await self._rollouts.draw(groups, str(self._training.service.status().current or BASE_ADAPTER.name))

    async def close(self) -> None:
        """Call it after every `draw` has ended."""
        self._thread.close()
        if self._inference is not None:
            await self._inference.close()

    # -- parts -----------------------------------------------------------------------------------

    def _tasks(self, taken: int, state: Mapping[str, float] | None) -> Iterator[Task]:
        """The environment's tasks after the first `taken`. Raises ConfigError: they cannot be scored."""
        tasks = without(self._source.tasks(self._config.rl_training.seed), self._training.held_out)
        first = next(tasks)
        if first.collection.scorer is not None or not is_of_episodes(self._source):
            try:
                ScorerCatalogue(reward_of(self._config)).check(first.collection)
            except InvalidRequestError as error:
                raise ConfigError(f"environment: {error}") from error
        tasks, curriculum = itertools.chain([first], tasks), self._config.rl_training.curriculum
        if not curriculum.enabled:
            return itertools.islice(tasks, taken, None)
        if first.level is None:
            _log.warning("curriculum: the first task has no level; all tasks without one count as one level")
        return Curriculum(tasks, curriculum, self._config.rl_training.seed, taken, state)

    def _learn_rewards(self, event: TrainingEvent) -> None:
        """Notes the rewards of the tasks of this run."""
        if event.kind == "scored" and event.data.get("complete"):
            self._learn(event.data["group_id"], event.data.get("rewards", ()))

    def _learn(self, group_id: str, rewards: Collection[float]) -> None:
        assert self._served.run is not None
        group = re.fullmatch(rf"(?:group-)?rollout-{self._served.run.id}-(\d+)(?:-\d+)?", group_id)
        if group is not None and self._curriculum is not None:
            self._curriculum.learn(int(group[1]), [*rewards])

    def _build(self, tasks: Iterator[Task], taken: int) -> Rollouts:
        training, served = self._config.rl_training, self._served
        assert served.run is not None  # what trains keeps checkpoints
        settings = RolloutSettings(
            self._group_size,
            training.max_completion_tokens,
            training.rollout_temperature,
            read_system_prompt(training.system_prompt),
            seed=training.seed,
            run=served.run.id,
            taken=taken,
            timeout_s=training.rollout_timeout_s,
        )
        return Rollouts(
            self._generate,
            served.adapters,
            served.tokenizer,
            tasks,
            settings,
            self._on_drawn,
            self._draw_episodes(settings),
        )

    def _draw_episodes(self, settings: RolloutSettings) -> DrawEpisodes | None:
        if not is_of_episodes(self._source):
            return None
        episodes = Episodes(
            self._source,
            self._thread,
            self._ask,
            self._collect_episodes,
            self._served.tokenizer,
            settings,
            self._on_drawn,
        )
        return episodes.draw

    async def _collect_episodes(self, trajectories: Sequence[Trajectory], rewards: Mapping[str, float]) -> str:
        """See `Collector.collect_episodes`. A group without a signal ends there without an event, so its rewards are
        noted here. Rewards of a scoring function come as an event."""
        self._learn(trajectories[0].group_id, rewards.values())
        return await self._training.service.collect_episodes(trajectories, rewards)

    def _generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Draws from the inference engine, and collects what it draws."""
        return self._served.collect(request, self._ask(request))

    def _ask(self, request: GenerationRequest) -> AsyncIterator[Event]:
        assert self._inference is not None  # `open_inference` was called
        return self._inference.generate(request)
