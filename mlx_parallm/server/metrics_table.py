"""The Prometheus metrics, one row each: to add one whose value can be read, add its row.

A `Table` has the metrics of one kind of thing, such as a base model, and the labels that tell such things apart. On
each scrape `metrics.ServerMetrics` reads the things. `REQUESTS` has the metrics of a request that has finished. All
others are counted as they happen, in `metrics.ServerMetrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.utils import floatToGoString

from mlx_parallm.engine import figures
from mlx_parallm.engine.figures import EngineStats

if TYPE_CHECKING:
    from mlx_parallm.adapters.cards import AdapterStats
    from mlx_parallm.core.requests import RequestFinished
    from mlx_parallm.rl.status import TrainingStatus
    from mlx_parallm.server.limits import Account, SequenceGate

S = TypeVar("S")
Labels = tuple[str, ...]
"""Names of labels, or their values in the same order."""
Value = float | figures.Histogram | tuple[int, float]
"""Of a gauge or a counter, a histogram, and a summary: the number of its values, and their sum."""

PREFIX = "mlx_parallm_"
MODEL_LABEL = "model_name"
"""The label with the name of the base model."""


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """A metric of one of the kinds below.

    Attributes:
        name: without `PREFIX`. The text format adds `_total` to a counter's name.
        about: its help text.
        read: its value; None: there is none yet, and so no sample. With `by`: the value for each of their values.
        by: labels of the metric, besides those of its table.
        in_vllm: whether vLLM has it too, with this name and meaning; see `metrics.VLLMNames`.
    """

    family: ClassVar[
        type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily] | type[SummaryMetricFamily]
    ]
    name: str
    about: str
    read: Callable[[S], Value | Mapping[Any, float] | None]
    by: Labels = ()
    in_vllm: bool = False


class Gauge(Row[S]):
    family = GaugeMetricFamily


class Counter(Row[S]):
    family = CounterMetricFamily


class Histogram(Row[S]):
    family = HistogramMetricFamily


class Summary(Row[S]):
    family = SummaryMetricFamily


class Table(Generic[S]):
    """The metrics of one kind of thing. `labels` tell one thing from another."""

    def __init__(self, labels: Labels, *rows: Row[S]) -> None:
        self.rows = rows
        self._labels = labels

    def read(self, things: Mapping[Labels, S]) -> Iterator[Metric]:
        """All metrics, also those that have no samples. `things`: each by the values of the table's labels."""
        for row in self.rows:
            family = row.family(PREFIX + row.name, row.about, labels=(*self._labels, *row.by))
            for labels, thing in things.items():
                value = row.read(thing)
                for more, each in (value if isinstance(value, Mapping) else {(): value}).items():
                    if each is not None:
                        family.add_metric((*labels, *_values(more)), *_arguments(each))
            yield family


def _values(by: str | Labels) -> Labels:
    return (by,) if isinstance(by, str) else by


def _arguments(value: Value) -> tuple[Any, ...]:
    """A value as `add_metric` takes it. Prometheus's buckets are cumulative; ours count each bucket alone."""
    if isinstance(value, figures.Histogram):
        bounds = map(floatToGoString, (*value.bounds, float("inf")))
        return list(zip(bounds, accumulate(value.counts), strict=True)), value.total
    return value if isinstance(value, tuple) else (float(value),)


# -- engine ----------------------------------------------------------------------------------------

