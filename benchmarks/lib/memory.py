"""Watches a server's memory while it works: MLX's peak, the KV tokens in use at that time, and the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.lib.load import get_json
from benchmarks.lib.machine import resident_bytes
from benchmarks.lib.peers import Peer

POLL_S = 0.25


@dataclass(slots=True)
class Memory:
    """Bytes and KV tokens. MLX's peak is reset after loading, so it covers everything that the server does.

    `kv_tokens_at_peak`: tokens in use when the peak last rose. `kv_cached_at_peak`: bytes of prefixes that only the
    prefix cache kept at that time. `kv_tokens_most`: the largest number of tokens seen.
    """

    weight_bytes: int = 0
    peak_bytes: int = 0
    kv_tokens_at_peak: int = 0
    kv_cached_at_peak: int = 0
    kv_tokens_most: int = 0
    kv_held_bytes_most: int = 0
    resident_bytes_most: int = 0
    _last_kv_tokens: int = 0
    _last_cached: int = 0

    @property
    def above_weights_bytes(self) -> int:
        return self.peak_bytes - self.weight_bytes

    def record(self) -> dict[str, int]:
        """The measurements as JSON."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    def look(self, state: dict[str, Any], resident: int) -> None:
        """Adds one answer of /debug/state. If the peak rose, it did so after the answer before."""
        engine = state["engine"]
        peak, kv_tokens = engine["detail"]["mlx_memory_bytes"]["peak"], engine["kv_tokens_used"]
        cached = engine["kv_bytes_cached"]
        if peak > self.peak_bytes:
            self.peak_bytes = peak
            self.kv_tokens_at_peak = max(kv_tokens, self._last_kv_tokens)
            self.kv_cached_at_peak = max(cached, self._last_cached)
        self.weight_bytes = state["model"]["weight_bytes"]
        self.kv_tokens_most = max(self.kv_tokens_most, kv_tokens)
        self.kv_held_bytes_most = max(self.kv_held_bytes_most, engine["kv_bytes_held"])
        self.resident_bytes_most = max(self.resident_bytes_most, resident)
        self._last_kv_tokens, self._last_cached = kv_tokens, cached


@asynccontextmanager
async def watched(peer: Peer) -> AsyncIterator[Memory]:
    """Reads the server's state four times a second while the block runs, and once after it. A failed read ends the
    block."""
    memory = Memory()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_watch(peer, memory))
        yield memory
        watching.cancel()
    await _look(peer, memory)


async def _watch(peer: Peer, memory: Memory) -> None:
    while True:
        await _look(peer, memory)
        await asyncio.sleep(POLL_S)


async def _look(peer: Peer, memory: Memory) -> None:
    memory.look(await get_json(peer.port, "/debug/state"), resident_bytes(peer.process.pid))
