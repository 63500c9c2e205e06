"""The sections of the configuration, apart from `server` and `rl_training`: every setting, its type, default and
description.

The string below a field is its description. A new setting is declared here and nowhere else: its environment variable,
its flag, `--help-all`, `--print-config` and server_config.yaml are derived from these classes. A short name of the flag
stands in the annotation (`types.Flag`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mlx_parallm.config.cluster import ClusterConfig
from mlx_parallm.config.inference import InferenceConfig
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.config.types import (
    SERVE,
    TRAIN,
    AdapterName,
    File,
    Flag,
    Folder,
    Folders,
    Integer,
    JsonVariables,
    Names,
    Number,
    OptionalNames,
    Section,
    Selector,
    Text,
    lower,
)

LARGEST_RANK = 512
"""The largest rank of an adapter for which the bank can be configured."""


class ModelConfig(Section):
    """The base model, and the LoRA adapters that training makes for it."""

    base_model_path: Annotated[Text | None, Flag("--model-path", "DIR_OR_HUB_ID", several=True, common=True)] = None
    """Model directory or Hugging Face hub id; or a directory whose subdirectories are models, of which the first is
    loaded at start. null means the bundled SmolLM2-135M-Instruct.
    """
    other_base_models: Annotated[OptionalNames, Flag(only=SERVE)] = ()
    """More base models, each a directory, a hub id, or a directory whose subdirectories are models. Each is loaded when
    a request first names it, and the one used least recently is unloaded when the memory does not hold them all. The
    flag --model-path, with several values, sets base_model_path to the first of them and this to the others.
    """
    draft_model: Annotated[Text | None, Flag("--draft-model", "DIR_OR_HUB_ID")] = None
    """Smaller model with the same vocabulary that drafts tokens for server.speculation: a directory or hub id. null
    means none.
    """
    idle_unload: Annotated[Number | None, Flag("--idle-unload", "SECONDS", only=SERVE)] = Field(default=None, gt=0)
    """Time in seconds after which a base model that nobody has used is unloaded. Its next request loads it again. The
    base model that trains stays loaded. null means never.
    """
    trust_remote_code: Annotated[bool, Flag("--trust-remote-code")] = False
    """Run Python code that comes with a model."""
    allow_special_tokens: Annotated[bool, Flag("--allow-special-tokens")] = False
    """Let the text of a control token in a chat message, such as <|im_end|>, become that token. By default it stays
    text. Prompts of /v1/completions may have control tokens in either case.
    """
    tool_parser: Annotated[Text | None, Flag("--tool-parser", "NAME", alias="--tool-call-parser")] = None
    """How models write tool calls, by vLLM's names, such as hermes, openai or llama3_json. An unknown name is an error
    that lists all. null means as each model's chat template and vocabulary tell.
    """
    reasoning_parser: Annotated[Text | None, Flag("--reasoning-parser", "NAME")] = None
    """How models mark their reasoning, by vLLM's names, such as qwen3, openai_gptoss or mistral. An unknown name is an
    error that lists all. null means as each model's chat template and vocabulary tell.
    """
    chat_template_kwargs: Annotated[
        JsonVariables | None, Flag("--chat-template-kwargs", "JSON", alias="--default-chat-template-kwargs")
    ] = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}' for a model that thinks
    before it answers. Rollouts and training use them too; those of a request come before them. null means none.
    """
    max_model_len: Annotated[Integer | None, Flag("--max-model-len", "TOKENS", common=True)] = Field(default=None, ge=1)
    """Longest prompt plus completion, in tokens. null means the model's own limit."""
    lora_rank: Annotated[Integer, Flag("--lora-rank", "RANK", common=True)] = Field(default=16, ge=1)
    """Rank of the adapters that training makes."""
    lora_alpha: Annotated[Number, Flag("--lora-alpha", "NUMBER")] = Field(default=32.0, gt=0)
    """Adapters that training makes are scaled by lora_alpha / lora_rank."""
    lora_rslora: bool = False
    """Scale them by lora_alpha / √lora_rank instead (rank-stabilised LoRA), so that a large rank learns as fast as a
    small one.
    """
    lora_target_modules: Annotated[Names, Flag("--lora-target-modules", "NAME,NAME")] = Field(
        default=("all-linear",), min_length=1
    )
    """Names of the linear layers that adapters made by training change. all-linear, PEFT's word, means all that are
    not lm_head and do not choose experts or tokens. lm_head is the output head, also in a model whose embedding is its
    head.
    """


