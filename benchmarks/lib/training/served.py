"""Compares a real server that does not train with the same server at several shares of its time for training.

    8 clients stream ─────────────────────────────────────────────────────────────────────────────────────▶
    │ fill │ inference only │ wait │ training 5 % │ wait │ inference + RL │ … │ training priority │ wait │ …
                            └ updates, one always waiting ──────────────────────────────────────┘

All serve the adapter that is trained, so they differ only in training. A window with training goes from the end
of one update to the end of another, so that it has whole updates. When the clients have ended, updates are counted
once more, with the device to themselves.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib import peers, throughput
from benchmarks.lib.figures import percentile
from benchmarks.lib.load import HOST
from benchmarks.lib.training.clients import Clients, Updates

SERVING, LITTLE, LEARNING, QUARTER, PRIORITY = (
    "inference only",
    "training 5 %",
    "inference + RL",
    "training 25 %",
    "training priority",
)
SHARES = {LITTLE: 0.05, LEARNING: 0.12, QUARTER: 0.25, PRIORITY: 0.5}
"""Shares of the device's time that training gets beside requests. Two of them are modes of the server by name."""
KINDS = (SERVING, *SHARES)
CLIENTS = 8
WINDOW_S, QUICK_WINDOW_S, SETTLE_S = 60.0, 15.0, 5.0
LIMIT_S = 900.0
"""Longest time of one answer in seconds. An update that waits for another one takes minutes."""

FLAGS = ("--enable-rl-training", "--lora-rank", "16", "--lora-alpha", "32", "--kv-cache-memory", "512MB")
"""The prefix cache is small, so that it is full when the first window begins. Until then arenas grow, which would cost
one window more than another (`prefix.py` measures growth)."""

FILL_S = 60.0
"""For so long the clients fill the prefix cache before the first window."""

GAPS, LARGEST_GAP = "mlx_parallm_decode_gap_seconds_bucket", "mlx_parallm_decode_gap_largest_seconds"


@dataclass(frozen=True, slots=True)
class Gaps:
    """The server's decode gaps since its start. `counts`: number of gaps of at most so many seconds."""

    counts: Mapping[float, float]
    largest: float

    def longest_since(self, before: "Gaps") -> float:
        """Longest gap since `before`: exact if it is the longest of all, otherwise the upper bound of its histogram
        bin."""
        if self.largest > before.largest:
            return self.largest
        new = {bound: count - before.counts[bound] for bound, count in self.counts.items()}
        return min([self.largest, *(bound for bound, count in new.items() if count == max(new.values()))])


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin or end of a window. `at`: `time.perf_counter` time. `training_s`: device time of training since the
    start."""

    at: float
    updates: int
    training_s: float
    gaps: Gaps


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements of one window. `gap_s`, `gap_99_s`, `longest_gap_s`: median, 99th percentile and longest of the
    times between two tokens of one answer; `first_99_s`: 99th percentile of the times to the first token; `stall_s`:
    the server's longest decode gap.
    """

    kind: str
    seconds: float
    tokens: int
    gap_s: float
    gap_99_s: float
    longest_gap_s: float
    first_99_s: float
    stall_s: float
    updates: int
    training_s: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def updates_per_minute(self) -> float:
        return 60 * self.updates / self.seconds

    @property
    def share(self) -> float:
        """Training's share of the time."""
        return self.training_s / self.seconds


@dataclass(slots=True)
class Served:
    """All windows. `budget_s`: the server's limit of a stall. `update_device_s`: device time of each update.
    `updates_alone`: updates a minute in windows without requests."""

    budget_s: float = 0.0
    windows: list[Window] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    update_device_s: list[float] = field(default_factory=list)
    updates_alone: list[float] = field(default_factory=list)

    def of(self, kind: str) -> list[Window]:
        """The windows of one mode, one per repeat."""
        return [window for window in self.windows if window.kind == kind]


async def measure(logs: Path, repeats: int, quick: bool) -> Served:
    """Runs the benchmark on a server of the bundled model."""
    async with peers.our_server(None, logs, FLAGS) as server:
        await throughput.warm_up(server)
        with server.awake():
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}", timeout=LIMIT_S) as http:
                return await _Bench(http, server.port, QUICK_WINDOW_S if quick else WINDOW_S).run(repeats)


