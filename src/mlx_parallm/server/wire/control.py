"""Control of the engine, as vLLM has it: pause, sleep, prefix cache, what the server is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mlx_parallm.server.wire.base import WireOutput, WireQuery, refused
from mlx_parallm.server.wire.schedule import ModeName

KV_CACHE = "kv_cache"

ServerMode = Literal["inference_only", "training_only"] | ModeName


def _false(value: bool) -> bool:
    if value:
        raise refused("only false is taken: what running requests hold is their own, and of their adapter's version")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_false), Field(json_schema_extra={"enum": [False]})]


class PauseQuery(WireQuery):
    """vLLM's."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    """What becomes of the requests under way. `abort`: they fail at once with 503 `aborted`, a stream with an error
    event. `wait`: they go on to their end. `keep`: they stand still, and go on after `/resume`."""
    wait_for_inflight_requests: bool = False
    """vLLM's older name: true is the same as `mode=wait`."""
    clear_cache: bool = True
    """Taken and not read: no cache outlives the requests that filled it, and with `keep` vLLM does not read it
    either."""


class SleepQuery(WireQuery):
    """vLLM's."""

    level: Annotated[int, Field(ge=1, le=2)] = 1
    """What is given back. 1: the KV cache. 2: the adapter bank too; its versions are staged again when a request wants
    them, and those that are in no file stay in memory as copies. The weights always stay: training needs them."""


class WakeQuery(WireQuery):
    """vLLM's."""

    tags: Annotated[list[Literal["weights", "kv_cache"]], Field(max_length=8)] = Field(default_factory=list)
    """What is to wake; left out, everything. `weights` never sleep, so without `kv_cache` nothing changes."""


class ResetPrefixCacheQuery(WireQuery):
    """vLLM's."""

    reset_running_requests: OnlyFalse = False
    """Only false: what running requests hold is their own, and of their adapter's version."""
    reset_external: bool = False
    """Taken either way: there is no external cache."""


class InfoQuery(WireQuery):
    """vLLM's."""

    config_format: Literal["json"] = "json"
    """Only json; vLLM has a text form too."""


class Paused(WireOutput):
    """The pause is in force."""

    status: Literal["paused"]
    """Always the same."""


class Resumed(WireOutput):
    """No pause is in force."""

    status: Literal["resumed"]
    """Always the same."""


class PauseStatus(WireOutput):
    """Whether the engine is paused."""

    is_paused: bool
    """True from `/pause` to `/resume`."""


class Sleeping(WireOutput):
    """Whether the server sleeps."""

    is_sleeping: bool
    """True while completions are refused because of `/sleep`."""


class PrefixCacheReset(WireOutput):
    """No prefix is cached."""

    status: Literal["success"]
    """Always the same."""


class ModelInfo(WireOutput):
    """The base model."""

    name: str
    """As `model` takes it."""
    context_length: int
    """Tokens of prompt and answer that fit one row."""
    vocab_size: int
    """Token ids are below it."""
    quantization: str
    """Of the weights as they were loaded."""
    dtype: str
    """Of the activations."""
    parameters: int
    """Number of weights."""
    weight_bytes: int
    """Bytes that they take in memory."""


class ServerLimits(WireOutput):
    """What the operator set."""

    max_batch_size: int
    """Sequences in one batch."""
    max_queued: int
    """Sequences that may wait beside a full batch."""
    max_sequences_per_request: int
    """`n` times the prompts of one request."""
    max_body_bytes: int
    """Bytes of a request's body."""
    kv_cache_bytes: int
    """Bytes of the KV pool's budget."""
    adapter_slots: int
    """Adapter versions in one batch."""


class ServerInfo(WireOutput):
    """What this server is. No paths, no keys."""

    version: str
    """Of this server."""
    versions: dict[str, str]
    """Of Python and of the packages it runs on, by name."""
    system: str
    """Operating system and processor."""
    model: ModelInfo
    """What is served."""
    limits: ServerLimits
    """What fits."""
    mode: ServerMode
    """What it does with its device time now; `custom`: by a share of time that no mode has."""
    paused: bool
    """True from `/pause` to `/resume`."""
    asleep: bool
    """True while completions are refused because of `/sleep`."""
    draining: bool
    """True once it is shutting down."""
    inference: bool
    """Whether it takes generation requests; false: it only trains."""
    training: bool
    """Whether it trains."""
