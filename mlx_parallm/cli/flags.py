"""The flags for settings. Each names the configuration key that it sets; its help comes from that key."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.cli.parser import Parser
from mlx_parallm.config import KEYS, Key, Setting
from mlx_parallm.errors import ConfigError

_NULL = re.compile(r"\bnull means")
_WORDS = {"null": "not set", "[]": "none", "true": "on", "false": "off"}
"""Values of YAML in words, for the help."""


@dataclass(frozen=True, slots=True)
class Flag:
    """`metavar` is the name of the value in the help. A flag without one takes no value and has a --no- form.

    `several`: the flag takes several values, and may be given several times, as in vLLM. `alias`: another name for it.
    `only`: the program that obeys it; empty: both do.
    """

    name: str
    path: str
    metavar: str = ""
    several: bool = False
    alias: str = ""
    only: str = ""

    @property
    def key(self) -> Key:
        return KEYS[self.path]

    @property
    def help(self) -> str:
        description = _NULL.sub("Not set means", self.key.description)
        default = _WORDS.get(self.key.default_text, self.key.default_text)
        return f"{description} Default: {default}. [{self.key.env_name}]".replace("%", "%%")


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags of one subject. They stand together in the help, below `title` and `description`."""

    title: str
    description: str
    flags: tuple[Flag, ...]


SERVE, TRAIN = "mlx_parallm_serve", "mlx_parallm_train"
_of_serving, _of_training = partial(Flag, only=SERVE), partial(Flag, only=TRAIN)
_BASE, _OTHER_BASES = "model.base_model_path", "model.other_base_models"
_RESUME, _FOLDER = "checkpointing.resume", "checkpointing.checkpoint_dir"

