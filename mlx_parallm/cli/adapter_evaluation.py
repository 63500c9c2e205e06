"""Evaluates adapters in folders on held-out tasks, one after the other, without HTTP and without training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import Config
from mlx_parallm.config.sections import LARGEST_RANK
from mlx_parallm.errors import ConfigError, ParaLLMError
from mlx_parallm.rl.configured_reward import reward_of
from mlx_parallm.rl.environments import read_system_prompt
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.evaluation import EvaluationError
from mlx_parallm.rl.held_out_tasks import evaluator_of, held_out_of
from mlx_parallm.rl.scoring.service import ScorerCatalogue, ScoringService
from mlx_parallm.rl.status import EvaluationResult

_NAME = "evaluated"
"""The name that each adapter is served by while it is evaluated."""
_SLOTS = 2
"""One for the adapter that was evaluated, and one for the next."""


class ComparisonSettings:
    """The settings of an evaluation, checked before a model is loaded.

    Args:
        config: its `rl_training.evaluation` and reward say what adapters are asked and how answers are scored.

    Raises:
        ConfigError: the tasks or the reward cannot be used.
    """

    def __init__(self, config: Config) -> None:
        reward = reward_of(config)
        if reward is not None and reward.asks_judge and not reward.judge.url:
            raise ConfigError("--judge-url: a judge needs a server to ask; name one, with --judge-model")
        ScorerCatalogue(reward).check_reward()
        read_system_prompt(config.rl_training.system_prompt)
        self._config = config
        self._held_out = held_out_of(config)

    def evaluate(self, folders: Sequence[Path], rank: int) -> tuple[EvaluationResult, ...]:
        """The mean rewards of the adapters, in their order. `rank`: the largest of theirs.

        Raises:
            ConfigError: the rank is above the largest that can be served.
            ParaLLMError: the model cannot be loaded, or most tasks cannot be answered or scored.
        """
        if rank > LARGEST_RANK:
            raise ConfigError(f"--eval-tasks: rank {rank} is above {LARGEST_RANK}, the largest that is served")
        adapters = self._config.adapters.model_copy(update={"max_lora_rank": rank, "max_loras": _SLOTS})
        engine = RunningEngine(self._config.model_copy(update={"adapters": adapters}))
        served = engine.start()
        try:
            return asyncio.run(self._evaluate(served, folders))
        except EvaluationError as error:
            raise ParaLLMError(f"the adapters were not evaluated: {error}") from error
        finally:
            engine.stop()

    async def _evaluate(self, served: Served, folders: Sequence[Path]) -> tuple[EvaluationResult, ...]:
        training = self._config.rl_training
        scorers = ScoringService(
            training.scoring_processes, training.scoring_batch_size, training.scoring_timeout_s, reward_of(self._config)
        )
        thread = EnvironmentThread()
        try:
            evaluator = evaluator_of(served.engine, served.tokenizer, scorers, thread, self._held_out, self._config)
            assert evaluator is not None  # the configuration has held-out tasks
            results = []
            for folder in folders:
                version = await served.adapters.publish_folder(_NAME, folder)
                with served.adapters.lease(str(version)):
                    results.append(await evaluator.evaluate(version, 0))
            return tuple(results)
        finally:
            thread.close()
            await scorers.close()
