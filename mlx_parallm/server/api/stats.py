"""`/v1/stats`: what the server does now and did in the last minutes. The dashboard asks for it every second."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from mlx_parallm.core import Account, EngineStats
from mlx_parallm.server.access.roles import Role
from mlx_parallm.server.api.fields import INT32_MAX, WireOutput, WireQuery
from mlx_parallm.server.api.ops import ServerMode, server_mode
from mlx_parallm.server.recent import Interval, RecentValues
from mlx_parallm.server.services import KeyDep, Services, ServicesDep

router = APIRouter()


class StatsQuery(WireQuery):
    """Which part of the history the answer has."""

    after: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """The number of the last interval that the client has; later ones are sent. 0 sends all that are kept."""


class Caller(WireOutput):
    """The key that asks."""

    name: str
    """The key's name; empty if the server needs no key."""
    role: Role
    """What it may do: inference, train or admin. admin, if the server needs no key."""
    required: bool
    """Whether the server needs a key."""


class ModelLine(WireOutput):
    """A base model."""

    name: str
    """The name that `model` accepts."""
    state: str
    """loaded, loading, leaving, idle (on the disk only) or failed."""


class Queue(WireOutput):
    """Sequences now, and how many there may be."""

    running: int
    """Sequences that have a row of the batch."""
    rows: int
    """Rows of the batch."""
    waiting: int
    """Sequences that wait for a row."""
    held: int
    """Sequences of all requests under way, those that are being read or tokenized included."""
    limit: int
    """Largest number of them. Further requests get 429."""


class Percentiles(WireOutput):
    """Latencies of the last minute, in seconds."""

    count: int
    """Number of values; at most 4,096 are kept."""
    p50: float
    """Half of the values are at most this."""
    p95: float
    """19 of 20 values are at most this."""
    p99: float
    """99 of 100 values are at most this."""


class Latency(WireOutput):
    """Latencies of the last minute; null without a value."""

    first_token: Percentiles | None
    """From a request's arrival to its first token; of requests that have ended."""
    between_tokens: Percentiles | None
    """Between two tokens of a sequence."""


class Memory(WireOutput):
    """Device memory by what holds it, in bytes."""

    weights: int
    """Weights of the base models. They are not part of the budget."""
    budget: int
    """What all of the following may take together."""
    rows: int
    """Keys and values that running sequences use."""
    cached_prefixes: int
    """Keys and values that only the prefix cache keeps."""
    free_blocks: int
    """Allocated for keys and values, and free."""
    adapters: int
    """The adapter bank, and copies of adapters that are not in it."""
    training: int
    """Optimizer states, gradients and the arrays of a micro-step."""


class IntervalObject(WireOutput):
    """About a second of the history. It is longer when one unit of device work takes longer."""

    number: int
    """Counts intervals from 1, without gaps."""
    at: float
    """Unix time of its end, in seconds."""
    seconds: float
    """Its length."""
    decode: float
    """Seconds of device time in which tokens were drawn."""
    prefill: float
    """Seconds of device time in which prompts were computed."""
    training: float
    """Seconds of device time of updates."""
    other: float
    """Seconds of device time in which adapters were copied into the bank, or a base model was loaded."""
    generated_tokens: int
    """Tokens generated."""
    prompt_tokens: int
    """Prompt tokens processed."""
    running: int
    """Sequences with a row, at its end."""
    waiting: int
    """Sequences without a row, at its end."""


class TrainedAdapter(WireOutput):
    """An adapter that is trained here."""

    name: str
    """The adapter's name."""
    state: str
    """As in `/v1/training/status`."""
    step: int
    """Optimizer steps so far."""


class TrainingShare(WireOutput):
    """How training shares the device."""

    target: float
    """Share of device time that training gets while requests run, 0 to 1. It also gets all idle time."""
    measured: float
    """The share that it had in the last window of 10 seconds."""
    adapters: list[TrainedAdapter]
    """The adapters that are trained, the default one first."""