GROUPS = (
    FlagGroup(
        "model",
        "Which model is used, and under which names.",
        (
            Flag("--model-path", _BASE, "DIR_OR_HUB_ID", several=True),
            _of_serving("--idle-unload", "model.idle_unload", "SECONDS"),
            _of_serving("--served-model-name", "server.served_model_name", "NAME", several=True),
            _of_serving("--model-aliases", "server.model_aliases", "PATTERN,PATTERN"),
            Flag("--max-model-len", "model.max_model_len", "TOKENS"),
            Flag("--trust-remote-code", "model.trust_remote_code"),
            Flag("--allow-special-tokens", "model.allow_special_tokens"),
            Flag("--tool-parser", "model.tool_parser", "NAME", alias="--tool-call-parser"),
            Flag("--reasoning-parser", "model.reasoning_parser", "NAME"),
        ),
    ),
    FlagGroup(
        "network",
        "Where the server listens, which APIs it has, and who may use it.",
        (
            _of_serving("--host", "server.host", "ADDRESS"),
            _of_serving("--port", "server.port", "PORT"),
            _of_serving("--api-key", "server.api_key", "KEY"),
            _of_serving("--keys-file", "server.keys_file", "FILE"),
            _of_serving("--ssl-certfile", "server.ssl_certfile", "FILE"),
            _of_serving("--ssl-keyfile", "server.ssl_keyfile", "FILE"),
            _of_serving("--ssl-keyfile-password", "server.ssl_keyfile_password", "PASSWORD"),
            _of_serving("--allowed-hosts", "server.allowed_hosts", "NAME,NAME"),
            _of_serving("--cors-origins", "server.cors_origins", "ORIGIN,ORIGIN"),
            _of_serving("--trusted-proxies", "server.trusted_proxies", "ADDRESS,ADDRESS"),
            _of_serving("--dashboard", "server.dashboard"),
            _of_serving("--ollama-api", "server.ollama_api"),
            _of_serving("--atropos-api", "server.atropos_api"),
            _of_serving("--shutdown-timeout", "server.shutdown_timeout", "SECONDS"),
        ),
    ),
    FlagGroup(
        "requests",
        "How requests and rollouts share the batch, and what they may ask for.",
        (
            Flag("--max-batch-size", "server.max_batch_size", "ROWS"),
            Flag("--max-batched-tokens", "server.max_batched_tokens", "TOKENS"),
            _of_serving("--max-queued", "server.max_queued", "SEQUENCES"),
            Flag("--speculation", "server.speculation", "auto|ngram|draft|off"),
            Flag("--draft-model", "model.draft_model", "DIR_OR_HUB_ID"),
            Flag("--max-decode-stall-ms", "server.max_decode_stall_ms", "MILLISECONDS"),
            _of_serving("--strict-fields", "server.strict_fields"),
            _of_serving("--logprobs-mode", "server.logprobs_mode", "MODE"),
            _of_serving("--generation-config", "server.generation_config", "auto|none"),
            _of_serving("--stop-repetition", "server.stop_repetition"),
            _of_serving("--repair-tool-calls", "server.repair_tool_calls"),
            _of_serving("--chat-template-dir", "server.chat_template_dir", "DIR"),
            _of_serving("--max-logprobs", "server.max_logprobs", "CANDIDATES"),
            _of_serving("--return-tokens-as-token-ids", "server.return_tokens_as_token_ids"),
            _of_serving("--embedding-pooling", "server.embedding_pooling", "last|mean"),
        ),
    ),
    FlagGroup(
        "memory",
        "What MLX, the KV cache and cached prefixes may take.",
        (
            Flag("--kv-cache-memory", "server.kv_cache_memory", "SIZE"),
            Flag("--kv-bits", "server.kv_bits", "8|4"),
            Flag("--prefix-cache", "server.prefix_cache"),
            Flag("--prefix-cache-dir", "server.prefix_cache_dir", "DIR"),
            Flag("--prefix-cache-disk", "server.prefix_cache_disk", "SIZE"),
            Flag("--mlx-memory-limit", "server.mlx_memory_limit", "SIZE"),
            Flag("--mlx-cache-limit", "server.mlx_cache_limit", "SIZE"),
            Flag("--memory-guard", "server.memory_guard", "auto|off|SIZE"),
            Flag("--wired-memory", "server.wired_memory"),
        ),
    ),
    FlagGroup(
        "adapters",
        "LoRA adapters: where they are, how many are served at once, and the shape of those that training makes.",
        (
            Flag("--adapter-dir", "adapters.adapter_dir", "DIR"),
            _of_serving("--allowed-adapter-roots", "adapters.allowed_adapter_roots", "DIR,DIR"),
            Flag("--max-loras", "adapters.max_loras", "VERSIONS"),
            Flag("--max-cpu-loras", "adapters.max_cpu_loras", "VERSIONS"),
            Flag("--max-lora-rank", "adapters.max_lora_rank", "RANK"),
            Flag("--default-adapter", "adapters.default_adapter", "NAME"),
            _of_serving("--serve-adapter", "adapters.serve", "NAME_OR_CHECKPOINT"),
            _of_serving("--serve-adapter-folder", "adapters.serve_folder", "DIR"),
            Flag("--lora-rank", "model.lora_rank", "RANK"),
            Flag("--lora-alpha", "model.lora_alpha", "NUMBER"),
            Flag("--lora-target-modules", "model.lora_target_modules", "NAME,NAME"),
        ),
    ),
    FlagGroup(
        "training",
        "Whether and how adapters are trained.",
        (
            _of_serving("--mode", "server.mode", "MODE"),
            _of_serving("--enable-rl-training", "rl_training.enabled"),
            Flag("--rl-algorithm", "rl_training.algorithm", "NAME"),
            Flag("--learning-rate", "rl_training.optimizer.learning_rate", "NUMBER"),
            Flag("--kl-coef", "rl_training.loss.kl_coef", "NUMBER"),
            _of_serving("--update-frequency", "rl_training.update_frequency", "TRAJECTORIES"),
            Flag("--max-staleness", "rl_training.max_staleness", "VERSIONS"),
            Flag("--training-time-share", "rl_training.training_time_share", "SHARE"),
            Flag("--train-on-battery", "rl_training.train_on_battery"),
            Flag("--micro-batch-tokens", "rl_training.micro_batch_tokens", "TOKENS"),
            Flag("--trajectory-buffer-size", "rl_training.trajectory_buffer_size", "TRAJECTORIES"),
            Flag("--seed", "rl_training.seed", "SEED"),
        ),
    ),
    FlagGroup(
        "tasks and rewards",
        "What adapters are trained on, what their answers are worth, and when they are evaluated.",
        (
            Flag("--environment", "rl_training.environment", "FILE_OR_NAME"),
            _of_serving("--server-rollouts", "rl_training.server_rollouts"),
            _of_serving("--rollout-group-size", "rl_training.rollout_group_size", "N"),
            Flag("--rollout-timeout", "rl_training.rollout_timeout_s", "SECONDS"),
            Flag("--curriculum", "rl_training.curriculum.enabled"),
            Flag("--reward", "rl_training.reward", "FILE.py:NAME"),
            Flag("--judge-url", "rl_training.judge.url", "URL"),
            Flag("--judge-model", "rl_training.judge.model", "NAME"),
            Flag("--teacher-adapter", "rl_training.teacher.adapter", "NAME"),
            Flag("--teacher-prompt", "rl_training.teacher.prompt", "TEXT_OR_@FILE"),
            Flag("--teacher-url", "rl_training.teacher.url", "URL"),
            Flag("--teacher-model", "rl_training.teacher.model", "NAME"),
            _of_training("--max-tokens", "rl_training.max_completion_tokens", "TOKENS"),
            _of_training("--temperature", "rl_training.rollout_temperature", "NUMBER"),
            _of_training("--system-prompt", "rl_training.system_prompt", "TEXT_OR_@FILE"),
            Flag("--eval-every", "rl_training.evaluation.every", "UPDATES"),
            Flag("--eval-tasks", "rl_training.evaluation.tasks", "FILE_OR_NAME"),
            Flag("--eval-size", "rl_training.evaluation.size", "TASKS"),
            Flag("--atropos-url", "rl_training.atropos_url", "URL"),
        ),
    ),
    FlagGroup(
        "checkpoints",
        "Where a run keeps its checkpoints, and how it is resumed.",
        (
            Flag("--checkpoint-dir", "checkpointing.checkpoint_dir", "DIR", alias="--run"),
            Flag("--checkpoint-interval", "checkpointing.interval", "UPDATES"),
            Flag("--checkpoint-minutes", "checkpointing.minutes", "MINUTES"),
            Flag("--resume", "checkpointing.resume"),
            Flag("--keep-n-checkpoints", "checkpointing.keep_n_checkpoints", "CHECKPOINTS"),
            Flag("--journal-updates", "checkpointing.journal_updates", "UPDATES"),
        ),
    ),
    FlagGroup(
        "rollouts by another server",
        "Which server draws the samples that this process trains on.",
        (
            _of_training("--inference-engine", "inference.engine", "NAME"),
            _of_training("--inference-url", "inference.url", "URL"),
            _of_training("--inference-model", "inference.model", "NAME"),
            _of_training("--inference-adapter-dir", "inference.adapter_dir", "DIR"),
        ),
    ),
    FlagGroup(
        "several nodes",
        "A head and more nodes that serve one model together.",
        (
            _of_serving("--share-model", "cluster.share_model"),
            Flag("--connect-to", "cluster.connect_to", "HOST:PORT"),
            Flag("--cluster-token", "cluster.token", "TOKEN"),
            Flag("--cluster-dir", "cluster.state_dir", "DIR"),
            _of_serving("--advertise", "cluster.advertise", "HOST:PORT"),
            _of_serving("--nats-url", "cluster.nats_url", "URL"),
        ),
    ),
    FlagGroup(
        "logs",
        "What is logged, where, and what is checked at run time.",
        (
            Flag("--log-level", "server.log_level", "LEVEL"),
            Flag("--log-format", "server.log_format", "text|json"),
            _of_serving("--audit-log", "server.audit_log", "FILE"),
            _of_serving("--access-log", "server.access_log", "BOOL"),
            _of_serving("--otlp-traces-endpoint", "server.otlp_traces_endpoint", "URL"),
            Flag("--trajectory-log", "rl_training.trajectory_log", "FILE"),
            Flag("--trackers", "rl_training.trackers", "NAME,NAME"),
            Flag("--debug", "debug.check_when_idle"),
            Flag("--debug-trace", "debug.trace", "FILE"),
        ),
    ),
)
"""In the order of the help."""