class AdaptersConfig(Section):
    """LoRA adapters, served together with the base model in one batch."""

    adapter_dir: Annotated[Folder | None, Flag("--adapter-dir", "DIR", common=True)] = None
    """Folder whose subfolders are adapters, each served under its folder's name, and reward models, each the scorer
    reward_model:NAME. null means no folder.
    """
    allowed_adapter_roots: Annotated[Folders, Flag("--allowed-adapter-roots", "DIR,DIR", only=SERVE)] = ()
    """Folders, in addition to adapter_dir, from which requests may load adapters by path."""
    allowed_hub_adapters: Annotated[OptionalNames, Flag("--allowed-hub-adapters", "PATTERN,PATTERN", only=SERVE)] = ()
    """Ids on the Hugging Face hub from which requests may load adapters, as patterns such as my-org/*, or
    my-org/*@v1 for revisions that are not the newest. null means none.
    They are downloaded with this process's token.
    """
    max_loras: Annotated[Integer, Flag("--max-loras", "VERSIONS")] = Field(default=8, ge=1)
    """Largest number of adapter versions in one batch. The adapter bank holds the weights of each in a slot."""
    max_cpu_loras: Annotated[Integer, Flag("--max-cpu-loras", "VERSIONS")] = Field(default=16, ge=0)
    """Largest number of adapter versions kept in memory beside the slots, unpadded: those in no file, whether they are
    in a slot or not, and evicted ones. Others are read from their files again when a request needs them.
    """
    max_lora_rank: Annotated[Integer, Flag("--max-lora-rank", "RANK")] = Field(default=16, ge=1, le=LARGEST_RANK)
    """Largest rank of an adapter. Every slot of the adapter bank has room for the largest rank that has been loaded.
    When the server trains, a larger lora_rank raises it, unless it is set by the same source as lora_rank or by one
    that takes precedence.
    """
    default_adapter: Annotated[AdapterName, Flag("--default-adapter", "NAME")] = "default"
    """Name of the adapter that training starts with. Names of checkpoints without an adapter's name refer to it."""
    init_from: Annotated[Folder | None, Flag("--init-from", "DIR")] = None
    """Adapter from whose weights the training of the default adapter begins: its folder, a checkpoint, or the folder of
    a run. mlx_parallm_train takes over its rank, alpha and target modules. Training that has begun in checkpoint_dir
    goes on from there. null means new weights, which change nothing yet.
    """
    serve: Annotated[Selector | None, Flag("--serve-adapter", "NAME_OR_CHECKPOINT", only=SERVE)] = None
    """What answers requests that name no adapter: a name, name@version, or a checkpoint of the default adapter
    (checkpoint-7, latest or a tag). null means the base model.
    """
    serve_folder: Annotated[Folder | None, Flag("--serve-adapter-folder", "DIR", only=SERVE)] = None
    """Folder of the adapter that answers requests which name none. It is loaded again when its files have been written
    since, so a program that saves its weights there need not tell the server. Until it has an adapter, serve says what
    answers. null means no folder.
    """


class CheckpointingConfig(Section):
    """Adapter versions saved to disk."""

    interval: Annotated[Integer, Flag("--checkpoint-interval", "UPDATES")] = Field(default=10, ge=1)
    """Number of updates between two checkpoints of a trained adapter. A checkpoint is also saved when the process ends.
    If it is killed (kill -9), the next one makes the updates after the last checkpoint again.
    """
    minutes: Annotated[Number, Flag("--checkpoint-minutes", "MINUTES")] = Field(default=5.0, gt=0)
    """Longest time in minutes between an update and the next checkpoint."""
    keep_n_checkpoints: Annotated[Integer, Flag("--keep-n-checkpoints", "CHECKPOINTS")] = Field(default=10, ge=1)
    """Number of newest checkpoints kept for each adapter. Saving deletes older ones, except those that have a tag or
    are served.
    """
    journal_updates: Annotated[Integer, Flag("--journal-updates", "UPDATES")] = Field(default=1000, ge=100)
    """Number of newest updates of each adapter that the journal keeps with their trajectories. Older ones are removed
    from it when checkpoints have them, so feedback on their answers comes too late, and so does a request to forget
    what they have learnt from.
    """
    remove_forgotten: Annotated[Literal["all", "untagged", "none"], BeforeValidator(lower)] = "all"
    """Which checkpoints go when something that they have learnt from is forgotten (mlx_parallm forget): all of them,
    those without a tag, or none.
    """
    checkpoint_dir: Annotated[Folder | None, Flag("--checkpoint-dir", "DIR", alias="--run", common=True)] = None
    """Folder of one run: its checkpoints, its journal and run.json. What is found there is served and trained from.
    Only one process at a time may use it. null means a new folder under ./checkpoints for each run that trains;
    without training, no checkpoints are saved.
    """
    resume: Annotated[bool, Flag("--resume", common=True)] = False
    """Resume the newest run under ./checkpoints, or the one in checkpoint_dir. It is an error if there is none. The
    flag --resume may name the run: its folder, or its name under ./checkpoints.
    """


class DebugConfig(Section):
    """Switches for finding faults in the engine. All of them cost speed."""

    check_when_idle: Annotated[bool, Flag("--debug")] = False
    """Check the integrity of all resource owners (slots, rows, pins) whenever the server is idle. A failed check ends
    the process.
    """
    check_every_unit: bool = False
    """Check the same after every unit of device work, to find the unit that breaks it."""
    lookahead: bool | None = None
    """Launch each forward pass before the tokens of the previous one are read. false makes every pass end before the
    next work begins. null means false on a CPU and true elsewhere.
    """
    trace: Annotated[File | None, Flag("--debug-trace", "FILE")] = None
    """JSON file for a timeline of the units of device work, which chrome://tracing and Perfetto open. An older file is
    overwritten. null means no file.
    """


class Config(Section):
    """All settings of the server."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    rl_training: RLTrainingConfig = RLTrainingConfig()
    inference: Annotated[InferenceConfig, Flag(only=TRAIN)] = InferenceConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    debug: DebugConfig = DebugConfig()
