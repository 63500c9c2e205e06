"""The configured reward, as the parts that score need it."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.config import Config, Mode
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.extras_table import find
from mlx_parallm.rl.environments import Environment, is_of_episodes, read_system_prompt
from mlx_parallm.rl.rewards import comparison_key
from mlx_parallm.rl.scoring.judges import Judge
from mlx_parallm.rl.scoring.scorers import RewardSpec, read_reward
from mlx_parallm.rl.scoring.service import ScorerCatalogue, no_reward_model


def reward_of(config: Config) -> RewardSpec | None:
    """The configured reward, with its judge; None if there is none.

    Raises:
        ConfigError: it cannot be read, or it has a judge and there is no server to ask.
    """
    training = config.rl_training
    if training.reward is None:
        return None
    reward = RewardSpec(read_reward(training.reward), judge_of(config))
    if reward.asks_judge and not reward.judge.url and config.server.mode is Mode.TRAINING_ONLY:
        raise ConfigError(
            "rl_training.judge.url: a judge needs a server, and this process answers no requests; name one with "
            "--judge-url and --judge-model"
        )
    return reward


def reward_key(config: Config) -> float:
    """Equal for processes whose mean rewards can be compared: rewards are computed in the same way, and the same tasks
    are done under the same settings. Of an environment, its name counts and, if it is in a .py file, the text of that.

    Raises:
        ConfigError: the reward or the system prompt cannot be read.
        OSError: a file of the reward cannot be read.
    """
    training, reward = config.rl_training, reward_of(config)
    environment = training.environment or ""
    file = Path(environment.rpartition(":")[0]).expanduser()
    source = file.read_text("utf-8", "replace") if file.suffix == ".py" and file.is_file() else ""
    definition, system_prompt = reward.definition if reward else "", read_system_prompt(training.system_prompt)
    settings = (training.max_completion_tokens, training.rollout_temperature)
    return comparison_key(repr((definition, environment, source, system_prompt, settings)))


def judge_of(config: Config) -> Judge:
    """The configured judge. Its URL is empty if it is this server, which `ScoringService.judge_by` tells."""
    judge = config.rl_training.judge
    key = judge.api_key.get_secret_value() if judge.api_key else ""
    return Judge(judge.url or "", judge.model or BASE_ADAPTER.name, judge.instruction or "", key)


def check_reward(config: Config) -> None:
    """Loads the functions of the configured reward once, in a child process. It may take seconds.

    Raises:
        ConfigError: the reward cannot be read, a function cannot be loaded, or a judge has no server to ask.
    """
    if config.rl_training.enabled:
        catalogue_of(config).check_reward()


def check_scorable(config: Config, source: Environment) -> None:
    """Raises ConfigError: the tasks of an environment, of which the first is looked at, cannot be scored."""
    collection = next(iter(source.tasks(config.rl_training.seed))).collection
    if collection.scorer is not None or not is_of_episodes(source):
        try:
            catalogue_of(config).check(collection)
        except InvalidRequestError as error:
            raise ConfigError(f"environment: {error}") from error


def catalogue_of(config: Config) -> ScorerCatalogue:
    """The scorers that requests and tasks may name."""
    models = find("reward_models.folder")
    check = no_reward_model if models is None else models.RewardModelFolder(config.adapters.adapter_dir).check
    return ScorerCatalogue(reward_of(config), check)