FLAGS = tuple(flag for group in GROUPS for flag in group.flags)


_PRECEDENCE = (
    "A flag takes precedence over its environment variable (in brackets), the variable over the file given with "
    "--config, and the file over the default."
)


def add_flags(parser: Parser, program: str) -> None:
    """Adds --config, --print-config and every flag that `program` obeys. The others are refused by name."""
    parser.usage = "%(prog)s [flags]"  # argparse would list all of them
    sources = parser.add_argument_group("settings", _PRECEDENCE)
    sources.add_argument("--config", type=Path, metavar="FILE", help="A yaml file such as server_config.yaml.")
    sources.add_argument(
        "--print-config", action="store_true", help="Print the resolved configuration with secrets masked, and exit."
    )
    for group in GROUPS:
        paths = {flag.path for flag in group.flags if flag.only in ("", program)}
        if paths:
            add_chosen_flags(parser.add_argument_group(group.title, group.description), paths)
    parser.refused = {flag.name: flag.only for flag in FLAGS if flag.only not in ("", program)}


def add_chosen_flags(group: argparse._ActionsContainer, paths: Collection[str]) -> None:
    """Adds the flags of these keys, to a parser or to a group of one."""
    for flag in FLAGS:
        if flag.path in paths:
            _add_flag(group, flag)


