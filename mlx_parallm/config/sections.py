"""The sections of the configuration, apart from `rl_training`: every setting, its type, default and description.

The string below a field is its description. A new setting is declared here and nowhere else: `--print-config`,
server_config.yaml and the environment variables are derived from these classes. A flag for it is one line in
`cli/flags.py`, whose help is the description.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from mlx_parallm.config.inference import InferenceConfig
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.config.types import (
    AdapterName,
    ApiKey,
    AutoByteSize,
    ByteSize,
    File,
    Folder,
    Folders,
    Host,
    Hosts,
    Integer,
    Names,
    Number,
    OptionalNames,
    Origins,
    Section,
    Selector,
    Text,
    is_loopback,
    lower,
    machine_names,
)

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
CONTAINER_HOSTS = ("host.docker.internal", "host.containers.internal")
"""Names by which containers call the machine that runs them. No web page can be at such a name, because they are not in
the public DNS."""
OTHER_CONNECTIONS = 256
"""Connections in addition to those of running and queued requests, for probes and idle clients."""
LARGEST_PROMPT_LOGPROBS = 1000
"""The largest number of candidates at each token of a prompt that can be configured."""
LARGEST_RANK = 512
"""The largest rank of an adapter for which the bank can be configured."""


class Mode(StrEnum):
    """How the server divides the device between requests and training."""

    INFERENCE_ONLY = "inference_only"
    INFERENCE_AND_TRAINING = "inference_and_training"
    TRAINING_PRIORITY = "training_priority"
    TRAINING_ONLY = "training_only"


_SHORT_MODES = {"inference": Mode.INFERENCE_ONLY, "rl": Mode.INFERENCE_AND_TRAINING}


def _expand_short_mode(value: object) -> object:
    return _SHORT_MODES.get(value, value) if isinstance(value, str) else value


class TrafficClass(StrEnum):
    """The two kinds of requests, which share the rows of the batch by `priority_ratios`."""

    LIVE = "live"
    ROLLOUT = "rollout"


class LogprobsMode(StrEnum):
    """What the logprobs of generated tokens are of. The values are vLLM's."""

    RAW = "raw_logprobs"
    PROCESSED = "processed_logprobs"


class GenerationConfig(StrEnum):
    """Whether the model's own generation_config.json gives the values of sampling fields that a request leaves out."""

    AUTO = "auto"
    NONE = "none"


def _named_as_in_vllm(value: object) -> object:
    return GenerationConfig.NONE if value == "vllm" else value


class PriorityRatios(Section):
    """How the rows of the batch are divided while live requests and rollouts both wait. When only one kind waits, it
    may use all rows. The two ratios add up to 1."""

    inference: Number = Field(default=0.7, ge=0, le=1)
    """Share of live requests."""
    training: Number = Field(default=0.3, ge=0, le=1)
    """Share of rollouts, whose completions become training data."""

    @model_validator(mode="after")
    def _sums_to_one(self) -> Self:
        if abs(self.inference + self.training - 1) > 1e-6:
            raise ValueError(f"inference + training must be 1, not {self.inference + self.training:g}; set both")
        return self


