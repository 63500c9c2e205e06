"""Environments: where the tasks of rollouts come from, and how the model is asked to do them.

protocol     Task, Answer, RolloutClient, Environment: what an environment is
names        the environment of a name: a file of tasks, a task of reasoning-gym, one of a package or of a user's file
files        files of tasks
builtin      those that come with the package
thread       where rollouts run
"""

from mlx_parallm.rl.environments.names import GROUP, answers_of, environment, read_system_prompt
from mlx_parallm.rl.environments.protocol import (
    Answer,
    Environment,
    EpisodeEnvironment,
    Message,
    RolloutClient,
    RolloutError,
    Task,
    is_of_episodes,
    with_system_prompt,
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