def _add_flag(group: argparse._ActionsContainer, flag: Flag) -> None:
    names = (flag.name, flag.alias) if flag.alias else (flag.name,)
    group.add_argument(*names, dest=flag.path, default=None, help=flag.help, **_value_options(flag))


class _Resume(argparse.Action):
    """`--resume`, `--resume RUN` or `--no-resume`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__([*option_strings, "--no-resume"], dest, nargs="?", metavar="RUN", **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option == "--no-resume" and values is not None:
            parser.error(f"--no-resume takes no value, got {values!r}")
        setattr(namespace, self.dest, option != "--no-resume" if values is None else values)


def settings(args: argparse.Namespace) -> dict[str, Setting]:
    """The settings of the flags that were given, by key path. Values stay text until the configuration checks them.

    Raises:
        ConfigError: two flags name the folder of the run.
    """
    given = vars(args)
    found = {
        flag.path: Setting(_text(value), flag.name) for flag in FLAGS if (value := given.get(flag.path)) is not None
    }
    if paths := given.get(_BASE):
        found[_BASE] = Setting(paths[0], found[_BASE].source)
        if others := paths[1:]:
            found[_OTHER_BASES] = Setting(others, found[_BASE].source)
    run = found.get(_RESUME)
    if run is not None and isinstance(run.value, str):
        if _FOLDER in found:
            raise ConfigError(f"--resume: {run.value} is a run, and {found[_FOLDER].source} names one too; keep one")
        from mlx_parallm.adapters.runs import named_run

        found[_FOLDER] = Setting(str(named_run(run.value)), run.source)
        found[_RESUME] = Setting(True, run.source)
    return found


def _text(value: object) -> object:
    """Several values of one flag as one text, as in the environment; any other value unchanged."""
    return ",".join(value) if isinstance(value, list) else value


def _value_options(flag: Flag) -> dict[str, Any]:
    if flag.path == _RESUME:
        return {"action": _Resume}
    if not flag.metavar:
        return {"action": argparse.BooleanOptionalAction}
    return {"metavar": flag.metavar, **({"nargs": "+", "action": "extend"} if flag.several else {})}