class _Bench:
    def __init__(self, http: httpx.AsyncClient, port: int, window_s: float) -> None:
        self._http = http
        self._window_s = window_s
        self._clients = Clients(port, CLIENTS)
        self._updates = Updates(http)
        self._served = Served()

    async def run(self, repeats: int) -> Served:
        await self._updates.one()  # from now on, requests use the adapter
        self._served.budget_s = (await self._get("/v1/training/schedule")).json()["max_decode_stall_ms"] / 1000
        async with asyncio.TaskGroup() as group:
            streaming = group.create_task(self._clients.run())
            await asyncio.sleep(FILL_S)
            for _ in range(repeats):
                await self._repeat()
            streaming.cancel()
        async with self._updates.queued():
            self._served.updates_alone = [await self._updates_alone() for _ in range(repeats)]
        self._served.errors = self._clients.errors
        self._served.update_device_s = [metrics["device_seconds"] for metrics in self._updates.metrics]
        return self._served

    async def _repeat(self) -> None:
        await self._window(SERVING)
        async with self._updates.queued():
            for kind, share in SHARES.items():
                schedule = {"training_time_share": share}
                (await self._http.post("/v1/training/schedule", json=schedule)).raise_for_status()
                await self._window(kind)

    async def _window(self, kind: str) -> None:
        """Measures one window. A schedule holds from the next update on, so this waits for the running one first."""
        await asyncio.sleep(SETTLE_S)
        await self._updates.next_end()
        begin = await self._mark()
        await asyncio.sleep(self._window_s)
        await self._updates.next_end()
        window = self._between(kind, begin, await self._mark())
        self._served.windows.append(window)
        print(
            f"  {kind:<17} {window.rate:6.1f} tok/s, token after {1e3 * window.gap_s:4.0f} ms, 99 % within "
            f"{1e3 * window.gap_99_s:4.0f}, all {1e3 * window.longest_gap_s:4.0f}; "
            f"{window.updates_per_minute:5.2f} updates a minute, "
            f"{100 * window.share:4.1f} % of the time",
            flush=True,
        )

    async def _updates_alone(self) -> float:
        """Updates a minute, in a window without requests."""
        await self._updates.next_end()
        began, before = time.perf_counter(), len(self._updates.ended)
        await asyncio.sleep(self._window_s)
        await self._updates.next_end()
        rate = 60 * (len(self._updates.ended) - before) / (time.perf_counter() - began)
        print(f"  no requests       {rate:5.2f} updates a minute", flush=True)
        return rate

    def _between(self, kind: str, begin: Mark, end: Mark) -> Window:
        gaps = list(self._clients.gaps(begin.at, end.at))
        return Window(
            kind=kind,
            seconds=end.at - begin.at,
            tokens=self._clients.tokens(begin.at, end.at),
            gap_s=median(gaps),
            gap_99_s=percentile(gaps, 99),
            longest_gap_s=max(gaps),
            first_99_s=percentile(self._clients.first_tokens(begin.at, end.at), 99),
            stall_s=end.gaps.longest_since(begin.gaps),
            updates=end.updates - begin.updates,
            training_s=end.training_s - begin.training_s,
        )

    async def _mark(self) -> Mark:
        at, updates = time.perf_counter(), len(self._updates.ended)
        state, metrics = await self._get("/debug/state"), await self._get("/metrics")
        training_s = state.json()["engine"]["detail"]["training_seconds_total"]
        return Mark(at, updates, training_s, _gaps(metrics.text))

    async def _get(self, path: str) -> httpx.Response:
        return (await self._http.get(path)).raise_for_status()


def _gaps(metrics: str) -> Gaps:
    """Reads the gaps from the text of /metrics."""
    read = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    counts = {float(sample.labels["le"]): sample.value for sample in read if sample.name == GAPS}
    return Gaps(counts, next(sample.value for sample in read if sample.name == LARGEST_GAP))
