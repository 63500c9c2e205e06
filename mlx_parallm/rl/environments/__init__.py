"""Environments: where the tasks of rollouts come from, and how the model is asked to do them.

protocol     Task, Answer, RolloutClient, Environment: what an environment is
names        the environment of a name
sources      files of tasks, reasoning-gym
verifiers    environments of the package verifiers
words, hints, calculator   built-in ones: of one turn, of two, and with a tool
prompts      the system prompt of all tasks
thread       where rollouts run
"""

from mlx_parallm.rl.environments.names import GROUP, answers_of, environment
from mlx_parallm.rl.environments.prompts import read_system_prompt, with_system_prompt
from mlx_parallm.rl.environments.protocol import (
    Answer,
    Environment,
    EpisodeEnvironment,
    Message,
    RolloutClient,
    RolloutError,
    Task,
    is_of_episodes,
)

__all__ = [
    "GROUP",
    "Answer",
    "Environment",
    "EpisodeEnvironment",
    "Message",
    "RolloutClient",
    "RolloutError",
    "Task",
    "answers_of",
    "environment",
    "is_of_episodes",
    "read_system_prompt",
    "with_system_prompt",
]
