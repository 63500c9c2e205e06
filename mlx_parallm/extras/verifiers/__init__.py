"""Environments of the package verifiers (0.4), played in this process.

environment  Verifiers: the tasks of an environment, and how one is played
settings     its configuration here, and what is refused
policy       PolicyClient: verifiers' client, which asks the adapter in training
chat         Chat: verifiers' harness for tasks that are conversations

    Verifiers.rollout ── Env.run_episode ──▶ harness ──HTTP on the loopback──▶ verifiers' interception server
                                                                                    │ PolicyClient.get_response
                                                                                    ▼
                                                                                RolloutClient.ask

verifiers takes seconds to import, so it is imported when an environment of it is named.
"""

from __future__ import annotations

from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import VERIFIERS
from mlx_parallm.rl.environments.protocol import EpisodeEnvironment

PREFIX = "verifiers:"


def load(name: str) -> EpisodeEnvironment:
    """The environment `verifiers:<id>`, where the id is that of a taskset: the name of a module that can be imported.

    Raises:
        ConfigError: verifiers is not installed, or the environment is unknown, cannot be loaded, has no tasks, or needs
            something that is not given here.
    """
    if not VERIFIERS.installed:
        raise ConfigError(f"environment: {VERIFIERS.missing}")
    from mlx_parallm.extras.verifiers.environment import Verifiers

    return Verifiers(name.removeprefix(PREFIX))
