"""The section `server`: HTTP, the batch and its limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.config.base import Section
from mlx_parallm.config.types import ApiKey, AutoByteSize, ByteSize, Host, Hosts, Integer, Number, Origins, Text, lower


class Mode(StrEnum):
    """What the server does with its device time."""

    INFERENCE_ONLY = "inference_only"
    INFERENCE_AND_TRAINING = "inference_and_training"
    TRAINING_PRIORITY = "training_priority"
    TRAINING_ONLY = "training_only"


SHORT_MODES = {"inference": Mode.INFERENCE_ONLY, "rl": Mode.INFERENCE_AND_TRAINING}


def _long_mode(value: object) -> object:
    return SHORT_MODES.get(value, value) if isinstance(value, str) else value


class PriorityRatios(Section):
    """Shares of the batch's rows while both classes wait; a class alone may use them all. They add up to 1."""

    inference: Number = Field(default=0.7, ge=0, le=1, description="Share of live requests.")
    training: Number = Field(default=0.3, ge=0, le=1, description="Share of rollouts of a training driver.")

    @model_validator(mode="after")
    def _sums_to_one(self) -> Self:
        if abs(self.inference + self.training - 1) > 1e-6:
            raise ValueError(f"inference + training must be 1, not {self.inference + self.training:g}; set both")
        return self


class ServerConfig(Section):
    """The HTTP server, its batch and its limits."""

    mode: Annotated[Mode, BeforeValidator(_long_mode)] = Field(
        default=Mode.INFERENCE_ONLY,
        description="inference_only (short: inference), inference_and_training (short: rl: collected trajectories "
        "train adapters beside requests), training_priority (the same with half of the device's time) or training_only "
        "(requests for completions get 503). The last three and rl_training.enabled turn each other on.",
    )
    host: Host = Field(
        default="127.0.0.1",
        description="Address to listen on; 0.0.0.0 is every IPv4 interface (put the names and addresses "
        "that clients use into allowed_hosts).",
    )
    port: Integer = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_batch_size: Integer = Field(default=128, ge=1, description="Most sequences in the running batch.")
    max_batched_tokens: Integer = Field(
        default=2048, ge=1, description="Most prompt tokens in one unit of prefill; the scheduler may choose fewer."
    )
    max_queued: Integer = Field(
        default=512, ge=1, description="Most sequences that wait to be admitted; beyond it a request gets 429."
    )
    queue_timeout: Number | None = Field(
        default=600.0,
        gt=0,
        description="Seconds that a request may wait until the device begins with it, after which it gets 503; "
        "null: any time.",
    )
    kv_cache_memory: AutoByteSize = Field(
        default=None,
        description="Memory for the KV cache, such as 4GB or 512MiB, shared with the adapter bank and training, which "
        "come first; auto takes 80 % of what weights and MLX's buffer cache leave of mlx_memory_limit, and at most a "
        "quarter of RAM on a CPU.",
    )
    mlx_memory_limit: AutoByteSize = Field(
        default=None,
        description="Memory that MLX may use in all; above it MLX waits for running work and frees cached buffers "
        "first. auto takes Metal's recommended working set, 95 % of another GPU's memory, or 80 % of RAM on a CPU. On "
        "Metal as much is wired, so that macOS does not page it out.",
    )
    mlx_cache_limit: AutoByteSize = Field(
        default=None,
        description="Memory of freed buffers that MLX keeps to use again, part of mlx_memory_limit; auto takes 5 % of "
        "that, 256 MiB to 4 GiB, or 32 MiB on a CPU.",
    )
    max_decode_stall_ms: Integer | None = Field(
        default=None,
        ge=1,
        le=60_000,
        description="Milliseconds of work for other prompts and for training that are put between two tokens of "
        "running requests. Work is sized by prediction and not interrupted, and a waiting prompt gets a chunk every "
        "few tokens whatever is predicted, so a wait can be longer; null: 500 on a CPU, 100 elsewhere.",
    )
    shutdown_timeout: Number = Field(
        default=30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM or Ctrl-C."
    )
    api_key: ApiKey | None = Field(
        default=None,
        repr=False,
        description="Secret that clients send as a bearer token; null: no key is asked for. Prefer the environment "
        "variable MLX_PARALLM_API_KEY: flags show in the process list.",
    )
    allowed_hosts: Hosts = Field(
        default=(),
        description="Names and addresses, without port, by which clients may call this server (their Host header), "
        "beside localhost, 127.0.0.1, ::1 and `host`; '*' allows any.",
    )
    cors_origins: Origins = Field(
        default=(),
        description="Web origins whose pages may call this server, such as https://example.org; none by default.",
    )
    strict_fields: bool = Field(
        default=False,
        description="Refuse requests with fields that this server does not know; otherwise those are ignored and named "
        "in the header x-ignored-fields. Routes for adapters, training and control always refuse them, and so does "
        "every route when the request has collect_trajectory.",
    )
    priority_ratios: PriorityRatios = PriorityRatios()
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lower)] = Field(
        default="info", description="debug, info, warning, error or critical."
    )
    access_log: bool = Field(
        default=True,
        description="Log a line of JSON for each request, at level info; it has no text of prompts or answers. Probes "
        "(/health, /ready, /metrics) are logged at level debug unless they fail.",
    )
    served_model_name: Text | None = Field(
        default=None, description="Name that clients give as `model`; null: the model's own name."
    )
    max_body_bytes: ByteSize = Field(
        default=16 * 2**20,
        description="Largest request body, of at most one JSON value for every 16 bytes of this size; beyond it a "
        "request gets 413.",
    )
    max_connections: Integer | None = Field(
        default=None,
        ge=1,
        description="Most open connections; beyond it the one that is idle longest is closed, or the new one gets 503. "
        "null: max_batch_size + max_queued + 256.",
    )
    header_timeout: Number = Field(default=10.0, gt=0, description="Seconds that a request's headers may take.")
    body_timeout: Number = Field(default=120.0, gt=0, description="Seconds that a request's body may take.")
    write_timeout: Number = Field(
        default=60.0, gt=0, description="Seconds after which a client that reads nothing of its answer is disconnected."
    )
    debug: bool = Field(
        default=False, description="Check every resource owner's integrity whenever the server is idle."
    )