class ServerConfig(Section):
    """The HTTP server, its batch and its limits."""

    mode: Annotated[Mode, BeforeValidator(_expand_short_mode)] = Mode.INFERENCE_ONLY
    """inference_only (short form: inference) serves requests; inference_and_training (short form: rl) also trains
    adapters on collected trajectories; training_priority does the same and gives training half of the device time;
    training_only answers requests for completions with 503. The last three modes turn rl_training.enabled on, and
    rl_training.enabled turns the mode inference_and_training on.
    """
    host: Host = "127.0.0.1"
    """Address to listen on. 0.0.0.0 means every IPv4 interface; then add the names and addresses that clients use to
    allowed_hosts.
    """
    port: Integer = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 means any free port."""
    max_batch_size: Integer = Field(default=128, ge=1)
    """Largest number of sequences in the running batch."""
    max_batched_tokens: Integer = Field(default=2048, ge=1)
    """Largest number of prompt tokens that one unit of device work computes. The scheduler may choose fewer."""
    max_queued: Integer = Field(default=512, ge=1)
    """Largest number of sequences that wait for admission. Further requests get 429."""
    queue_timeout: Number | None = Field(default=600.0, gt=0)
    """Longest time in seconds that a request may wait for its prefill to begin; then it gets 503. null means no limit.
    """
    kv_cache_memory: AutoByteSize = None
    """Memory for the KV cache, such as 4GB or 512MiB. The adapter bank and training take what they need of it first.
    auto takes 80 % of the part of mlx_memory_limit that the weights and mlx_cache_limit leave free, and on a CPU at
    most a quarter of RAM. With several base models, which share this memory, the weights count as half of
    mlx_memory_limit at least.
    """
    prefix_cache: bool = True
    """Keep the keys and values of prompts and answers, so that a later prompt of the same adapter version that begins
    with the same text does not compute them again. They take only what kv_cache_memory leaves free. false: only the
    samples of one prompt share its keys and values.
    """
    prefix_cache_dir: Folder | None = None
    """Folder that keeps cached keys and values across restarts. They are written while the server is idle. The text of
    prompts and answers can be recovered from these files.
    """
    prefix_cache_disk: ByteSize = Field(default=8 << 30, ge=1)
    """Largest size of the files in prefix_cache_dir, such as 20GB. Those used least recently are removed beyond it."""
    mlx_memory_limit: AutoByteSize = None
    """Memory that MLX may use in all. Above it, MLX waits for running work and frees cached buffers before it
    allocates. auto takes Metal's recommended working set, 95 % of another GPU's memory, or 80 % of RAM on a CPU. On
    Metal the same amount is wired, so that macOS does not page it out.
    """
    mlx_cache_limit: AutoByteSize = None
    """Memory of freed buffers that MLX keeps for reuse; it counts toward mlx_memory_limit. auto takes 5 % of that
    limit, but 256 MiB at least and 4 GiB at most; on a CPU it takes 32 MiB.
    """
    max_decode_stall_ms: Integer | None = Field(default=None, ge=1, le=60_000)
    """Longest time in milliseconds that a running request should wait between two tokens for other prompts' prefill and
    for training. It is a target, and a single wait can be longer: a unit of device work is sized by its predicted
    duration and is not interrupted, and every waiting prompt gets a chunk at least every 8 decode steps. null means 500
    on a CPU and 100 elsewhere.
    """
    shutdown_timeout: Number = Field(default=30.0, ge=0)
    """Time in seconds that running requests get to finish after SIGTERM or Ctrl-C."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Secret that clients send as a bearer token. null means that no key is required, unless there is a keys_file.
    Prefer the environment variable MLX_PARALLM_API_KEY, because flags are visible in the process list.
    """
    keys_file: File | None = None
    """File of named keys, each with a role and limits of its own, which `mlx_parallm keys add` makes. It is read again
    when it changes. api_key, if set, is one more key, which may do everything. null means no file.
    """
    audit_log: File | None = None
    """File to which a line of JSON is added for each control action, such as loading an adapter or pausing the server:
    who asked for it, when, and what came of it. null means no file.
    """
    ssl_certfile: File | None = None
    """File with the certificate for HTTPS, and those of its issuers, in PEM form. null means HTTP."""
    ssl_keyfile: File | None = None
    """File with the private key of ssl_certfile, in PEM form. null means that it is in ssl_certfile."""
    ssl_keyfile_password: SecretStr | None = Field(default=None, repr=False)
    """Password of ssl_keyfile. Prefer the environment variable MLX_PARALLM_SERVER__SSL_KEYFILE_PASSWORD, because flags
    are visible in the process list.
    """
    atropos_api: bool = False
    """Serve Atropos' trajectory API (/register-env, /scored_data and others) in place of run-api. The groups that its
    environments send wait for training here. Environments send no bearer token: with api_key, give them a
    rollout_server_url of the form http://any:KEY@localhost:8000.
    """
    ollama_api: bool = True
    """Serve Ollama's API (/api/chat, /api/generate and others), for programs that know no other. GET / then answers
    `Ollama is running`, unless atropos_api has an answer of its own.
    """
    allowed_hosts: Hosts = ()
    """Names and addresses, without a port, that the Host header of a request may have, in addition to localhost,
    127.0.0.1, ::1, host.docker.internal, host.containers.internal and `host`; and, if `host` is not a loopback address,
    to the names of this machine. '*' allows any.
    """
    cors_origins: Origins = ()
    """Web origins whose pages may call this server, such as https://example.org."""
    strict_fields: bool = False
    """Refuse requests that have unknown fields. Otherwise unknown fields are ignored and listed in the header
    x-ignored-fields. The routes for adapters, training and control always refuse them, and so does every request with
    collect_trajectory.
    """
    logprobs_mode: Annotated[LogprobsMode, BeforeValidator(lower)] = LogprobsMode.RAW
    """What the logprobs of generated tokens are of. raw_logprobs: the model itself. processed_logprobs: the
    distribution that drew the token, after penalties, bias, temperature and filters, as programs for reinforcement
    learning need it. The logprobs of collected trajectories are always of that distribution.
    """
    generation_config: Annotated[GenerationConfig, BeforeValidator(_named_as_in_vllm), BeforeValidator(lower)] = (
        GenerationConfig.AUTO
    )
    """What sampling fields are that a request leaves out. auto: what the model's generation_config.json says
    (temperature, top_k, top_p, min_p, penalties, and max_new_tokens in chats). none, or vLLM's name for it, vllm:
    OpenAI's defaults. Trajectories and routes that take token ids always have OpenAI's. In either case, the file's
    end-of-sequence tokens count.
    """
    chat_template_dir: Folder | None = None
    """Folder of chat templates, NAME.jinja, that a request may choose by name or text with chat_template. null means
    that only the model's own is used.
    """
    max_prompt_logprobs: Integer = Field(default=20, ge=20, le=LARGEST_PROMPT_LOGPROBS)
    """Largest number of candidates that a request may ask for at each token of its prompt, with prompt_logprobs."""
    return_tokens_as_token_ids: bool = False
    """Write the tokens in logprobs as token_id:<id> in answers to requests that do not say how."""
    priority_ratios: PriorityRatios = PriorityRatios()
    collected_traffic_class: Annotated[TrafficClass, BeforeValidator(lower)] = TrafficClass.ROLLOUT
    """Whether requests with collect_trajectory count as rollout or as live in priority_ratios. A request's own
    traffic_class takes precedence. All other requests are live.
    """
    embedding_pooling: Annotated[Literal["last", "mean"], BeforeValidator(lower)] = "last"
    """Which hidden states make an embedding: last is that of the text's last token, mean their mean over all tokens. A
    request may choose. mean computes every token, also of texts whose beginning is in the prefix cache.
    """
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lower)] = "info"
    """Lowest level that is logged: debug, info, warning, error or critical."""
    access_log: bool = True
    """Log one line of JSON for each request, at level info. It has no text of prompts or answers. Successful probes
    (/health, /ready, /metrics) are logged at level debug.
    """
    served_model_name: OptionalNames = ()
    """Names that requests may give as `model`; answers give the first one. [] and null mean the model's own name."""
    model_aliases: OptionalNames = ()
    """Further names that mean the served model, for clients that ask for the models of another company. In each, `*`
    stands for any text: 'claude-*' serves Claude Code. An adapter with such a name can be named by `lora_adapter`.
    """
    max_body_bytes: ByteSize = 16 * 2**20
    """Largest request body. A body may hold at most one JSON value for every 16 bytes of this limit. Requests above
    either limit get 413.
    """
    max_connections: Integer | None = Field(default=None, ge=1)
    """Largest number of open connections. At the limit, the connection that has been idle longest is closed for a new
    one; when none is idle, the new one gets 503. null means max_batch_size + max_queued + 256.
    """
    header_timeout: Number = Field(default=10.0, gt=0)
    """Longest time in seconds for a client to send a request's headers."""
    body_timeout: Number = Field(default=120.0, gt=0)
    """Longest time in seconds for a client to send a request's body."""
    write_timeout: Number = Field(default=60.0, gt=0)
    """Time in seconds after which a client that reads nothing of its answer is disconnected."""

    @property
    def accepted_hosts(self) -> tuple[str, ...]:
        """Names that the Host header of a request may have, without port; `*` is any name."""
        own = () if is_loopback(self.host) else machine_names()
        return (*LOOPBACK_HOSTS, *CONTAINER_HOSTS, self.host, *own, *self.allowed_hosts)

    @property
    def scheme(self) -> str:
        """`https` or `http`."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def connection_limit(self) -> int:
        """The largest number of open connections."""
        return self.max_connections or self.max_batch_size + self.max_queued + OTHER_CONNECTIONS


class ModelConfig(Section):
    """The base model, and the LoRA adapters that training makes for it."""

    base_model_path: Text | None = None
    """Model directory or Hugging Face hub id; or a directory whose subdirectories are models, of which the first is
    loaded at start. null means the bundled SmolLM2-135M-Instruct.
    """
    other_base_models: OptionalNames = ()
    """More base models, each a directory, a hub id, or a directory whose subdirectories are models. Each is loaded when
    a request first names it, and the one used least recently is put away when the memory does not hold them all. The
    flag --model-path, with several values, sets base_model_path to the first of them and this to the others.
    """
    idle_unload: Number | None = Field(default=None, gt=0)
    """Time in seconds after which a base model that nobody has used is put away. Its next request loads it again. The
    base model that trains stays loaded. null means never.
    """
    trust_remote_code: bool = False
    """Run Python code that comes with a model."""
    allow_special_tokens: bool = False
    """Let the text of a control token in a chat message, such as <|im_end|>, become that token. By default it stays
    text. Prompts of /v1/completions may have control tokens in either case.
    """
    max_model_len: Integer | None = Field(default=None, ge=1)
    """Longest prompt plus completion, in tokens. null means the model's own limit."""
    lora_rank: Integer = Field(default=16, ge=1)
    """Rank of the adapters that training makes."""
    lora_alpha: Number = Field(default=32.0, gt=0)
    """Adapters that training makes are scaled by lora_alpha / lora_rank."""
    lora_rslora: bool = False
    """Scale them by lora_alpha / √lora_rank instead (rank-stabilised LoRA), so that a large rank learns as fast as a
    small one.
    """
    lora_target_modules: Names = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Names of the linear layers that adapters made by training change. lm_head is the output head, also in a model
    whose embedding is its head.
    """


class AdaptersConfig(Section):
    """LoRA adapters, served together with the base model in one batch."""

    adapter_dir: Folder | None = None
    """Folder whose subfolders are adapters, each served under its folder's name, and reward models, each the scorer
    reward_model:NAME. null means no folder.
    """
    allowed_adapter_roots: Folders = ()
    """Folders, in addition to adapter_dir, from which requests may load adapters by path."""
    max_loras: Integer = Field(default=8, ge=1)
    """Largest number of adapter versions in one batch. The adapter bank holds the weights of each in a slot, whose
    memory is reserved at the start.
    """
    max_cpu_loras: Integer = Field(default=16, ge=0)
    """Largest number of evicted adapter versions kept in memory, unpadded. Others are read from their files again when
    a request needs them.
    """
    max_lora_rank: Integer = Field(default=16, ge=1, le=LARGEST_RANK)
    """Largest rank of an adapter. Every slot of the adapter bank has room for it. When the server trains, a larger
    lora_rank raises it, unless it is set by the same source as lora_rank or by one that takes precedence.
    """
    default_adapter: AdapterName = "default"
    """Name of the adapter that training starts with. Names of checkpoints without an adapter's name refer to it."""
    serve: Selector | None = None
    """What answers requests that name no adapter: a name, name@version, or a checkpoint of the default adapter
    (checkpoint-7, latest or a tag). null means the base model.
    """
    serve_folder: Folder | None = None
    """Folder of the adapter that answers requests which name none. It is loaded again when its files have been written
    since, so a program that saves its weights there need not tell the server. Until it has an adapter, serve says what
    answers. null means no folder.
    """


