"""`/v1/stats`: what the server does now and did in the last minutes. The dashboard asks for it every second.
`/v1/usage`: what each key has used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Query
from pydantic import Field

from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.kv.device_memory import MemoryAccount
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import INT32_MAX, WireOutput, WireQuery
from mlx_parallm.server.api.ops import ServerMode, server_mode
from mlx_parallm.server.command_line import command_line
from mlx_parallm.server.limits import Account
from mlx_parallm.server.metrics import Counted, Interval, RecentValues
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.lessons.service import Lessons

router = Router()


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


class LoadLine(WireOutput):
    """The requests of one key, or for one adapter."""

    name: str
    """The key's name; or the adapter's, for all its versions together: `base` is the base model."""
    running: int
    """Requests under way."""
    requests: int
    """Requests that began in the last minute."""
    generated_tokens: int
    """Tokens generated for them in the last minute."""


class Load(WireOutput):
    """Who asks for how much: requests under way, and those of the last minute."""

    keys: list[LoadLine]
    """By key, the busiest first: of all keys for an admin key, else of the own one. Empty if the server needs none."""
    adapters: list[LoadLine]
    """By adapter, the busiest first."""
    errors: dict[str, int]
    """Error responses of the last minute, by HTTP status."""


class LessonLine(WireOutput):
    """The lesson that runs; `/v1/training/lesson` has all of it."""

    adapter: str
    """The adapter that it teaches."""
    state: str
    """As in `/v1/training/lesson`."""
    updates: int
    """Updates that it has made."""


class TrainedAdapter(WireOutput):
    """An adapter that is trained here."""

    name: str
    """The adapter's name."""
    state: str
    """As in `/v1/training/status`."""
    step: int
    """Optimizer steps so far."""
    last_update: float | None
    """Unix time of its last update; null before the first one."""


class TrainingShare(WireOutput):
    """How training shares the device."""

    target: float
    """Share of device time that training gets while requests run, 0 to 1. It also gets all idle time."""
    measured: float
    """The share that it had in the last window of 10 seconds."""
    adapters: list[TrainedAdapter]
    """The adapters that are trained, the default one first."""
    lesson: LessonLine | None
    """The lesson that runs; null if none does."""


class Stats(WireOutput):
    """What the server does now, and did in the last minutes."""

    object: Literal["stats"]
    """Always `stats`."""
    started_at: int
    """Unix time at which the server started. Intervals count from 1 after each start."""
    mode: ServerMode
    """As in `/server_info`."""
    command: str
    """The command line that started the server, with secrets masked; empty if another program did, and for keys with
    the role `inference`."""
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
    load: Load
    """Who asks for how much."""
    memory: Memory
    """Device memory now."""
    training: TrainingShare | None
    """null if the server does not train."""
    notices: list[str]
    """What the server does about short memory, and why training waits: a sentence for each; empty if all is well."""
    cluster: bool
    """Whether the server is a node of a cluster, which `/v1/cluster` shows."""
    intervals: Sequence[Interval]
    """The history after the interval that the client has, oldest first; at most 300 intervals."""


@router.get("/v1/stats", role=Role.INFERENCE)
async def stats(services: ServicesDep, query: Annotated[StatsQuery, Query()]) -> Stats:
    """What the server does now, and did in the last minutes: queue, latencies, memory, and how the device spent its
    time. Cheap enough to be asked for every second."""
    engine, key = services.engine.stats(), services.key
    required = services.accounts.ring.required
    return Stats(
        object="stats",
        started_at=services.started_at,
        mode=server_mode(services),
        command=services.path(command_line()),
        state=_state(services, engine),
        caller=Caller(name=key.name if required else "", role=key.role, required=required),
        models=[ModelLine(name=each.name, state=each.state.value) for each in services.models.statuses()],
        queue=_queue(services, engine),
        latency=Latency(
            first_token=_percentiles(services.metrics.recent_first_token),
            between_tokens=_percentiles(services.metrics.recent_inter_token),
        ),
        load=_load(services, required),
        memory=_memory(engine),
        training=_training(services, engine),
        notices=[*filter(None, (engine.stuck,)), *engine.machine.notices],
        cluster=services.cluster is not None,
        intervals=services.metrics.history.after(query.after),
    )


def _state(services: Services, stats: EngineStats) -> Literal["serving", "paused", "asleep", "draining", "dead"]:
    if not stats.alive:
        return "dead"
    if services.lifecycle.drain_begun.is_set():
        return "draining"
    if services.lifecycle.asleep:
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


