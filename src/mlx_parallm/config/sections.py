"""The configuration's sections, every field described once.

The descriptions are what `--help`, `--print-config` and `server_config.yaml` show.
"""

from __future__ import annotations

from pydantic import Field

from mlx_parallm.config.base import Section
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.config.types import AdapterName, Folder, Folders, Integer, Names, Number, Selector, Text


class ModelConfig(Section):
    """The base model, and the LoRA adapters that training makes for it."""

    base_model_path: Text | None = Field(
        default=None, description="A model directory or a hub id; null: the bundled SmolLM2-135M-Instruct."
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with a model.")
    allow_special_tokens: bool = Field(
        default=False,
        description="Let the text of a control token in a message, such as <|im_end|>, become that token. By default "
        "it is text like any other. Prompts of /v1/completions may have control tokens either way.",
    )
    max_model_len: Integer | None = Field(
        default=None, ge=1, description="Longest prompt plus completion, in tokens; null: the model's own limit."
    )
    lora_rank: Integer = Field(default=16, ge=1, description="Rank of the adapters that training makes.")
    lora_alpha: Number = Field(
        default=32.0, gt=0, description="Adapters that training makes are scaled by lora_alpha / lora_rank."
    )
    lora_target_modules: Names = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Linear layers that adapters of training change.",
    )


class AdaptersConfig(Section):
    """LoRA adapters, served beside the base model in one batch."""

    adapter_dir: Folder | None = Field(
        default=None, description="Folder whose subfolders are adapters, served by their folder names; null: none."
    )
    allowed_adapter_roots: Folders = Field(
        default=(),
        description="Folders that adapters may be loaded from by path at run time, beside adapter_dir.",
    )
    max_loras: Integer = Field(
        default=8, ge=1, description="Most adapter versions in one batch: the slots of the adapter bank."
    )
    max_cpu_loras: Integer = Field(
        default=16,
        ge=0,
        description="Most evicted adapter versions kept in memory, unpadded; beyond it they are read from "
        "their files again.",
    )
    max_lora_rank: Integer = Field(
        default=16, ge=1, le=512, description="Largest rank of an adapter; every slot has room for it."
    )
    default_adapter: AdapterName = Field(
        default="default", description="Adapter that is trained from the start, and that checkpoint names belong to."
    )
    serve: Selector | None = Field(
        default=None,
        description="What requests that name no adapter get from the start: name, name@version, or a checkpoint of "
        "the default adapter (checkpoint-7, latest or a tag); null: the base model.",
    )


class CheckpointingConfig(Section):
    """Adapter versions saved to disk."""

    interval: Integer = Field(
        default=10,
        ge=1,
        description="Updates between two checkpoints of a trained adapter. The end of the process makes one too, "
        "unless it is killed (kill -9).",
    )
    minutes: Number = Field(
        default=5.0, gt=0, description="Longest time in minutes that an update waits for a checkpoint."
    )
    keep_n_checkpoints: Integer = Field(
        default=10,
        ge=1,
        description="Newest checkpoints of an adapter that are kept; a save deletes older ones, except those that "
        "have a tag or are served.",
    )
    checkpoint_dir: Folder | None = Field(
        default=None,
        description="A run's folder: checkpoints are saved there, and those that are there already are served and "
        "trained from. One process at a time uses it. null: with training on, each run makes a new folder below "
        "./checkpoints; without, no checkpoints are kept.",
    )
    resume: bool = Field(
        default=False,
        description="Resume the newest run below ./checkpoints, or the one in checkpoint_dir; an error where there is "
        "none.",
    )


class Config(Section):
    """Everything the operator can set."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    rl_training: RLTrainingConfig = RLTrainingConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
