"""The section `server` of the configuration: the HTTP server, its batch and its limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from mlx_parallm.config.types import (
    SERVE,
    ApiKey,
    AutoByteSize,
    ByteSize,
    File,
    Flag,
    Folder,
    GuardSize,
    Host,
    Hosts,
    Integer,
    KVBits,
    Number,
    OptionalNames,
    Origins,
    Proxies,
    Section,
    Url,
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


class Attention(StrEnum):
    """How single tokens attend to the keys and values of their sequences."""

    AUTO = "auto"
    KERNEL = "kernel"
    PLAIN = "plain"


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


class Speculation(StrEnum):
    """Where drafted tokens come from, which are computed besides the next one of each sequence."""

    AUTO = "auto"
    NGRAM = "ngram"
    DRAFT = "draft"
    OFF = "off"


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

    mode: Annotated[Mode, BeforeValidator(_expand_short_mode), Flag("--mode", "MODE", only=SERVE)] = Mode.INFERENCE_ONLY
    """inference_only (short form: inference) serves requests; inference_and_training (short form: rl) also trains
    adapters on collected trajectories; training_priority does the same and gives training half of the device time;
    training_only answers requests for completions with 503. The last three modes turn rl_training.enabled on, and
    rl_training.enabled turns the mode inference_and_training on.
    """
    host: Annotated[Host, Flag("--host", "ADDRESS", only=SERVE, common=True)] = "127.0.0.1"
    """Address to listen on. 0.0.0.0 means every IPv4 interface; then add the names and addresses that clients use to
    allowed_hosts.
    """
    port: Annotated[Integer, Flag("--port", "PORT", only=SERVE, common=True)] = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 means any free port."""
    max_batch_size: Annotated[Integer, Flag("--max-batch-size", "ROWS", common=True)] = Field(default=128, ge=1)
    """Largest number of sequences in the running batch."""
    max_batched_tokens: Annotated[Integer, Flag("--max-batched-tokens", "TOKENS")] = Field(default=2048, ge=1)
    """Largest number of prompt tokens that one unit of device work computes. The scheduler may choose fewer."""
    speculation: Annotated[Speculation, Flag("--speculation", "auto|ngram|draft|off")] = Speculation.AUTO
    """Where the drafted tokens come from that a forward pass computes besides the next one of each sequence, to keep
    those that are right. The texts are the same. ngram: what followed the same words earlier in the prompt or the
    answer. draft: what draft_model says. auto: both; without a draft_model, what the model's own prediction head says,
    if its checkpoint has one. All of them also draft what a grammar demands, and compute drafts only where answers
    should come faster so. off: one token of each sequence at a time.
    """
    max_queued: Annotated[Integer, Flag("--max-queued", "SEQUENCES", only=SERVE)] = Field(default=512, ge=1)
    """Largest number of sequences that wait for admission. Further requests get 429."""
    queue_timeout: Annotated[Number | None, Flag(only=SERVE)] = Field(default=600.0, gt=0)
    """Longest time in seconds that a request may wait for its prefill to begin; then it gets 503. null means no limit.
    """
    kv_cache_memory: Annotated[AutoByteSize, Flag("--kv-cache-memory", "SIZE", common=True)] = None
    """Memory for the KV cache, such as 4GB or 512MiB. The adapter bank and training take what they need of it first.
    auto takes 80 % of the part of mlx_memory_limit that the weights and mlx_cache_limit leave free, and on a CPU at
    most a quarter of RAM. With several base models, which share this memory, the weights count as half of
    mlx_memory_limit at least.
    """
    kv_bits: Annotated[KVBits, Flag("--kv-bits", "8|4")] = None
    """Bits of each number in the KV cache: 8 or 4. A block of 64 tokens is quantized when it is full; the last block of
    each row is kept as it was computed. With the scales, 8 bits take 53 to 56 % of half precision, and 4 bits 28 to
    31 %. null: nothing is quantized.
    """
    attention: Annotated[Attention, BeforeValidator(lower), Flag("--attention", "auto|kernel|plain")] = Attention.AUTO
    """How tokens that are generated attend to the KV cache on a GPU. kernel: in one kernel, which reads the cache where
    it lies; it must agree with plain attention at the start, or the server does not start. plain: by products of MLX.
    auto: in the kernel, if it agrees, is faster on this machine, and a report from such a GPU has shown that it is
    right, which none has for a Mac yet. On a CPU it is plain.
    """
    prefix_cache: Annotated[bool, Flag("--prefix-cache")] = True
    """Keep the keys and values of prompts and answers, so that a later prompt of the same adapter version that begins
    with the same text does not compute them again. They take only what kv_cache_memory leaves free. false: only the
    samples of one prompt share its keys and values.
    """
    prefix_cache_dir: Annotated[Folder | None, Flag("--prefix-cache-dir", "DIR")] = None
    """Folder that keeps cached keys and values across restarts. They are written while the server is idle. The text of
    prompts and answers can be recovered from these files.
    """
    prefix_cache_disk: Annotated[ByteSize, Flag("--prefix-cache-disk", "SIZE")] = Field(default=8 << 30, ge=1)
    """Largest size of the files in prefix_cache_dir, such as 20GB. Those used least recently are removed beyond it."""
    mlx_memory_limit: Annotated[AutoByteSize, Flag("--mlx-memory-limit", "SIZE")] = None
    """Memory that MLX may use in all. Above it, MLX waits for running work and frees cached buffers before it
    allocates. auto takes Metal's recommended working set, 95 % of another GPU's memory, or 80 % of RAM on a CPU.
    """
    mlx_cache_limit: Annotated[AutoByteSize, Flag("--mlx-cache-limit", "SIZE")] = None
    """Memory of freed buffers that MLX keeps for reuse; it counts toward mlx_memory_limit. auto takes 5 % of that
    limit, but 256 MiB at least and 4 GiB at most; on a CPU it takes 32 MiB.
    """
    memory_guard: Annotated[GuardSize, Flag("--memory-guard", "auto|off|SIZE")] = None
    """Memory of this process above which the server holds less: first it keeps no cached prefixes, then rollouts wait,
    then new requests get 503, until there is memory again. It does the same while the system says that memory is
    short. auto takes 90 % of RAM, or of the container's limit. off: nothing is watched.
    """
    wired_memory: Annotated[bool, Flag("--wired-memory")] = False
    """On Metal, wire the memory that MLX may use, so that macOS does not page it out between requests. Some versions
    of macOS panic, and the Mac restarts, when memory is wired and several requests run at once.
    """
    max_decode_stall_ms: Annotated[Integer | None, Flag("--max-decode-stall-ms", "MILLISECONDS")] = Field(
        default=None, ge=1, le=60_000
    )
    """Longest time in milliseconds that a running request should wait between two tokens for other prompts' prefill and
    for training. It is a target, and a single wait can be longer: a unit of device work is sized by its predicted
    duration and is not interrupted, and every waiting prompt gets a chunk at least every 8 decode steps. null means 500
    on a CPU and 100 elsewhere.
    """
    shutdown_timeout: Annotated[Number, Flag("--shutdown-timeout", "SECONDS", only=SERVE)] = Field(default=30.0, ge=0)
    """Time in seconds that running requests get to finish after SIGTERM or Ctrl-C."""
    device_timeout: Annotated[Number | None, Flag("--device-timeout", "SECONDS")] = Field(default=600.0, gt=0)
    """Time in seconds that one piece of device work may take, such as a step; loading a base model may take an hour.
    Then the device counts as hung: requests fail, the process ends with status 1, and the log shows where it hangs.
    Time for which the machine sleeps does not count. null means no limit.
    """
    supervise: Annotated[bool, Flag("--supervise", only=SERVE)] = False
    """Run the server as a child of a process that starts it again when it crashes, hangs, or gives no sign of life for
    device_timeout, and that restores what clients had changed by then: adapters that were loaded, the route and the
    schedule.
    """
    api_key: Annotated[ApiKey | None, Flag("--api-key", "KEY", only=SERVE, common=True)] = Field(
        default=None, repr=False
    )
    """Secret that clients send as a bearer token. null means that no key is required, unless there is a keys_file.
    Prefer the environment variable MLX_PARALLM_API_KEY, because flags are visible in the process list.
    """
    keys_file: Annotated[File | None, Flag("--keys-file", "FILE", only=SERVE)] = None
    """File of named keys, each with a role and limits of its own, which `mlx_parallm keys add` makes. It is read again
    when it changes. api_key, if set, is one more key, which may do everything. null means no file.
    """
    audit_log: Annotated[File | None, Flag("--audit-log", "FILE", only=SERVE)] = None
    """File to which a line of JSON is added for each control action, such as loading an adapter or pausing the server:
    who asked for it, when, and what came of it. null means no file.
    """
    ssl_certfile: Annotated[File | None, Flag("--ssl-certfile", "FILE", only=SERVE)] = None
    """File with the certificate for HTTPS, and those of its issuers, in PEM form. null means HTTP."""
    ssl_keyfile: Annotated[File | None, Flag("--ssl-keyfile", "FILE", only=SERVE)] = None
    """File with the private key of ssl_certfile, in PEM form. null means that it is in ssl_certfile."""
    ssl_keyfile_password: Annotated[SecretStr | None, Flag("--ssl-keyfile-password", "PASSWORD", only=SERVE)] = Field(
        default=None, repr=False
    )
    """Password of ssl_keyfile. Prefer the environment variable MLX_PARALLM_SERVER__SSL_KEYFILE_PASSWORD, because flags
    are visible in the process list.
    """
    atropos_api: Annotated[bool, Flag("--atropos-api", only=SERVE)] = False
    """Serve Atropos' trajectory API (/register-env, /scored_data and others) in place of run-api. The groups that its
    environments send wait for training here. Environments send no bearer token: with api_key, give them a
    rollout_server_url of the form http://any:KEY@localhost:8000.
    """
    ollama_api: Annotated[bool, Flag("--ollama-api", only=SERVE)] = True
    """Serve Ollama's API (/api/chat, /api/generate and others), for programs that know no other. GET / then answers
    programs with `Ollama is running`, unless atropos_api has an answer of its own.
    """
    dashboard: Annotated[bool, Flag("--dashboard", only=SERVE)] = True
    """Serve the dashboard, a page for people, at /dashboard and to browsers that open /. false: they are sent to /docs.
    """
    allowed_hosts: Annotated[Hosts, Flag("--allowed-hosts", "NAME,NAME", only=SERVE)] = ()
    """Names and addresses, without a port, that the Host header of a request may have, in addition to localhost,
    127.0.0.1, ::1, host.docker.internal, host.containers.internal and `host`; and, if `host` is not a loopback address,
    to the names of this machine. '*' allows any.
    """
    cors_origins: Annotated[Origins, Flag("--cors-origins", "ORIGIN,ORIGIN", only=SERVE)] = ()
    """Web origins whose pages may call this server, such as https://example.org."""
    trusted_proxies: Annotated[Proxies, Flag("--trusted-proxies", "ADDRESS,ADDRESS", only=SERVE)] = ()
    """Addresses or networks of reverse proxies, such as 127.0.0.1 or 10.0.0.0/8, whose headers X-Forwarded-For and
    X-Forwarded-Proto say who the client is and whether it uses HTTPS. From any other address these headers are ignored.
    """
    repair_tool_calls: Annotated[bool, Flag("--repair-tool-calls", only=SERVE)] = True
    """Read a tool call that is in another family's form, without its end, with a wrong quote or in a fenced block, if
    it can only mean one thing. The answers name such calls. Collected requests, and those for token ids, keep their
    text.
    """
    strict_fields: Annotated[bool, Flag("--strict-fields", only=SERVE)] = False
    """Refuse requests that have unknown fields. Otherwise unknown fields are ignored and listed in the header
    x-ignored-fields. The routes for adapters, training and control always refuse them, and so does every request with
    collect_trajectory.
    """
    logprobs_mode: Annotated[LogprobsMode, BeforeValidator(lower), Flag("--logprobs-mode", "MODE", only=SERVE)] = (
        LogprobsMode.RAW
    )
    """What the logprobs of generated tokens are of. raw_logprobs: the model itself. processed_logprobs: the
    distribution that sampled the token, after penalties, bias, temperature and filters, as programs for reinforcement
    learning need it. The logprobs of collected trajectories are always of that distribution.
    """
    generation_config: Annotated[
        GenerationConfig,
        BeforeValidator(_named_as_in_vllm),
        BeforeValidator(lower),
        Flag("--generation-config", "auto|none", only=SERVE),
    ] = GenerationConfig.AUTO
    """What sampling fields are that a request leaves out. auto: what the model's generation_config.json says
    (temperature, top_k, top_p, min_p, penalties, and max_new_tokens in chats). none, or vLLM's name for it, vllm:
    OpenAI's defaults. Trajectories and routes that take token ids always have OpenAI's. In either case, the file's
    end-of-sequence tokens count.
    """
    stop_repetition: Annotated[bool, Flag("--stop-repetition", only=SERVE)] = True
    """End an answer that repeats itself without end: its last tokens, 1024 at least, are at most 512 tokens, 8 times or
    more. The finish reason is `repetition`. This is so for live requests of which no trajectories are collected, unless
    they have ignore_eos or token ids. A request's own repetition_detection takes precedence.
    """
    chat_template_dir: Annotated[Folder | None, Flag("--chat-template-dir", "DIR", only=SERVE)] = None
    """Folder of chat templates, NAME.jinja, that a request may choose by name or text with chat_template. null means
    that only the model's own is used.
    """
    max_logprobs: Annotated[Integer, Flag("--max-logprobs", "CANDIDATES", only=SERVE)] = Field(
        default=20, ge=0, le=1024
    )
    """Largest number of candidates that a request may ask for at each token, with logprobs, top_logprobs and
    prompt_logprobs: at most 1024. An answer has at most 262,144 of them.
    """
    return_tokens_as_token_ids: Annotated[bool, Flag("--return-tokens-as-token-ids", only=SERVE)] = False
    """Write the tokens in logprobs as token_id:<id> in answers to requests that do not say how."""
    priority_ratios: Annotated[PriorityRatios, Flag(only=SERVE)] = PriorityRatios()
    collected_traffic_class: Annotated[TrafficClass, BeforeValidator(lower), Flag(only=SERVE)] = TrafficClass.ROLLOUT
    """Whether requests with collect_trajectory count as rollout or as live in priority_ratios. A request's own
    traffic_class takes precedence. All other requests are live.
    """
    embedding_pooling: Annotated[
        Literal["last", "mean"], BeforeValidator(lower), Flag("--embedding-pooling", "last|mean", only=SERVE)
    ] = "last"
    """Which hidden states make an embedding: last is that of the text's last token, mean their mean over all tokens. A
    request may choose. mean computes every token, also of texts whose beginning is in the prefix cache.
    """
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        BeforeValidator(lower),
        Flag("--log-level", "LEVEL"),
    ] = "info"
    """Lowest level that is logged: debug, info, warning, error or critical."""
    log_format: Annotated[Literal["text", "json"], BeforeValidator(lower), Flag("--log-format", "text|json")] = "text"
    """text, or json for one JSON object on each line: time, level, logger, message, the ids of the request and of its
    trace, the adapter, and an exception with its stack.
    """
    otlp_traces_endpoint: Annotated[Url | None, Flag("--otlp-traces-endpoint", "URL", only=SERVE)] = None
    """URL of an OpenTelemetry collector that takes traces as OTLP over HTTP, such as http://127.0.0.1:4318, to which
    /v1/traces is added if it has no path. The variables OTEL_... set the rest. null means that nothing is traced.
    """
    access_log: Annotated[bool, Flag("--access-log", "BOOL", only=SERVE)] = True
    """Log one line of JSON for each request, at level info. It has no text of prompts or answers. Successful probes
    (/health, /ready, /metrics, /v1/stats) are logged at level debug.
    """
    served_model_name: Annotated[OptionalNames, Flag("--served-model-name", "NAME", several=True, only=SERVE)] = ()
    """Names that requests may give as `model`; answers give the first one. [] and null mean the model's own name."""
    model_aliases: Annotated[OptionalNames, Flag("--model-aliases", "PATTERN,PATTERN", only=SERVE)] = ()
    """Further names that mean the served model, for clients that ask for the models of another company. In each, `*`
    stands for any text: 'claude-*' serves Claude Code. An adapter with such a name can be named by `lora_adapter`.
    """
    max_body_bytes: Annotated[ByteSize, Flag(only=SERVE)] = 16 * 2**20
    """Largest request body. A body may hold at most one JSON value for every 16 bytes of this limit. Requests above
    either limit get 413.
    """
    max_connections: Annotated[Integer | None, Flag(only=SERVE)] = Field(default=None, ge=1)
    """Largest number of open connections. At the limit, the connection that has been idle longest is closed for a new
    one; when none is idle, one that sends its body or waits for events, of the client with the most of these; when all
    are being answered, the new one gets 503, unless it asks for the server's health. null means max_batch_size +
    max_queued + 256.
    """
    header_timeout: Annotated[Number, Flag(only=SERVE)] = Field(default=10.0, gt=0)
    """Longest time in seconds for a client to send a request's headers."""
    body_timeout: Annotated[Number, Flag(only=SERVE)] = Field(default=120.0, gt=0)
    """Longest time in seconds for a client to send a request's body."""
    write_timeout: Annotated[Number, Flag(only=SERVE)] = Field(default=60.0, gt=0)
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
