"""Builds what evaluates adapter versions: the held-out tasks of an environment, and how they are done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from mlx_parallm.config import Config
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.tool_text import chat_prompt
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.rl.configured_reward import catalogue_of, reward_of
from mlx_parallm.rl.environments import (
    Environment,
    Task,
    environment,
    is_of_episodes,
    read_system_prompt,
    with_system_prompt,
)
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.evaluation import AnswerSettings, Evaluator, HeldOutAnswers, HeldOutEpisodes, HeldOutTask
from mlx_parallm.rl.rollouts.episodes import play
from mlx_parallm.rl.rollouts.tasks import held_out_tasks
from mlx_parallm.rl.scoring.service import ScorerCatalogue, ScoringService


@dataclass(frozen=True, slots=True)
class HeldOutTasks:
    """Tasks of the environment of this name that are held out for evaluations."""

    name: str
    environment: Environment
    tasks: tuple[Task, ...]


def held_out_of(config: Config) -> HeldOutTasks | None:
    """The held-out tasks; None if versions are not evaluated.

    Raises:
        ConfigError: their environment cannot be loaded, or has fewer than two tasks, or one cannot be scored.
    """
    settings, of_training = config.rl_training.evaluation, config.rl_training.own_environment
    name, rewarded = settings.tasks or of_training, config.rl_training.reward is not None
    if settings.every is None or name is None:
        return None
    source = environment(name, rewarded)
    held_out = HeldOutTasks(name, source, held_out_tasks(source, settings.size))
    _check_scorable(held_out, catalogue_of(config))
    return held_out


def evaluator_of(
    engine: EngineClient,
    tokenizer: TextTokenizer,
    scorers: ScoringService,
    thread: EnvironmentThread,
    held_out: HeldOutTasks | None,
    config: Config,
) -> Evaluator | None:
    """The evaluator of these tasks; None if there are none. `thread`: where the rollouts of environments run.

    Raises:
        ConfigError: a task cannot be done.
    """
    if held_out is None:
        return None
    reward, settings = reward_of(config), config.rl_training.evaluation
    answers = AnswerSettings(
        settings.samples, settings.temperature, settings.max_tokens or config.rl_training.max_completion_tokens
    )
    definition, source = reward.definition if reward else "", held_out.environment
    system_prompt = read_system_prompt(config.rl_training.system_prompt)
    tasks = [replace(task, messages=with_system_prompt(task, system_prompt)) for task in held_out.tasks]
    if is_of_episodes(source):
        return Evaluator(
            HeldOutEpisodes(
                partial(play, source, thread),
                engine,
                tokenizer,
                scorers,
                tasks,
                answers,
                config.rl_training.rollout_timeout_s,
                f"{held_out.name} {definition}",
            )
        )
    rendered = [_rendered(number, task, tokenizer) for number, task in enumerate(tasks, 1)]
    return Evaluator(HeldOutAnswers(engine, scorers, rendered, answers, definition))


def _check_scorable(held_out: HeldOutTasks, catalogue: ScorerCatalogue) -> None:
    """Raises ConfigError: a task cannot be scored."""
    rewards_itself = is_of_episodes(held_out.environment)
    for number, task in enumerate(held_out.tasks, 1):
        if task.collection.scorer is not None or not rewards_itself:
            try:
                catalogue.check(task.collection)
            except RequestError as error:
                raise _unusable(number, error) from error


def _rendered(number: int, task: Task, tokenizer: TextTokenizer) -> HeldOutTask:
    """Raises ConfigError: the chat template refuses the messages."""
    try:
        ids = chat_prompt(tokenizer, task.messages)
    except RequestError as error:
        raise _unusable(number, error) from error
    return HeldOutTask(tuple(ids), replace(task.collection, messages=task.messages))


def _unusable(number: int, error: RequestError) -> ConfigError:
    return ConfigError(f"rl_training.evaluation: held-out task {number} cannot be used: {error}")