def _load(services: Services, has_keys: bool) -> Load:
    key, counters = services.key, services.metrics.counters()
    grown = services.metrics.growth.until(counters)

    def shows(name: str) -> bool:
        return has_keys and (key.role is Role.ADMIN or name == key.name)

    return Load(
        keys=_lines("key", counters, grown, shows),
        adapters=_lines("version", counters, grown, key.sees),
        errors={name: count for (of, name, _), count in sorted(grown.items()) if of == "status" and name >= "400"},
    )


def _lines(
    kind: str, counters: Counter[Counted], grown: Counter[Counted], shows: Callable[[str], bool]
) -> list[LoadLine]:
    """The lines of keys or adapters, without those that have had nothing. The versions of an adapter make one."""
    running = {of: value for of, value in counters.items() if of[2] == "running"}
    found: Counter[tuple[str, str]] = Counter()
    for (of, name, what), value in {**grown, **running}.items():
        if of == kind and value:
            found[name.partition("@")[0], what] += value
    lines = [
        LoadLine(
            name=name,
            running=found[name, "running"],
            requests=found[name, "requests"],
            generated_tokens=found[name, "tokens"],
        )
        for name in {name for name, _ in found}
        if shows(name)
    ]
    return sorted(lines, key=lambda line: (-line.generated_tokens, -line.requests, line.name))


def _memory(stats: EngineStats) -> Memory:
    held = stats.memory_bytes
    return Memory(
        weights=held.get(MemoryAccount.WEIGHTS, 0),
        budget=stats.kv_bytes_budget,
        rows=held.get(MemoryAccount.ROWS, 0),
        cached_prefixes=held.get(MemoryAccount.PREFIXES, 0),
        free_blocks=held.get(MemoryAccount.FREE_BLOCKS, 0),
        adapters=held.get(MemoryAccount.ADAPTERS, 0),
        training=held.get(MemoryAccount.OPTIMIZER, 0) + held.get(MemoryAccount.MICRO_STEP, 0),
    )


def _training(services: Services, stats: EngineStats) -> TrainingShare | None:
    if services.training is None:
        return None
    trained = services.training_statuses()
    return TrainingShare(
        target=stats.schedule.training_time_share,
        measured=round(stats.training_share, 4),
        adapters=[
            TrainedAdapter(name=each.adapter, state=each.state, step=each.step, last_update=each.last_update)
            for each in trained
        ],
        lesson=_lesson(services),
    )


def _lesson(services: Services) -> LessonLine | None:
    lessons: Lessons | None = services.extra("lessons")
    card = lessons.card(services.key.reader) if lessons else None
    if card is None or not card.is_running:
        return None
    return LessonLine(adapter=card.adapter, state=card.state, updates=card.updates)


# -- usage of keys ---------------------------------------------------------------------------------


class KeyUsage(WireOutput):
    """What one key has used, and its limits."""

    key: str
    """The key's name; `api-key` for the one of `--api-key`, `anyone` if the server requires none."""
    role: str
    """`inference`, `train` or `admin`."""
    requests: int
    """Requests for answers that began."""
    running: int
    """Those under way."""
    refused: int
    """Requests that a limit of the key refused."""
    prompt_tokens: int
    """Tokens of prompts."""
    cached_tokens: int
    """Those of them that were taken from the prefix cache."""
    completion_tokens: int
    """Tokens of answers."""
    requests_per_minute: int | None
    """Most requests in a minute; null: no limit."""
    tokens_per_minute: int | None
    """Most tokens of prompts and answers in a minute; null: no limit."""
    max_concurrent: int | None
    """Most requests under way at a time; null: no limit."""


class UsageList(WireOutput):
    """The usage since the server started."""

    object: Literal["list"]
    since: int
    """When the server started, in Unix time."""
    data: list[KeyUsage]
    """The keys that have been used, by name."""


@router.get("/v1/usage", role=Role.INFERENCE)
async def usage(services: ServicesDep) -> UsageList:
    """What the key of this request has used since the server started; with an admin key, what every key has used."""
    accounts, key = services.accounts, services.key
    shown = accounts.all() if key.role is Role.ADMIN else [accounts.of(key)]
    return UsageList(object="list", since=services.started_at, data=list(map(_usage, shown)))


def _usage(account: Account) -> KeyUsage:
    key = account.key
    return KeyUsage(
        key=key.name,
        role=key.role,
        requests=account.requests,
        running=account.running,
        refused=account.refused,
        prompt_tokens=account.prompt_tokens,
        cached_tokens=account.cached_tokens,
        completion_tokens=account.completion_tokens,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_concurrent=key.max_concurrent,
    )
