"""How an environment of verifiers is configured here: the adapter in training plays its agent, on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import harness_class, import_taskset

from mlx_parallm.errors import ConfigError, shown
from mlx_parallm.extras.verifiers import chat

_CHAT = "mlx_parallm_chat"
"""verifiers finds a harness by the name of its module, which cannot have dots."""

_CONVERSATION = frozenset({"", "null"})
"""What an agent's harness may be for `chat.Chat` to take its place: not set, or verifiers' own for conversations."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`agent`: the name of the agent that the adapter in training plays."""

    config: Any
    agent: str

    def load(self) -> Any:
        """A new environment. Each event loop needs its own."""
        return vf.load_environment(self.config)


def read_settings(environment_id: str) -> Settings:
    """The configuration of an environment with its own defaults, except for where its agent runs and who plays it.

    Raises:
        ConfigError: it is unknown, cannot be imported, or needs something that is not given here.
    """
    _import(environment_id)
    sys.modules.setdefault(_CHAT, chat)
    try:
        config = vf.resolve_env_config({"taskset": {"id": environment_id}})
        has_own_harness = vf.default_harness_id(environment_id) == environment_id
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"environment: {named(environment_id)} cannot be loaded: {error}") from error
    agents = agent_config_fields(config)
    local = {name: _local(environment_id, name, spec, has_own_harness) for name, spec in agents.items()}
    return Settings(config.model_copy(update=local), _trained_agent(environment_id, agents))


def named(environment_id: str) -> str:
    """The environment in an error's text."""
    return f"verifiers:{environment_id}"


def _import(environment_id: str) -> None:
    if not environment_id:
        raise ConfigError("environment: name one of verifiers, as in verifiers:my_environment")
    # As verifiers makes a module's name of an id, which may be that of its hub: owner/name@version.
    module = environment_id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    try:
        import_taskset(environment_id)
    except Exception as error:  # a user's module may raise anything
        cause = error.__cause__ if isinstance(error, ModuleNotFoundError) else error
        if cause is None or (isinstance(cause, ModuleNotFoundError) and cause.name == module):
            raise ConfigError(
                f"environment: {shown(named(environment_id))} is unknown: there is no module {shown(module)}; install "
                "its package in this Python environment, or put the module's folder on PYTHONPATH"
            ) from error
        raise ConfigError(f"environment: {named(environment_id)} cannot be imported: {cause}") from error


def _trained_agent(environment_id: str, agents: dict[str, Any]) -> str:
    """The one agent that has no model of its own."""
    trained = [name for name, spec in agents.items() if spec.client is None]
    for name in trained:
        if agents[name].model is not None:
            raise ConfigError(
                f"environment: {named(environment_id)}: its agent {name} needs the model {agents[name].model}; only "
                "the adapter in training is here"
            )
    if len(trained) != 1:
        raise ConfigError(
            f"environment: {named(environment_id)} has {len(trained)} agents without a model of their own "
            f"({', '.join(trained) or 'none'}); it must be one, which the adapter in training plays"
        )
    return trained[0]


def _local(environment_id: str, agent: str, spec: Any, has_own_harness: bool) -> Any:
    """The agent's configuration for this machine, without a sandbox."""
    if not isinstance(spec.runtime, vf.PrimeConfig | vf.SubprocessConfig):
        raise ConfigError(
            f"environment: {named(environment_id)} runs {agent} in {spec.runtime.type}; containers are not given here"
        )
    chosen = spec.harness.id if spec.harness is not None else environment_id if has_own_harness else ""
    if chosen in _CONVERSATION:
        return spec.model_copy(update={"harness": vf.HarnessConfig(id=_CHAT), "runtime": vf.SubprocessConfig()})
    harness = harness_class(chosen)
    if harness.NEEDS_CONTAINER or harness.EXECUTES_CODE:
        raise ConfigError(
            f"environment: {named(environment_id)}: the harness {chosen} of {agent} lets the model run programs, which "
            "needs a container; containers are not given here"
        )
    return spec.model_copy(update={"runtime": vf.SubprocessConfig()})