class Stats(WireOutput):
    """What the server does now, and did in the last minutes."""

    object: Literal["stats"]
    """Always `stats`."""
    started_at: int
    """Unix time at which the server started. Intervals count from 1 after each start."""
    mode: ServerMode
    """As in `/server_info`."""
    state: Literal["serving", "paused", "asleep", "draining", "dead"]
    """What it does with requests now. dead: the device thread has stopped."""
    caller: Caller
    """Who asks, and what they may do."""
    models: list[ModelLine]
    """All base models, the first one first."""
    queue: Queue
    """Sequences now."""
    latency: Latency
    """Latencies of the last minute."""
    memory: Memory
    """Device memory now."""
    training: TrainingShare | None
    """null if the server does not train."""
    notices: list[str]
    """What the server does about short memory, and why training waits: a sentence for each; empty if all is well."""
    cluster: bool
    """Whether the server is a node of a cluster, which `/v1/cluster` shows."""
    intervals: list[IntervalObject]
    """The history after the interval that the client has, oldest first; at most 300 intervals."""


@router.get("/v1/stats")
async def stats(services: ServicesDep, key: KeyDep, query: Annotated[StatsQuery, Query()]) -> Stats:
    """What the server does now, and did in the last minutes: queue, latencies, memory, and how the device spent its
    time. Cheap enough to be asked for every second."""
    engine = services.engine.stats()
    required = services.accounts.ring.required
    return Stats(
        object="stats",
        started_at=services.started_at,
        mode=server_mode(services),
        state=_state(services, engine),
        caller=Caller(name=key.name if required else "", role=key.role, required=required),
        models=[ModelLine(name=each.name, state=each.state.value) for each in services.models.statuses()],
        queue=_queue(services, engine),
        latency=Latency(
            first_token=_percentiles(services.metrics.recent_first_token),
            between_tokens=_percentiles(services.metrics.recent_inter_token),
        ),
        memory=_memory(engine),
        training=_training(services, engine),
        notices=list(engine.machine.notices),
        cluster=services.cluster is not None,
        intervals=[_interval(each) for each in services.history.after(query.after)],
    )


def _state(services: Services, stats: EngineStats) -> Literal["serving", "paused", "asleep", "draining", "dead"]:
    if not stats.alive:
        return "dead"
    if services.lifecycle.drain_begun.is_set():
        return "draining"
    if services.sleep.asleep:
        return "asleep"
    return "paused" if stats.paused else "serving"


def _queue(services: Services, stats: EngineStats) -> Queue:
    return Queue(
        running=stats.running,
        rows=services.config.max_batch_size,
        waiting=stats.waiting,
        held=services.gate.held,
        limit=services.gate.limit,
    )


def _percentiles(values: RecentValues) -> Percentiles | None:
    ranked = values.ranked()
    if not ranked:
        return None
    p50, p95, p99 = (round(ranked[math.ceil(part * len(ranked)) - 1], 5) for part in (0.5, 0.95, 0.99))
    return Percentiles(count=len(ranked), p50=p50, p95=p95, p99=p99)


def _memory(stats: EngineStats) -> Memory:
    held = stats.memory_bytes
    return Memory(
        weights=held.get(Account.WEIGHTS, 0),
        budget=stats.kv_bytes_budget,
        rows=held.get(Account.ROWS, 0),
        cached_prefixes=held.get(Account.PREFIXES, 0),
        free_blocks=held.get(Account.FREE_BLOCKS, 0),
        adapters=held.get(Account.ADAPTERS, 0),
        training=held.get(Account.OPTIMIZER, 0) + held.get(Account.MICRO_STEP, 0),
    )


def _training(services: Services, stats: EngineStats) -> TrainingShare | None:
    if services.training is None:
        return None
    trained = services.training_statuses()
    return TrainingShare(
        target=stats.schedule.training_time_share,
        measured=round(stats.training_share, 4),
        adapters=[TrainedAdapter(name=each.adapter, state=each.state, step=each.step) for each in trained],
    )


def _interval(interval: Interval) -> IntervalObject:
    device = interval.device
    return IntervalObject(
        number=interval.number,
        at=round(interval.at, 3),
        seconds=round(interval.seconds, 3),
        decode=round(device.decode, 3),
        prefill=round(device.prefill, 3),
        training=round(device.training, 3),
        other=round(device.other, 3),
        generated_tokens=interval.generated_tokens,
        prompt_tokens=interval.prompt_tokens,
        running=interval.running,
        waiting=interval.waiting,
    )