class CheckpointingConfig(Section):
    """Adapter versions saved to disk."""

    interval: Integer = Field(default=10, ge=1)
    """Number of updates between two checkpoints of a trained adapter. A checkpoint is also saved when the process ends.
    If it is killed (kill -9), the next one makes the updates after the last checkpoint again.
    """
    minutes: Number = Field(default=5.0, gt=0)
    """Longest time in minutes between an update and the next checkpoint."""
    keep_n_checkpoints: Integer = Field(default=10, ge=1)
    """Number of newest checkpoints kept for each adapter. Saving deletes older ones, except those that have a tag or
    are served.
    """
    checkpoint_dir: Folder | None = None
    """Folder of one run: its checkpoints, its journal and run.json. What is found there is served and trained from.
    Only one process at a time may use it. null means a new folder under ./checkpoints for each run that trains;
    without training, no checkpoints are saved.
    """
    resume: bool = False
    """Resume the newest run under ./checkpoints, or the one in checkpoint_dir. It is an error if there is none. The
    flag --resume may name the run: its folder, or its name under ./checkpoints.
    """


class DebugConfig(Section):
    """Switches for finding faults in the engine. All of them cost speed."""

    check_when_idle: bool = False
    """Check the integrity of all resource owners (slots, rows, pins) whenever the server is idle. A failed check ends
    the process.
    """
    check_every_unit: bool = False
    """Check the same after every unit of device work, to find the unit that breaks it."""
    lookahead: bool | None = None
    """Launch each forward pass before the tokens of the previous one are read. false makes every pass end before the
    next work begins. null means false on a CPU and true elsewhere.
    """
    trace: File | None = None
    """JSON file for a timeline of the units of device work, which chrome://tracing and Perfetto open. An older file is
    overwritten. null means no file.
    """


class Config(Section):
    """All settings of the server."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    rl_training: RLTrainingConfig = RLTrainingConfig()
    inference: InferenceConfig = InferenceConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    debug: DebugConfig = DebugConfig()
