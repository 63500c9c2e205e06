"""A package `verifiers` with as much of 0.4 as is read here: `from extras.verifiers.fake_verifiers import install`.

It says which environments are played; episodes are played with the real package, in the second stage
(tests/clients/test_verifiers_in_process.py).
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any


class Box(SimpleNamespace):
    """A configuration of any fields."""

    def model_copy(self, update: dict[str, Any]) -> Box:
        return Box(**{**vars(self), **update})


class PrimeConfig(Box):
    type = "prime"


class SubprocessConfig(Box):
    type = "subprocess"


class DockerConfig(Box):
    type = "docker"


class Client: ...


class ProviderError(Exception):
    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)


class Harness:
    NEEDS_CONTAINER = EXECUTES_CODE = True

    def __class_getitem__(cls, item: Any) -> type:
        return cls


@dataclass
class Data:
    prompt: Any
    idx: int = 0
    system_prompt: str | None = None
    image: str | None = None
    skills: tuple[str, ...] = ()
    network_allow: tuple[str, ...] = ("*",)
    network_block: tuple[str, ...] = ()


@dataclass
class Task:
    data: Data
    NEEDS_CONTAINER = False

    def with_system_prompt(self, text: str) -> Task:
        return Task(replace(self.data, system_prompt=text))


@dataclass
class Taskset:
    prompts: tuple[Any, ...] = ("a?", "b?", "c?")
    bounded: bool = True
    fields: dict[str, Any] = field(default_factory=dict)

    def __iter__(self):
        for number, prompt in enumerate(self.prompts):
            yield Task(Data(prompt, number, **self.fields))


class Env:
    """What users override: `agents`, and `taskset`."""

    agents: dict[str, Any] = {"agent": Box(client=None, model=None, harness=None, runtime=PrimeConfig())}  # noqa: RUF012
    taskset: Any = Taskset()


class ChatDialect:
    upstream_path = "/v1/chat/completions"


def import_taskset(taskset_id: str) -> ModuleType:
    module = taskset_id.replace("-", "_").lower()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"taskset {taskset_id!r} not found (tried to import {module!r})") from error


def resolve_env_config(config: dict[str, Any]) -> Box:
    taskset_id = config["taskset"]["id"]
    return Box(taskset=Box(id=taskset_id), **import_taskset(taskset_id).Environment.agents)


def install(monkeypatch: Any) -> None:
    """Puts the package in `sys.modules` until the test ends."""
    loaders = {
        "import_taskset": import_taskset,
        "harness_class": lambda name: Harness,
        "default_harness_id": lambda taskset_id: "bash",
        "load_environment": lambda config: import_taskset(config.taskset.id).Environment(),
        "resolve_env_config": resolve_env_config,
    }
    types = (Client, ProviderError, Harness, PrimeConfig, SubprocessConfig)
    plain = ("HarnessConfig", "TrainClientConfig", "ModelContext", "ToolCall", "Usage", "AssistantMessage", "Response")
    made = {**dict.fromkeys(plain, Box), **{each.__name__: each for each in types}, **loaders}
    modules = {
        "": {},
        ".v1": made,
        ".v1.clients": {},
        ".v1.clients.train": {"serialize_completion": lambda response, model: {"model": model}},
        ".v1.dialects": {"ChatDialect": ChatDialect},
        ".v1.dialects.chat": {"message_to_wire": vars},
        ".v1.configs": {},
        ".v1.configs.agent": {
            "agent_config_fields": lambda config: {k: v for k, v in vars(config).items() if k != "taskset"}
        },
        ".v1.harnesses": {},
        ".v1.harnesses.utils": {},
        ".v1.harnesses.utils.compaction": {"bound_tool_message": dict},
        ".v1.harnesses.utils.mcp": {"call_mcp": None, "connect_mcp": None},
        ".v1.utils": {},
        ".v1.utils.loaders": loaders,
    }
    ours = [f"mlx_parallm.extras.verifiers.{part}" for part in ("environment", "settings", "policy", "chat")]
    for name in [*ours, "mlx_parallm_chat"]:  # they are imported anew with this package, and again after the test
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    for name, contents in modules.items():
        module = ModuleType(f"verifiers{name}")
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr("mlx_parallm.optional_packages.Extra.installed", True)
