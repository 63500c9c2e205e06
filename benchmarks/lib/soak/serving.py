"""The server of a soak: its model, adapters and keys, its start and its end, and what is seen of its process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib.durability.processes import free_port, small_model
from benchmarks.lib.machine import processor_seconds, resident_bytes
from benchmarks.lib.soak.asking import COMPLETIONS, ask
from benchmarks.lib.soak.changing import REWARDED
from benchmarks.lib.soak.good import ADAPTERS, SWAPPED, TRAINED
from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.server.access import Role, new_key, write_keys

T = TypeVar("T")
PROGRAM = "benchmarks.lib.programs.counted_server"
READY_LIMIT_S, END_LIMIT_S, QUIET_LIMIT_S = 180.0, 60.0, 60.0
MODEL, OTHER = "model", "other"
FLAGS = (
    *("--enable-rl-training", "--atropos-api", "--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "1e-4"),
    *("--update-frequency", "4", "--checkpoint-interval", "10", "--journal-updates", "100"),
    *("--max-batch-size", "16", "--max-queued", "64", "--kv-cache-memory", "48MB"),
    *("--trajectory-buffer-size", "200", "--idle-unload", "10", "--logprobs-mode", "processed_logprobs"),
)
VARIABLES = {
    "MLX_PARALLM_DEBUG__CHECK_WHEN_IDLE": "true",  # a resource that is not accounted for ends the process
    "MLX_PARALLM_RL_TRAINING__DIVERGENCE__REWARD__LIMIT": "1000",  # rewards are random
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # glibc keeps what is freed, and looks like a leak
    "MALLOC_MMAP_THRESHOLD_": "262144",
}
GIVEN = [
    {"prompt_token_ids": [5, 6], "completion_token_ids": [token, 2], "reward": token - 8, "group_id": "a"}
    for token in (8, 9)
]
GROUP = {"prompt": "a b c", "n": 8, "max_tokens": 8, "collect_trajectory": True}
"""As many answers as an update under load has on average, so that its row of the journal is as large."""


@dataclass(frozen=True, slots=True)
class Point:
    """What was seen of the server's process at one time. `children`: resident bytes of its child processes. `active`:
    bytes of MLX's arrays. `journal`: bytes of the file and of its log. `others`: cores that other programs of the
    machine took since the last point."""

    at: float
    process: int
    others: float
    resident: int
    children: int
    threads: int
    descriptors: int
    arrays: int
    objects: int
    active: int
    journal: int


def prepare(site: Path) -> dict[str, str]:
    """Writes two models, adapters and keys. Returns the keys by name."""
    for name in (MODEL, OTHER):
        small_model(site / name)
    subprocess.run([sys.executable, "-m", "benchmarks.lib.soak.adapters", str(site), *ADAPTERS], check=True)
    roles = {"good": Role.INFERENCE, "hostile": Role.INFERENCE, "train": Role.TRAIN, "admin": Role.ADMIN}
    made = {name: new_key(name, role) for name, role in roles.items()}
    write_keys(site / "keys.json", [key for key, _ in made.values()])
    return {name: secret for name, (_, secret) in made.items()}


@dataclass(slots=True)
class Server:
    """A server of one run, which may be started again and again. `log`: what it wrote."""

    site: Path
    run: Path
    keys: dict[str, str]
    port: int = field(default_factory=free_port)
    others: "OtherPrograms" = field(default_factory=lambda: OtherPrograms())
    process: subprocess.Popen[bytes] | None = None
    number: int = 0

    @property
    def log(self) -> Path:
        return self.run.with_suffix(".log")

    async def start(self) -> None:
        paths = ("--model-path", str(self.site / MODEL), str(self.site / OTHER), "--checkpoint-dir", str(self.run))
        files = ("--adapter-dir", str(self.site / "adapters"), "--keys-file", str(self.site / "keys.json"))
        audit = ("--audit-log", str(self.run.with_suffix(".audit")), "--port", str(self.port))
        command = [sys.executable, "-m", PROGRAM, str(self._counts), *paths, *files, *audit, *FLAGS]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **VARIABLES})
        self.number += 1
        until = time.monotonic() + READY_LIMIT_S
        while (await ask(self.port, "/ready")).status != 200:
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit(f"the server is not ready: {self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)

    async def end(self) -> tuple[int, float]:
        """Sends SIGTERM. Returns the exit code and the seconds until the end."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        while self.process.poll() is None and time.monotonic() < began + END_LIMIT_S:
            await asyncio.sleep(0.05)
        self.kill()
        return self.process.wait(), time.monotonic() - began

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    async def fill_journal(self, updates: int) -> None:
        """Returns when there are so many updates. The first ones have rewards from two other sources than the rest,
        because a row of the journal has what is known of each source, and should be as large as under load."""
        await self._post("/v1/training/update", trajectories=GIVEN)
        answer = await self._post(COMPLETIONS, **GROUP)
        for at, trajectory in enumerate(answer["trajectory_ids"]):
            await self._post("/v1/training/feedback", trajectory_id=trajectory, score=at % 2)
        while (await self.get("/v1/training/status"))["step"] < updates:
            await self._post(COMPLETIONS, **GROUP, **REWARDED)

    async def come_to_rest(self) -> None:
        """After it, the newest version of each adapter is ready for requests, and the best one is on the disk: both
        take memory, sometimes."""
        await self._post("/v1/training/checkpoint")
        for name in (*ADAPTERS, SWAPPED, TRAINED):
            await self._post(COMPLETIONS, model=name, prompt="a", max_tokens=1)

    async def _post(self, path: str, **body: Any) -> Any:
        reply = await ask(self.port, path, body, self.keys["admin"])
        if reply.status != 200:
            raise SystemExit(reply.about(path, body))
        return reply.json()

    async def get(self, path: str) -> Any:
        """The decoded answer to the admin, or its text."""
        body = (await ask(self.port, path, key=self.keys["admin"])).body
        return json.loads(body) if body.startswith((b"{", b"[")) else body.decode()

    # -- what is seen ------------------------------------------------------------------------------

    async def point(self, count: int = signal.SIGUSR1) -> Point:
        """What is seen now, with the counts of the last signal. `count`: the signal for the next ones."""
        assert self.process is not None
        pid, counts = self.process.pid, self.counts()
        self.process.send_signal(count)
        state = await self.get("/debug/state")
        proc = Path(f"/proc/{pid}")
        threads = [int(line.split()[1]) for line in (proc / "status").read_text().splitlines() if "Threads" in line]
        journal = [self.run / f"{JOURNAL}{end}" for end in ("", "-wal")]
        return Point(
            time.monotonic(),
            self.number,
            self.others.since((os.getpid(), *children(os.getpid()), *children(pid))),
            resident_bytes(pid),
            sum(_of_running(children(pid), resident_bytes).values()),
            threads[0],
            len(list((proc / "fd").iterdir())),
            counts["arrays"],
            counts["objects"],
            state["engine"]["detail"]["mlx_memory_bytes"]["active"],
            sum(file.stat().st_size for file in journal if file.exists()),
        )

    @property
    def _counts(self) -> Path:
        return self.run.with_suffix(".counts")

    def counts(self) -> dict[str, Any]:
        """The counts of the last SIGUSR1."""
        return json.loads(self._counts.read_text()) if self._counts.exists() else {"arrays": 0, "objects": 0}

    async def left_behind(self) -> dict[str, float]:
        """What a server without requests still holds of them. Waits until it is nothing, but not for ever."""
        until = time.monotonic() + QUIET_LIMIT_S
        while (held := await self._held()) and time.monotonic() < until:
            await asyncio.sleep(0.5)
        return held

    async def _held(self) -> dict[str, float]:
        state = await self.get("/debug/state")
        held = {name: state["engine"][name] for name in ("running", "waiting", "kv_bytes_held", "kv_tokens_used")}
        held["sequences_held"] = state["server"]["sequences_held"]
        for line in (await self.get("/metrics")).splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(("mlx_parallm_lora_slots_pinned", "mlx_parallm_key_requests_running")):
                held[name] = float(value)
        return {name: value for name, value in held.items() if value}


class OtherPrograms:
    """Counts the cores that other programs take."""

    def __init__(self) -> None:
        self._at, self._busy, self._ours = time.monotonic(), _busy_seconds(), dict[int, float]()

    def since(self, ours: Sequence[int]) -> float:
        """Cores that all processes but these took since the last call."""
        at, busy, spent = time.monotonic(), _busy_seconds(), _of_running(ours, processor_seconds)
        mine = sum(seconds - self._ours.get(pid, 0.0) for pid, seconds in spent.items())
        cores = (busy - self._busy - mine) / (at - self._at)
        self._at, self._busy, self._ours = at, busy, spent
        return round(cores, 3)


def _of_running(pids: Sequence[int], read: Callable[[int], T]) -> dict[int, T]:
    """What is read of each of these processes that has not ended."""
    found = dict[int, T]()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = read(pid)
    return found


def _busy_seconds() -> float:
    """Processor time that all processes of the machine have taken."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