ENGINE: Table[EngineStats] = Table(
    (),
    Gauge("engine_paused", "1 from POST /pause to POST /resume.", lambda stats: stats.paused),
    Gauge("engine_alive", "1 while the device thread runs.", lambda stats: stats.alive),
    Gauge(
        "engine_stuck",
        "1 once one piece of device work has taken half of --device-timeout.",
        lambda stats: bool(stats.stuck),
    ),
    Gauge("process_footprint_bytes", "Bytes of memory that this process takes.", lambda stats: stats.machine.footprint),
    Gauge(
        "process_footprint_limit_bytes",
        "Bytes above which memory counts as short; 0 if it is not watched.",
        lambda stats: stats.machine.footprint_limit,
    ),
    Gauge(
        "memory_relief",
        "What is done about short memory: 0 nothing, 1 no cached prefixes, 2 training waits too, 3 no new requests.",
        lambda stats: stats.machine.relief,
    ),
    Gauge(
        "training_held",
        "1 while training waits for power, cooling or memory.",
        lambda stats: bool(stats.machine.training_waits_for),
    ),
    Gauge(
        "training_share_now",
        "Share of device time that training got in the last window.",
        lambda stats: stats.training_share,
    ),
    Gauge(
        "training_share_target",
        "Share of device time for training while requests run.",
        lambda stats: stats.schedule.training_time_share,
    ),
    Gauge(
        "decode_stall_budget_seconds",
        "Longest time for other work between two decode steps; how much work fits this time is predicted.",
        lambda stats: stats.schedule.max_decode_stall_s,
    ),
    Gauge(
        "decode_gap_largest_seconds",
        "The longest time between two decode steps since start.",
        lambda stats: stats.decode_gaps.largest,
    ),
    Counter("engine_steps", "Forward passes launched that draw tokens.", lambda stats: stats.steps_total),
    Counter(
        "engine_failed_steps",
        "Units of device work that failed, except those of training.",
        lambda stats: stats.failed_steps_total,
    ),
    Counter("engine_aborted", "Requests aborted before their end.", lambda stats: stats.aborted_total),
    Histogram(
        "decode_gap_seconds",
        "Time between two decode steps, while rows wait for the second.",
        lambda stats: stats.decode_gaps,
    ),
    Histogram(
        "training_share",
        "Share of device time that training got, for each window in which training and requests always had work.",
        lambda stats: stats.training_shares,
    ),
    Gauge("memory_bytes", "Device memory by what holds it.", lambda stats: stats.memory_bytes, by=("account",)),
)
BASES: Table[EngineStats] = Table(
    (MODEL_LABEL,),
    Gauge("num_requests_running", "Sequences that have a row of the batch.", lambda stats: stats.running, in_vllm=True),
    Gauge(
        "num_requests_waiting", "Sequences that wait for a row of the batch.", lambda stats: stats.waiting, in_vllm=True
    ),
    Gauge(
        "kv_cache_usage_perc",
        "Share of the KV pool's budget that rows use, 0 to 1.",
        lambda stats: stats.kv_bytes_held / stats.kv_bytes_budget if stats.kv_bytes_budget else 0.0,
        in_vllm=True,
    ),
    Gauge("kv_cache_bytes_held", "Bytes of the KV pool that rows use.", lambda stats: stats.kv_bytes_held),
    Gauge(
        "kv_cache_bytes_cached",
        "Bytes of cached prefixes that no row uses; rows get them when they need memory.",
        lambda stats: stats.kv_bytes_cached,
    ),
    Gauge(
        "kv_cache_tokens", "Tokens of rows in the KV pool; shared ones count once.", lambda stats: stats.kv_tokens_used
    ),
    Counter(
        "num_preemptions",
        "Rows recomputed because KV memory ran out, a unit of device work failed, or another key had too few rows.",
        lambda stats: stats.preemptions_total,
        in_vllm=True,
    ),
    Counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_cache_queries_total,
        in_vllm=True,
    ),
    Counter(
        "prefix_cache_hits",
        "Prompt tokens whose keys and values were taken from the prefix cache.",
        lambda stats: stats.prefix_cache_hits_total,
        in_vllm=True,
    ),
    Counter(
        "external_prefix_cache_queries",
        "Prompt tokens looked up in the files of the prefix cache, because its memory did not have them.",
        lambda stats: stats.external_prefix_cache_queries_total,
        in_vllm=True,
    ),
    Counter(
        "external_prefix_cache_hits",
        "Prompt tokens whose keys and values were read from files of the prefix cache.",
        lambda stats: stats.external_prefix_cache_hits_total,
        in_vllm=True,
    ),
    Counter("prompt_tokens", "Prompt tokens processed.", lambda stats: stats.prompt_tokens_total, in_vllm=True),
    Counter("generation_tokens", "Tokens generated.", lambda stats: stats.generation_tokens_total, in_vllm=True),
    Counter(
        "spec_decode_num_draft_tokens",
        "Guessed tokens that a forward pass computed and checked.",
        lambda stats: stats.draft_tokens_total,
        in_vllm=True,
    ),
    Counter(
        "spec_decode_num_accepted_tokens",
        "Guessed tokens that were right.",
        lambda stats: stats.accepted_draft_tokens_total,
        in_vllm=True,
    ),
    Gauge(  # vLLM's form: the numbers are labels, and the value is 1
        "cache_config_info",
        "Tokens of a KV block, and number of blocks.",
        lambda stats: {(str(stats.kv_block_tokens), str(stats.kv_blocks)): 1} if stats.kv_blocks else {},
        by=("block_size", "num_gpu_blocks"),
        in_vllm=True,
    ),
)
QUEUE: Table[SequenceGate] = Table(
    (),
    Gauge("queue_sequences_held", "Sequences inside the bounded queue.", lambda gate: gate.held),
    Gauge("queue_sequences_limit", "Places in the bounded queue.", lambda gate: gate.limit),
)

# -- requests, which the server counts itself ---------------------------------------------------------

REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.75, 1.5, 3.0, 10.0)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A histogram of requests that have finished, by base model. vLLM has each of them too. `read`: the value of a
    request; None: it has none."""

    name: str
    about: str
    buckets: tuple[float, ...]
    read: Callable[[RequestFinished], float | None]


REQUESTS = (
    RequestRow(
        "e2e_request_latency_seconds",
        "Time from arrival to last token.",
        REQUEST_BUCKETS_S,
        lambda end: end.finished_at - end.arrived_at,
    ),
    RequestRow(
        "request_queue_time_seconds",
        "Time from arrival to first prefill.",
        REQUEST_BUCKETS_S,
        lambda end: end.started_at - end.arrived_at,
    ),
    RequestRow(
        "request_prefill_time_seconds",
        "Time from first prefill to first token.",
        REQUEST_BUCKETS_S,
        lambda end: end.first_token_at - end.started_at if end.completion_tokens else None,
    ),
    RequestRow(
        "request_decode_time_seconds",
        "Time from first token to last token.",
        REQUEST_BUCKETS_S,
        lambda end: end.finished_at - end.first_token_at if end.completion_tokens else None,
    ),
    RequestRow(
        "request_inference_time_seconds",
        "Time from first prefill to last token.",
        REQUEST_BUCKETS_S,
        lambda end: end.finished_at - end.started_at,
    ),
    RequestRow("request_prompt_tokens", "Tokens of a request's prompts.", LENGTHS, lambda end: end.prompt_tokens),
    RequestRow(
        "request_generation_tokens", "Tokens generated for a request.", LENGTHS, lambda end: end.completion_tokens
    ),
)

# -- adapters --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ServedCounts:
    """Work done for one adapter version. `running`: requests under way. `latency_s` is the sum over finished requests,
    in seconds."""

    requests: int = 0
    running: int = 0
    finished: int = 0
    latency_s: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0


ADAPTERS: Table[AdapterStats] = Table(
    (),
    Gauge("lora_slots", "Adapter slots, not counting the base model's.", lambda stats: stats.slots),
    Gauge("lora_slots_used", "Slots that hold an adapter version.", lambda stats: stats.slots_used),
    Gauge("lora_slots_pinned", "Slots that live sequences hold.", lambda stats: stats.slots_pinned),
    Gauge("lora_bank_bytes", "Bytes of the adapter bank, which has all slots.", lambda stats: stats.bank_bytes),
    Gauge("lora_flip_seconds_last", "Time to make the last loaded version live.", lambda stats: stats.flip_s_last),
    Gauge("lora_flip_seconds_max", "Longest time to make a loaded version live.", lambda stats: stats.flip_s_max),
    Gauge("lora_stage_seconds_last", "Time to load the last version into its slot.", lambda stats: stats.stage_s_last),
    Counter(
        "lora_swaps",
        "Changes of the live version of a name, or of the route for requests that name no adapter.",
        lambda stats: stats.swaps_total,
    ),
    Counter("lora_staged", "Adapter versions loaded into a slot.", lambda stats: stats.staged_total),
    Counter("lora_evicted", "Adapter versions that lost their slot.", lambda stats: stats.evicted_total),
    Counter("checkpoint_saves", "Checkpoints written.", lambda stats: stats.checkpoint_saves_total),
    Gauge(  # vLLM's form: the names are labels, with commas between them, and the value is the time
        "lora_requests_info",
        "Adapters of the live requests.",
        lambda stats: {(str(stats.slots), ",".join(stats.running), ",".join(stats.waiting)): time.time()},
        by=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        in_vllm=True,
    ),
)
VERSIONS: Table[ServedCounts] = Table(
    (MODEL_LABEL, "adapter", "version"),
    Counter("adapter_requests", "Requests begun. By adapter version.", lambda served: served.requests),
    Counter(
        "adapter_prompt_tokens",
        "Prompt tokens of finished requests. By adapter version.",
        lambda served: served.prompt_tokens,
    ),
    Counter(
        "adapter_generation_tokens", "Tokens generated. By adapter version.", lambda served: served.generation_tokens
    ),
    Summary(
        "adapter_request_latency_seconds",
        "Time from arrival to last token, by adapter version.",
        lambda served: (served.finished, served.latency_s),
    ),
)

# -- keys ------------------------------------------------------------------------------------------

KEYS: Table[Account] = Table(
    ("key",),
    Gauge("key_requests_running", "Requests under way, by key.", lambda account: account.running),
    Counter("key_requests", "Requests for answers that began, by key.", lambda account: account.requests),
    Counter("key_requests_refused", "Requests that a limit of their key refused.", lambda account: account.refused),
    Counter("key_prompt_tokens", "Tokens of prompts, by key.", lambda account: account.prompt_tokens),
    Counter("key_generation_tokens", "Tokens generated, by key.", lambda account: account.completion_tokens),
)

# -- training --------------------------------------------------------------------------------------


def _updated(figure: str) -> Callable[[TrainingStatus], float | None]:
    """Reads a figure of the last update; None if there was none."""
    return lambda status: status.metrics.get(figure)


def _evaluated(figure: str) -> Callable[[TrainingStatus], float | None]:
    """Reads a figure of the last evaluation; None if there was none."""
    return lambda status: None if status.evaluation is None else float(getattr(status.evaluation, figure))


COLLECTED: Table[TrainingStatus] = Table(
    ("adapter",),
    # A gauge, although it only grows: Prometheus appends _total to a counter's name, and this name is fixed.
    Gauge(
        "rl_trajectories_collected", "Trajectories collected; only grows.", lambda status: status.trajectories_collected
    ),
)
TRAINING: Table[TrainingStatus] = Table(
    ("adapter",),
    Gauge(
        "rl_trajectories_waiting", "Trajectories that wait for a reward.", lambda status: status.trajectories_waiting
    ),
    Gauge("rl_groups_open", "Groups that wait for more answers.", lambda status: status.groups_open),
    Gauge("rl_groups_ready", "Complete groups that wait for an update.", lambda status: status.groups_ready),
    Gauge("rl_step", "Optimizer steps of the policy.", lambda status: status.step),
    Gauge("rl_updates_per_second", "Recent rate of updates per second.", lambda status: status.updates_per_second),
    Gauge("rl_training_loss", "Loss of the last update.", _updated("loss")),
    Gauge("rl_reward_mean", "Mean reward of the last update.", _updated("reward_mean")),
    Gauge("rl_reward_std", "Standard deviation of rewards, last update.", _updated("reward_std")),
    Gauge("rl_reward_running_mean", "Running mean of rewards.", lambda status: status.reward_running_mean),
    Gauge(
        "rl_kl",
        "KL divergence from the base model in nats a token, last update; estimated unless it is part of the loss.",
        _updated("kl"),
    ),
    Gauge("rl_entropy", "Entropy in nats a token, last update.", _updated("entropy")),
    Gauge("rl_clip_fraction", "Share of tokens clipped, last update.", _updated("clip_fraction")),
    Gauge(
        "rl_dual_clip_fraction",
        "Share of tokens whose loss the dual clip bounds, last update.",
        _updated("dual_clip_fraction"),
    ),
    Gauge("rl_ratio", "Mean policy ratio, last update.", _updated("ratio_mean")),
    Gauge("rl_ratio_max", "Largest policy ratio of a token, last update.", _updated("ratio_max")),
    Gauge("rl_staleness", "Mean staleness in versions, last update.", _updated("staleness")),
    Gauge(
        "rl_largest_key_share",
        "Largest share of one API key in the last update, before its limit.",
        _updated("largest_key_share"),
    ),
    Gauge("rl_evaluation_mean", "Mean reward on the held-out tasks, last evaluation.", _evaluated("mean")),
    Gauge("rl_evaluation_low", "Lower bound of its 95 % confidence interval.", _evaluated("low")),
    Gauge("rl_evaluation_high", "Upper bound of its 95 % confidence interval.", _evaluated("high")),
    Gauge("rl_evaluation_answers", "Answers that were scored, last evaluation.", _evaluated("answers")),
    Gauge("rl_evaluation_step", "Optimizer steps of the version that was evaluated last.", _evaluated("step")),
    Gauge("rl_last_update_timestamp_seconds", "Unix time of the last update.", lambda status: status.last_update),
    Counter("rl_updates", "Optimizer updates made.", lambda status: status.updates_total),
    Gauge("rl_state", "1 for the current state.", lambda status: {status.state: 1}, by=("state",)),
    Counter("rl_dropped", "Trajectories dropped, by reason.", lambda status: status.drops, by=("reason",)),
    Counter("rl_skipped", "Updates skipped, by reason.", lambda status: status.skips, by=("reason",)),
    Counter(
        "rl_rollouts",
        "Tasks that the server has drawn by itself, by outcome.",
        lambda status: {} if status.rollouts is None else status.rollouts.outcomes,
        by=("reason",),
    ),
    Counter("rl_turns", "Turns of episodes: first, continued or apart.", lambda status: status.turns, by=("reason",)),
    Counter("rl_divergences", "Figures beyond their limits.", lambda status: status.diverged, by=("signal", "action")),
)
ALL: tuple[Table[Any], ...] = (
    *(ENGINE, BASES, QUEUE, ADAPTERS, VERSIONS, KEYS),
    *(COLLECTED, TRAINING),
)
