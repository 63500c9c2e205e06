"""EnvironmentRollouts: samples groups of trajectories on the tasks of an environment.

A training run and a server that collects by itself share it.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, cast

from mlx_parallm.config import Config, EngineKind
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import Event, GenerationRequest
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras_table import needed
from mlx_parallm.rl.environments import Environment, Task, is_of_episodes, read_system_prompt
from mlx_parallm.rl.environments.thread import in_daemon_thread
from mlx_parallm.rl.rollouts.answers import (
    InferenceEngine,
    OnSampled,
    RolloutResult,
    Rollouts,
    RolloutSettings,
    SampleEpisodes,
    TakenTasks,
)
from mlx_parallm.rl.rollouts.episodes import Episodes
from mlx_parallm.rl.rollouts.tasks import without
from mlx_parallm.rl.status import LevelCard, TrainingEvent

if TYPE_CHECKING:
    from mlx_parallm.extras.curriculum import Curriculum
    from mlx_parallm.rl.service import TrainingService

_log = logging.getLogger(__name__)


def check_inference(config: Config) -> None:
    """Checks what can be known before a model is loaded. Raises ConfigError: nothing could sample."""
    kind, temperature = config.inference.engine, config.rl_training.rollout_temperature
    if kind is EngineKind.NONE:
        raise ConfigError(
            "inference.engine: none samples nothing, and this run asks for some; choose shared, or an engine and its "
            "--inference-url"
        )
    if kind.outside and kind is not EngineKind.SGLANG and temperature != 1:
        raise ConfigError(
            f"rl_training.rollout_temperature: the engine {kind} gives logprobs of temperature 1, which do not fit "
            f"samples of temperature {temperature:g}; sample with --temperature 1, or with the engine shared or sglang"
        )
    if kind is EngineKind.MLX and config.inference.model is None and config.model.base_model_path is None:
        raise ConfigError(
            "inference.model: mlx_lm.server cannot load the bundled model; name the model that it serves with "
            "--inference-model, and the same one with --model-path"
        )


class EnvironmentRollouts:
    """Samples from an inference engine, and collects what it samples. Event loop's thread only.

    Args:
        service: has started to train the default adapter.
        run: the id of the run, which is part of the ids of trajectories.
        source: where the tasks come from.
        group_size: answers or episodes of a task.
    """

    def __init__(
        self,
        config: Config,
        service: TrainingService,
        tokenizer: TextTokenizer,
        run: str,
        source: Environment,
        group_size: int,
        on_sampled: OnSampled = lambda _, __: None,
    ) -> None:
        self._config, self._service, self._tokenizer, self._run = config, service, tokenizer, run
        self._source, self._group_size, self._on_sampled = source, group_size, on_sampled
        self._inference: InferenceEngine | None = None
        self._rollouts: Rollouts | None = None
        self._curriculum: Curriculum | None = None
        self._taken = 0
        self._asking, self._asked_at = 0, time.monotonic()

    async def open(self, taken: int, state: Mapping[str, float] | None = None) -> None:
        """Gets the environment's tasks after the first `taken`. Nothing is sampled yet.

        Args:
            state: what `settle` returned when so many were taken, or before.
        """
        tasks = await in_daemon_thread(partial(self._tasks, taken, state))
        self._taken = taken
        self._rollouts = self._build(tasks, taken)
        if self._curriculum is not None:
            self._service.add_sink(self._learn_rewards)

    async def open_inference(self, inference: InferenceEngine) -> None:
        """Opens the engine that samples.

        Raises:
            ConfigError: the engine cannot sample what training needs.
        """
        self._inference = inference
        await inference.open(self._service.status().current or BASE_ADAPTER)

    @property
    def taken(self) -> int:
        """Tasks taken from the environment so far, those of earlier processes included."""
        return self._taken if self._rollouts is None else self._rollouts.taken

    @property
    def levels(self) -> tuple[LevelCard, ...]:
        """The levels of the curriculum, as far as they are known; empty without a curriculum."""
        return self._curriculum.cards if self._curriculum else ()

    @property
    def live(self) -> AdapterRef:
        """The version that answers tasks now."""
        return self._service.status().current or BASE_ADAPTER

    @property
    def quiet_s(self) -> float:
        """Seconds for which no rollout has asked the engine; 0 while it samples, or scores with a reward model."""
        is_busy = self._asking or self._service.parts.scorers.on_device
        return 0.0 if is_busy else time.monotonic() - self._asked_at

    def number_of(self, group_id: str) -> int | None:
        """The number of the task of this run that a group has answered; None: it is no task of this run."""
        group = re.fullmatch(rf"(?:group-)?rollout-{self._run}-(\d+)(?:-\d+)?", group_id)
        return None if group is None else int(group[1])

    def settle(self, before: int | None = None) -> Mapping[str, float]:
        """Counts the rewards that have come for tasks of lower numbers than `before`, unless a task is being taken.

        Returns:
            What the curriculum needs to go on with that task in another process. Empty without a curriculum, and if a
            task is being taken after that one.
        """
        if self._curriculum is None:
            return {}
        self._curriculum.settle(before)
        state = self._curriculum.state
        return state if before is None or self._curriculum.settled_tasks <= before else {}

    @property
    def settled_tasks(self) -> int:
        """Tasks that were taken before what `settle` returned."""
        return 0 if self._curriculum is None else self._curriculum.settled_tasks

    async def sample(self, groups: int) -> RolloutResult:
        """Takes the next tasks and answers them with the live version."""
        return await self.answer(await self.take(groups), self.live)

    async def take(self, groups: int) -> TakenTasks:
        """See `Rollouts.take`."""
        assert self._rollouts is not None  # `open` was called
        return await self._rollouts.take(groups)

    async def answer(self, taken: TakenTasks, version: AdapterRef) -> RolloutResult:
        """See `Rollouts.answer`."""
        assert self._rollouts is not None  # `open` was called
        return await self._rollouts.answer(taken, BASE_ADAPTER.name if version == BASE_ADAPTER else str(version))

    async def close(self) -> None:
        """Call it after every `sample` has ended."""
        if self._inference is not None:
            await self._inference.close()

    # -- parts -----------------------------------------------------------------------------------

    def _tasks(self, taken: int, state: Mapping[str, float] | None) -> Iterator[Task]:
        """The environment's tasks after the first `taken`."""
        tasks = without(self._source.tasks(self._config.rl_training.seed), self._service.parts.held_out)
        curriculum = self._config.rl_training.curriculum
        if not curriculum.enabled:
            return itertools.islice(tasks, taken, None)
        first = next(tasks)
        tasks = itertools.chain([first], tasks)
        if first.level is None:
            _log.warning("curriculum: the first task has no level; all tasks without one count as one level")
        extra, seed = needed("curriculum", "rl_training.curriculum.enabled"), self._config.rl_training.seed
        arranged: Curriculum = extra.Curriculum(tasks, curriculum, seed, taken, state, self._lag)
        self._curriculum = arranged
        return arranged

    @property
    def _lag(self) -> int:
        """Tasks of two updates: while the groups of one wait for their rewards, those of the next update are
        sampled."""
        return max(1, 2 * math.ceil(self._config.rl_training.update_frequency / self._group_size))

    def _learn_rewards(self, event: TrainingEvent) -> None:
        """Notes the rewards of the tasks of this run."""
        if event.kind == "scored" and event.data.get("complete") and not event.data["key"]:
            self._learn(event.data["group_id"], event.data.get("rewards", ()))

    def _learn(self, group_id: str, rewards: Collection[float]) -> None:
        number = self.number_of(group_id)
        if number is not None and self._curriculum is not None:
            self._curriculum.learn(number, [*rewards])

    def _build(self, tasks: Iterator[Task], taken: int) -> Rollouts:
        training = self._config.rl_training
        settings = RolloutSettings(
            self._group_size,
            training.max_completion_tokens,
            training.rollout_temperature,
            read_system_prompt(training.system_prompt),
            seed=training.seed,
            run=self._run,
            taken=taken,
            timeout_s=training.rollout_timeout_s,
        )
        return Rollouts(
            self._generate,
            self._service.parts.adapters,
            self._tokenizer,
            tasks,
            settings,
            self._on_sampled,
            self._episodes(settings),
        )

    def _episodes(self, settings: RolloutSettings) -> SampleEpisodes | None:
        if not is_of_episodes(self._source):
            return None
        episodes = Episodes(
            self._source,
            self._service.parts.environment_thread,
            self._ask,
            self._collect_episodes,
            self._tokenizer,
            settings,
            self._on_sampled,
        )
        return episodes.sample

    async def _collect_episodes(self, trajectories: Sequence[Trajectory], rewards: Mapping[str, float]) -> str:
        """See `Collector.collect_episodes`. A group without a signal ends there without an event, so its rewards are
        noted here. Rewards of a scoring function come as an event."""
        self._learn(trajectories[0].group_id, rewards.values())
        return await self._service.trajectories.collect_episodes(trajectories, rewards)

    def _generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Samples from the inference engine, and collects what it samples."""
        return self._service.trajectories.collect(request, self._ask(request))

    async def _ask(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        assert self._inference is not None  # `open_inference` was called
        events = cast(AsyncGenerator[Event, None], self._inference.generate(request))  # `core` promises aclose()
        self._asking += 1
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._asking, self._asked_at = self._asking - 1, time.monotonic()
